"""Operators that update one parameter as an optimizer does: SGD, SGD with momentum, Adam, AMSGrad and Muon.

Each operator maps the parameter, its gradient and its state to the new parameter and state. It calls the function of
torch's own optimizer (`torch.optim.adam.adam`), fused if possible. Muon's operator takes the result of `orthogonalise`
too (`autoshard.kernels.newton_schulz`), and has no function of torch. `IN_PLACE` maps each operator to an operator that
overwrites its operands. `MANY` maps the latter to an operator that updates many parameters in a call.

Hyper-parameters come in a vector, float64 [k] on the CPU, so that schedulers can change them without another trace:

    sgd:   lr, weight_decay, momentum, dampening, whether this is the first step (1 or 0)
    adam:  lr, beta1, beta2, eps, weight_decay, number of earlier steps
    muon:  lr, weight_decay, momentum

`scale`, a scalar or None, multiplies the gradient before the update. It clips the gradient.
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
from autoshard.kernels.newton_schulz import MUON_HYPER

Tensors = list[Tensor]

SGD_HYPER = ("lr", "weight_decay", "momentum", "dampening", "first")
ADAM_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")

_SGD_ON_CPUS = (torch.float32, torch.float64)
"""Dtypes for which torch's fused SGD is used on CPUs. In narrower dtypes, the kernel of torch 2.13 is wrong: it updates
only the last few elements, which do not fill a vector (pytorch#191763). Its momentum is wrong too."""

_ADAM_ON_CPUS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes for which torch's fused Adam is used on CPUs. The fused kernel computes in float32 and rounds narrower dtypes
once. The plain loop rounds after each of a dozen operators. In bfloat16, the plain loop is up to 4 units in the last
place from the exact update."""

_SCALED_AT_ONCE = 1 << 26
"""The most bytes of parameters in a call with scaled gradients. A larger parameter has its own call."""


def sgd_(params: Tensors, grads: Tensors, scale: Tensor | None, hyper: Tensor, maximize: bool) -> None:
    """Update parameters in place by gradient descent: p -= lr (g + weight_decay p).

    Args:
        params, grads: lists of equal length. A gradient has the shape and dtype of its parameter.
        scale: scalar that multiplies gradients, or None.
        hyper: float64 [5], the values named in `SGD_HYPER`.
        maximize: whether to ascend the gradient instead of descending it.
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
    """Update parameters and momentum buffers in place by gradient descent with momentum.

    The first step (`first` of `SGD_HYPER`) sets each buffer to the parameter's gradient, with `scale`, `maximize` and
    weight decay applied. `nesterov` selects Nesterov's momentum. The other arguments are those of `sgd_`.
    """
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
    """Update parameters and moments in place by Adam (Kingma, Ba 2015).

    Args:
        params, grads: lists of equal length. A gradient has the shape and dtype of its parameter.
        exp_avgs, exp_avg_sqs: the first and second moment of each parameter, with its shape and dtype.
        scale: scalar that multiplies gradients, or None.
        hyper: float64 [6], the values named in `ADAM_HYPER`.
        decoupled: whether weight decay shrinks the parameter itself instead of changing the gradient, as in AdamW
            (Loshchilov, Hutter 2019).
        maximize: whether to ascend the gradient instead of descending it.
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
    """Update parameters and moments in place by AMSGrad (Reddi, Kale, Kumar 2018). The arguments are those of `adam_`.

    `max_exp_avg_sqs` has the largest second moments of each parameter so far, and is updated too.
    """
    groups = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    _run_adam(groups, scale, hyper, decoupled=decoupled, maximize=maximize)


def muon_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    orthogonals: Tensors,
    scale: Tensor | None,
    hyper: Tensor,
    ratio: float,
) -> None:
    """Update parameters and momentum buffers in place by Muon (Jordan et al., 2024).

    A parameter p and its matrix o of `orthogonals` give p <- (1 - lr weight_decay) p - lr ratio o. The gradients change
    only the momentum buffers here, because the orthogonals already contain them.

    Args:
        params, grads, momentum_buffers: lists of equal length, with the shapes and dtypes of the parameters.
        orthogonals: for each parameter, the result of `muon_direction`, orthogonalised by `orthogonalise`.
        scale: scalar that multiplies gradients, or None.
        hyper: float64 [3], the values named in `MUON_HYPER`.
        ratio: factor of the learning rate. It depends on the shape of the whole matrix, not of a rank's part.
    """
    options = _values(MUON_HYPER, hyper)
    lr, weight_decay = options["lr"], options["weight_decay"]
    for param, grad, buffer, orthogonal in zip(params, grads, momentum_buffers, orthogonals, strict=True):
        buffer.lerp_(grad if scale is None else (grad * scale).to(grad.dtype), 1 - options["momentum"])
        param.mul_(1 - lr * weight_decay).add_(orthogonal, alpha=-lr * ratio)


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
    """Split an update of many parameters into calls of torch's functions.

    Yield, for each call, whether it uses a fused kernel, and its lists of tensors, in the order of `groups`.

    Args:
        groups: lists of equal length: parameters, gradients, then state.
        scale: multiplies the gradients, or None. Scaled gradients are copies. So with `scale`, a call takes at most
            `_SCALED_AT_ONCE` bytes of parameters.
        on_cpus: the dtypes for which fused kernels are used on CPUs.
        may_fuse: False to use no fused kernel, as in the first step with momentum.
    """
    members = list(zip(*groups, strict=True))
    fused = [may_fuse and _may_fuse(on_cpus, *member) for member in members]
    for is_fused in (True, False):
        chosen = [member for member, flag in zip(members, fused, strict=True) if flag is is_fused]
        for part in _parts(chosen) if scale is not None else [chosen] if chosen else []:
            params, grads, *rest = (list(group) for group in zip(*part, strict=True))
            yield is_fused, [params, [_scaled(grad, scale) for grad in grads], *rest]


def _parts(members: Sequence[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Cut members (parameter, gradient, *state) into lists of at most `_SCALED_AT_ONCE` bytes of parameters."""
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
    """Whether torch's fused kernel takes the parameter and its state. `_scaled` later makes the gradient contiguous."""
    if param.device.type not in ("cpu", "cuda") or (param.is_cpu and param.dtype not in on_cpus):
        return False
    return all(tensor.is_contiguous() and tensor.is_floating_point() for tensor in (param, *state))


def _out_of_place(in_place: Callable[..., None], written: Sequence[int]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return a function that copies the operands at the indices `written`, updates the copies, and returns them."""

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
    """Return a function that makes empty results like the operands at the indices `written`, for fake tensors."""

    def fake(*args: object) -> Tensor | tuple[Tensor, ...]:
        operands = [args[index] for index in written]
        results = tuple(value.new_empty(value.shape) for value in operands if isinstance(value, Tensor))
        return results[0] if len(results) == 1 else results

    return fake


@dataclass(frozen=True, slots=True)
class _UpdateTwins:
    """The three operators of one update: functional, in place, and in place for many parameters in one call."""

    functional: OpOverload
    in_place: OpOverload
    many: OpOverload


def _define(
    name: str,
    in_place: Callable[..., None],
    state: Sequence[str],
    flags: Sequence[str],
    read: Sequence[str] = (),
) -> _UpdateTwins:
    """Define the three operators of an update, and return them.

    `name` is the name of the functional operator, such as "adam_update". `in_place` updates lists of tensors, as
    `adam_` does. The operands are the parameter, the gradient, and the tensors named in `state` and in `read`. `flags`
    has the types and names of the last arguments, such as "bool maximize". The functional operator returns the new
    parameter and state. The two other operators overwrite the parameter and state.
    """
    tensors = ["param", "grad", *state, *read]
    written = [index for index, tensor in enumerate(tensors) if tensor not in ("grad", *read)]
    rest = ["Tensor? scale", "Tensor hyper", *flags]

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
    """Return the sum of the squares of all elements of `x` as a scalar, in float32, or in float64 for float64."""
    return torch.linalg.vector_norm(x, dtype=accumulation_dtype(x.dtype)).square()


sum_of_squares = define(
    "sum_of_squares",
    "(Tensor x) -> Tensor",
    sum_of_squares_reference,
    lambda x: x.new_empty((), dtype=accumulation_dtype(x.dtype)),
)


def sum_of_all_squares_reference(xs: Tensors) -> Tensor:
    """Return the sum of the results of `sum_of_squares` for some tensors, with few launches."""
    members: dict[torch.dtype, Tensors] = {}
    for x in xs:
        members.setdefault(accumulation_dtype(x.dtype), []).append(x)
    sums = [
        torch.stack(torch.ops.aten._foreach_norm.Scalar(some, 2, dtype)).square().sum()
        for dtype, some in members.items()
    ]
    return sums[0] if len(sums) == 1 else torch.stack([item.double() for item in sums]).sum()


def _wide_scalar(xs: Tensors) -> Tensor:
    """Return an empty scalar like the result of `sum_of_all_squares`: float64 if some tensor is, else float32."""
    dtypes = {accumulation_dtype(x.dtype) for x in xs}
    return xs[0].new_empty((), dtype=torch.float64 if torch.float64 in dtypes else torch.float32)


sum_of_all_squares = define("sum_of_all_squares", "(Tensor[] xs) -> Tensor", sum_of_all_squares_reference, _wide_scalar)

_SGD = _define("sgd_update", sgd_, (), ("bool maximize",))
_MOMENTUM = _define("momentum_update", momentum_, ("momentum_buffer",), ("bool nesterov", "bool maximize"))
_OF_ADAM = ("bool decoupled", "bool maximize")
_ADAM = _define("adam_update", adam_, ("exp_avg", "exp_avg_sq"), _OF_ADAM)
_AMSGRAD = _define("amsgrad_update", amsgrad_, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _OF_ADAM)
_MUON = _define("muon_update", muon_, ("momentum_buffer",), ("float ratio",), read=("orthogonal",))

_UPDATES = (_SGD, _MOMENTUM, _ADAM, _AMSGRAD, _MUON)
sgd_update, momentum_update, adam_update, amsgrad_update, muon_update = (update.functional for update in _UPDATES)

IN_PLACE: Mapping[OpOverload, OpOverload] = MappingProxyType({item.functional: item.in_place for item in _UPDATES})
"""From a functional update to the operator that overwrites the parameter and the state instead."""

MANY: Mapping[OpOverload, OpOverload] = MappingProxyType({item.in_place: item.many for item in _UPDATES})
"""From an operator that updates a parameter in place to the operator that updates many parameters in one call.

The latter takes a list of tensors for each tensor that comes before the argument `scale`.
"""


def is_overwritten(update: Any, operand: int) -> bool:
    """Whether `IN_PLACE[update]` overwrites the tensor operand at the index `operand`."""
    alias = IN_PLACE[update]._schema.arguments[operand].alias_info
    return alias is not None and alias.is_write


def tensors_of(many: Any) -> int:
    """Return how many lists of tensors an operator of `MANY` takes: parameters, gradients, and each state."""
    return next(index for index, item in enumerate(many._schema.arguments) if item.name == "scale")
