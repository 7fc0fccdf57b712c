"""Updates of optimizers as operators: one call for each parameter, with all that it reads and writes.

Each runs the function that torch's own optimizer runs (`torch.optim.sgd.sgd`, `torch.optim.adam.adam`), so a traced
update is torch's, in the order of its arithmetic. Results are new tensors; `write_in_place` names the twin of each
operator that writes over its operands instead.

Hyper-parameters come in a vector, float64 [k] on the CPU, so that schedulers change them without another trace:

    sgd:   lr, weight_decay, momentum, dampening, whether this is the first step (1 or 0)
    adam:  lr, beta1, beta2, eps, weight_decay, steps taken before this one

`scale`, a scalar or None, multiplies the gradient first: that of clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.adam import adam as run_adam
from torch.optim.sgd import sgd as run_sgd

from autoshard.kernels.library import accumulation_dtype, define

SGD_HYPER = ("lr", "weight_decay", "momentum", "dampening", "first")
ADAM_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")


def sgd_(param: Tensor, grad: Tensor, scale: Tensor | None, hyper: Tensor, maximize: bool) -> None:
    """Gradient descent: p -= lr (g + weight_decay p), in place.

    Args:
        param, grad: of one shape and dtype, any dims.
        scale: scalar that multiplies `grad`, or None.
        hyper: `SGD_HYPER`, float64 [5].
        maximize: ascend.
    """
    _run_sgd(param, grad, None, scale, hyper, nesterov=False, maximize=maximize)


def momentum_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    scale: Tensor | None,
    hyper: Tensor,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Gradient descent with momentum, in place; the first step makes the buffer the gradient. See `sgd_`."""
    _run_sgd(param, grad, momentum_buffer, scale, hyper, nesterov=nesterov, maximize=maximize)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scale: Tensor | None,
    hyper: Tensor,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Adam (Kingma, Ba 2015), or AdamW (Loshchilov, Hutter 2019) if `decoupled`, in place.

    Args:
        param, grad, exp_avg, exp_avg_sq: of one shape and dtype, any dims.
        scale: scalar that multiplies `grad`, or None.
        hyper: `ADAM_HYPER`, float64 [6].
        decoupled: weight decay shrinks the parameter itself, not by way of the gradient.
        maximize: ascend.
    """
    _run_adam(param, grad, exp_avg, exp_avg_sq, [], scale, hyper, decoupled=decoupled, maximize=maximize)


def amsgrad_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor,
    scale: Tensor | None,
    hyper: Tensor,
    decoupled: bool,
    maximize: bool,
) -> None:
    """AMSGrad (Reddi, Kale, Kumar 2018), in place; see `adam_`."""
    state = [max_exp_avg_sq]
    _run_adam(param, grad, exp_avg, exp_avg_sq, state, scale, hyper, decoupled=decoupled, maximize=maximize)


def _run_sgd(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    scale: Tensor | None,
    hyper: Tensor,
    *,
    nesterov: bool,
    maximize: bool,
) -> None:
    options = _values(SGD_HYPER, hyper)
    is_first = options.pop("first") > 0
    grad = _scaled(grad, scale)
    buffers: list[Tensor | None] = [None if is_first else buffer]
    if buffer is None:
        options |= {"momentum": 0.0, "dampening": 0.0}
    fused = _may_fuse(param, grad, buffer) and param.dtype in (torch.float32, torch.float64) and buffers[0] is buffer
    run_sgd([param], [grad], buffers, foreach=False, fused=fused, nesterov=nesterov, maximize=maximize, **options)
    made = buffers[0]
    if buffer is not None and is_first and made is not None:
        buffer.copy_(made)


def _run_adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sqs: list[Tensor],
    scale: Tensor | None,
    hyper: Tensor,
    *,
    decoupled: bool,
    maximize: bool,
) -> None:
    options = _values(ADAM_HYPER, hyper)
    grad = _scaled(grad, scale)
    fused = _may_fuse(param, grad, exp_avg, exp_avg_sq, *max_exp_avg_sqs)
    fused = fused and (param.is_cuda or param.dtype in (torch.float32, torch.float64))
    step = torch.tensor(options.pop("step"), dtype=torch.float32, device=param.device if fused else "cpu")
    run_adam(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        max_exp_avg_sqs,
        [step],
        foreach=False,
        fused=fused,
        amsgrad=bool(max_exp_avg_sqs),
        decoupled_weight_decay=decoupled,
        maximize=maximize,
        **options,
    )


def _values(names: Sequence[str], hyper: Tensor) -> dict[str, Any]:
    return dict(zip(names, hyper.tolist(), strict=True))


def _scaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    return grad.contiguous() if scale is None else (grad * scale).contiguous()


def _may_fuse(*tensors: Tensor | None) -> bool:
    """Whether torch's fused kernels take these: they read memory in order, and know CPUs and CUDA."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(
        tensor.is_contiguous() and tensor.device.type in ("cpu", "cuda") and tensor.is_floating_point()
        for tensor in given
    )


def _out_of_place(in_place: Callable[..., None], written: Sequence[int]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The function that returns copies of the operands at `written`, as `in_place` leaves them."""

    def run(*args: object) -> Tensor | tuple[Tensor, ...]:
        values = list(args)
        results = tuple(_copy(values[index]) for index in written)
        for index, result in zip(written, results, strict=True):
            values[index] = result
        in_place(*values)
        return results[0] if len(results) == 1 else results

    return run


def _copy(value: object) -> Tensor:
    assert isinstance(value, Tensor), "operands that are written are tensors"
    return value.clone(memory_format=torch.contiguous_format)


def _empty(written: Sequence[int]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The shapes of the results of an out-of-place update."""

    def fake(*args: object) -> Tensor | tuple[Tensor, ...]:
        operands = [args[index] for index in written]
        results = tuple(value.new_empty(value.shape) for value in operands if isinstance(value, Tensor))
        return results[0] if len(results) == 1 else results

    return fake


def _define(
    name: str, in_place: Callable[..., None], state: Sequence[str], flags: Sequence[str]
) -> tuple[OpOverload, OpOverload]:
    """An update and its twin in place: of `param` and `state`, which come with the gradient between them."""
    tensors = ["param", "grad", *state]
    written = [index for index, tensor in enumerate(tensors) if tensor != "grad"]
    rest = ["Tensor? scale", "Tensor hyper", *(f"bool {flag}" for flag in flags)]
    plain = ", ".join([*(f"Tensor {tensor}" for tensor in tensors), *rest])
    letters = dict(zip(written, "abcd", strict=False))
    mutated = [f"Tensor({letters[i]}!) {t}" if i in letters else f"Tensor {t}" for i, t in enumerate(tensors)]
    returns = "Tensor" if len(written) == 1 else f"({', '.join(['Tensor'] * len(written))})"
    update = define(name, f"({plain}) -> {returns}", _out_of_place(in_place, written), _empty(written))
    twin = define(f"{name}_", f"({', '.join([*mutated, *rest])}) -> ()", in_place, lambda *args: None)
    return update, twin


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

sgd_update, momentum_update, adam_update, amsgrad_update = (pair[0] for pair in (_SGD, _MOMENTUM, _ADAM, _AMSGRAD))

IN_PLACE: Mapping[OpOverload, OpOverload] = MappingProxyType(dict((_SGD, _MOMENTUM, _ADAM, _AMSGRAD)))
"""Each update to its twin, which writes over the operands that the update returns anew: all but the gradient."""
