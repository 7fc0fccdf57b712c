"""Updates of optimizers as operators: one call for each parameter, with all tensors that it reads and writes.

Each runs the function of torch's own optimizer (`torch.optim.sgd.sgd`, `torch.optim.adam.adam`). So a traced update has
torch's arithmetic in torch's order, and uses torch's fused kernels if they take the tensors. Results are new tensors.
`IN_PLACE` maps each operator to its twin that writes over its operands. `MANY` maps the twin to an operator that
updates many parameters in a call.

Hyper-parameters come in a vector, float64 [k] on the CPU, so that schedulers can change them without another trace:

    sgd:   lr, weight_decay, momentum, dampening, whether this is the first step (1 or 0)
    adam:  lr, beta1, beta2, eps, weight_decay, steps taken before this one

`scale`, a scalar or None, multiplies the gradient first, to clip it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.adam import adam as run_adam
from torch.optim.sgd import sgd as run_sgd

from autoshard.kernels.library import accumulation_dtype, define

Tensors = list[Tensor]

SGD_HYPER = ("lr", "weight_decay", "momentum", "dampening", "first")
ADAM_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")

_SGD_ON_CPUS = (torch.float32, torch.float64)
"""Dtypes of torch's fused SGD on CPUs. In narrower dtypes, torch 2.13's kernel updates only the last few elements,
which do not fill a vector, and its momentum is wrong (pytorch#191763)."""

_ADAM_ON_CPUS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of torch's fused Adam on CPUs. It computes in float32 and rounds narrower dtypes once. The plain loop rounds
after each of a dozen operators. Its bfloat16 is up to 4 units in the last place from the exact update."""

_SCALED_AT_ONCE = 1 << 26
"""Bytes of parameters whose gradients are scaled at once, if there are several."""


def sgd_(params: Tensors, grads: Tensors, scale: Tensor | None, hyper: Tensor, maximize: bool) -> None:
    """Gradient descent: p -= lr (g + weight_decay p), in place.

    Args:
        params, grads: lists of equal length; a gradient has the shape and dtype of its parameter.
        scale: scalar that multiplies gradients, or None.
        hyper: `SGD_HYPER`, float64 [5].
        maximize: ascend.
    """
    _run_sgd(params, grads, None, scale, hyper, nesterov=False, maximize=maximize)


def momentum_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    scale: Tensor | None,
    hyper: Tensor,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Gradient descent with momentum, in place; the first step sets the buffers to the gradients. Arguments: `sgd_`."""
    _run_sgd(params, grads, momentum_buffers, scale, hyper, nesterov=nesterov, maximize=maximize)


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    scale: Tensor | None,
    hyper: Tensor,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Adam (Kingma, Ba 2015), or AdamW (Loshchilov, Hutter 2019) if `decoupled`, in place.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: lists of equal length, with the shapes and dtypes of the parameters.
        scale: scalar that multiplies gradients, or None.
        hyper: `ADAM_HYPER`, float64 [6].
        decoupled: weight decay shrinks the parameter itself instead of changing the gradient.
        maximize: ascend.
    """
    _run_adam([params, grads, exp_avgs, exp_avg_sqs], scale, hyper, decoupled=decoupled, maximize=maximize)


def amsgrad_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    scale: Tensor | None,
    hyper: Tensor,
    decoupled: bool,
    maximize: bool,
) -> None:
    """AMSGrad (Reddi, Kale, Kumar 2018), in place; see `adam_`."""
    groups = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    _run_adam(groups, scale, hyper, decoupled=decoupled, maximize=maximize)


def _run_sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors | None,
    scale: Tensor | None,
    hyper: Tensor,
    *,
    nesterov: bool,
    maximize: bool,
) -> None:
    options = _values(SGD_HYPER, hyper)
    is_first = options.pop("first") > 0 and buffers is not None
    if buffers is None:
        options |= {"momentum": 0.0, "dampening": 0.0}
    groups = [params, grads] if buffers is None else [params, grads, buffers]
    for fused, (some, their_grads, *rest) in _calls(groups, scale, _SGD_ON_CPUS, may_fuse=not is_first):
        held: list[Tensor | None] = list(rest[0]) if rest and not is_first else [None] * len(some)
        run_sgd(some, their_grads, held, foreach=False, fused=fused, nesterov=nesterov, maximize=maximize, **options)
        if is_first:
            for buffer, made in zip(rest[0], held, strict=True):
                assert made is not None, "the first step makes buffers"
                buffer.copy_(made)


def _run_adam(
    groups: Sequence[Tensors], scale: Tensor | None, hyper: Tensor, *, decoupled: bool, maximize: bool
) -> None:
    options = _values(ADAM_HYPER, hyper)
    taken = options.pop("step")
    for fused, (params, grads, exp_avgs, exp_avg_sqs, *rest) in _calls(groups, scale, _ADAM_ON_CPUS):
        steps = torch.full((len(params),), taken, dtype=torch.float32, device=params[0].device if fused else "cpu")
        run_adam(
            *(params, grads, exp_avgs, exp_avg_sqs),
            rest[0] if rest else [],
            list(steps.unbind()),
            foreach=False,
            fused=fused,
            amsgrad=bool(rest),
            decoupled_weight_decay=decoupled,
            maximize=maximize,
            **options,
        )


def _values(names: Sequence[str], hyper: Tensor) -> dict[str, Any]:
    return dict(zip(names, hyper.tolist(), strict=True))


def _calls(
    groups: Sequence[Tensors], scale: Tensor | None, on_cpus: Collection[torch.dtype], *, may_fuse: bool = True
) -> Iterator[tuple[bool, list[Tensors]]]:
    """The calls that update parameters, fused or not, with the members of each group that a call takes.

    Gradients, the second group, are scaled and contiguous. Scaled gradients are copies, so a call takes only a few.
    """
    members = list(zip(*groups, strict=True))
    fused = [may_fuse and _may_fuse(on_cpus, *member) for member in members]
    for is_fused in (True, False):
        chosen = [member for member, flag in zip(members, fused, strict=True) if flag is is_fused]
        for part in _parts(chosen) if scale is not None else [chosen] if chosen else []:
            params, grads, *rest = (list(group) for group in zip(*part, strict=True))
            yield is_fused, [params, [_scaled(grad, scale) for grad in grads], *rest]


def _parts(members: Sequence[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Members in order, split into parts of at most `_SCALED_AT_ONCE` bytes of parameters."""
    part: list[tuple[Tensor, ...]] = []
    taken = 0
    for member in members:
        if part and taken + member[0].nbytes > _SCALED_AT_ONCE:
            yield part
            part, taken = [], 0
        part.append(member)
        taken += member[0].nbytes
    if part:
        yield part


def _scaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    return grad.contiguous() if scale is None else (grad * scale).contiguous()


def _may_fuse(on_cpus: Collection[torch.dtype], param: Tensor, grad: Tensor, *state: Tensor) -> bool:
    """Whether torch's fused kernels take these tensors: contiguous ones, on CPUs and CUDA.

    The gradient is made contiguous for them. `on_cpus` lists the kernel's dtypes on a CPU.
    """
    if param.device.type not in ("cpu", "cuda") or (param.is_cpu and param.dtype not in on_cpus):
        return False
    return all(tensor.is_contiguous() and tensor.is_floating_point() for tensor in (param, *state))


def _out_of_place(in_place: Callable[..., None], written: Sequence[int]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The function that returns the operands at `written` as `in_place` leaves them, in new tensors."""

    def run(*args: object) -> Tensor | tuple[Tensor, ...]:
        values = list(args)
        results = tuple(_copy(values[index]) for index in written)
        for index, result in zip(written, results, strict=True):
            values[index] = result
        in_place(*values)
        return results[0] if len(results) == 1 else results

    return run


def _copy(value: object) -> Tensor:
    assert isinstance(value, Tensor), "written operands are tensors"
    return value.clone(memory_format=torch.contiguous_format)


def _empty(written: Sequence[int]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Empty results of an out-of-place update."""

    def fake(*args: object) -> Tensor | tuple[Tensor, ...]:
        operands = [args[index] for index in written]
        results = tuple(value.new_empty(value.shape) for value in operands if isinstance(value, Tensor))
        return results[0] if len(results) == 1 else results

    return fake


@dataclass(frozen=True, slots=True)
class _UpdateTwins:
    """An update of one parameter, its in-place twin, and the twin that updates many in a call."""

    functional: OpOverload
    in_place: OpOverload
    many: OpOverload


def _define(name: str, in_place: Callable[..., None], state: Sequence[str], flags: Sequence[str]) -> _UpdateTwins:
    """Define an update and its twins, which write `param` and `state`; the gradient stands between these."""
    tensors = ["param", "grad", *state]
    written = [index for index, tensor in enumerate(tensors) if tensor != "grad"]
    rest = ["Tensor? scale", "Tensor hyper", *(f"bool {flag}" for flag in flags)]

    def schema(kind: str, plural: str = "", *, writes: bool) -> str:
        letters = dict(zip(written, "abcd", strict=False)) if writes else {}
        types = [f"Tensor({letters[i]}!){kind}" if i in letters else f"Tensor{kind}" for i in range(len(tensors))]
        return ", ".join([*(f"{type_} {name}{plural}" for type_, name in zip(types, tensors, strict=True)), *rest])

    def one(*args: Any) -> None:
        in_place(*([tensor] for tensor in args[: len(tensors)]), *args[len(tensors) :])

    returns = "Tensor" if len(written) == 1 else f"({', '.join(['Tensor'] * len(written))})"
    plain = f"({schema('', writes=False)}) -> {returns}"
    return _UpdateTwins(
        define(name, plain, _out_of_place(one, written), _empty(written)),
        define(f"{name}_", f"({schema('', writes=True)}) -> ()", one, lambda *args: None),
        define(f"{name}s_", f"({schema('[]', 's', writes=True)}) -> ()", in_place, lambda *args: None),
    )


def sum_of_squares_reference(x: Tensor) -> Tensor:
    """The squared Euclidean norm of all elements: a scalar, float32 for narrower floats."""
    return torch.linalg.vector_norm(x, dtype=accumulation_dtype(x.dtype)).square()


sum_of_squares = define(
    "sum_of_squares",
    "(Tensor x) -> Tensor",
    sum_of_squares_reference,
    lambda x: x.new_empty((), dtype=accumulation_dtype(x.dtype)),
)

_SGD = _define("sgd_update", sgd_, (), ("maximize",))
_MOMENTUM = _define("momentum_update", momentum_, ("momentum_buffer",), ("nesterov", "maximize"))
_ADAM = _define("adam_update", adam_, ("exp_avg", "exp_avg_sq"), ("decoupled", "maximize"))
_AMSGRAD = _define("amsgrad_update", amsgrad_, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("decoupled", "maximize"))

_UPDATES = (_SGD, _MOMENTUM, _ADAM, _AMSGRAD)
sgd_update, momentum_update, adam_update, amsgrad_update = (update.functional for update in _UPDATES)

IN_PLACE: Mapping[OpOverload, OpOverload] = MappingProxyType({item.functional: item.in_place for item in _UPDATES})
"""Each update's twin, which writes over the operands that the update returns as new tensors: all but the gradient."""

MANY: Mapping[OpOverload, OpOverload] = MappingProxyType({item.in_place: item.many for item in _UPDATES})
"""Each twin's twin that updates many parameters: it takes a list in place of each tensor before `scale`."""


def tensors_of(many: Any) -> int:
    """The number of lists that an operator on many parameters takes: parameters, gradients, and state."""
    return next(index for index, item in enumerate(many._schema.arguments) if item.name == "scale")
