"""`autoshard::triton_adam_updates_`: update many parameters in place by Adam or AdamW, in one launch.

It computes `autoshard::adam_update_` for each parameter (Kingma, Ba, 2015, algorithm 1; Loshchilov, Hutter, 2019, for
decoupled weight decay). Let p be a parameter and g its gradient, first scaled, and negated to maximise. At step t, in
float32:

    coupled:    g' = g + decay p                        decoupled:  p' = p (1 - lr decay)
    m' = m + (1 - beta1) (g' - m),  v' = beta2 v + (1 - beta2) g'^2
    p'' = p' - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)

Each parameter is cut into blocks, and each Triton program updates one block. A table on the device has the addresses
and sizes of all tensors, and the number of each parameter's first block. A program finds its parameter in the table by
bisection. All parameters of a launch have one dtype, and so have all gradients and all moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import ExampleCompilation, block_example
from autoshard.kernels.launch import FLOATS, launch, require
from autoshard.kernels.library import define
from autoshard.kernels.optimizers import ADAM_HYPER

_BLOCK, _NUM_WARPS = 1024, 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pointers(addresses_ptr, element, TYPE: tl.constexpr):
    """Return pointers to the elements `element` of a tensor of Triton type TYPE.

    addresses_ptr points to an int64 number, the address of the tensor's first element.
    """
    return tl.load(addresses_ptr).to(tl.pointer_type(TYPE)) + element  # type: ignore[arg-type]


@triton.jit
def adam_kernel(
    table_ptr,
    scale_ptr,
    count,
    step_size,
    kept,
    decay,
    gain1,
    beta2,
    gain2,
    correction,
    eps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of BLOCK elements of one of `count` parameters.

    table_ptr [6, count] int64 has a column for each parameter. Rows 0 to 3 are the addresses of parameters, gradients,
    first moments and second moments. Row 4 has the numbers of elements. Row 5 has the number of each parameter's first
    block.

    scale_ptr [] is float32, or None. PARAM, GRAD and STATE are the Triton types of parameters, gradients and moments.
    `_factors` computes the scalars from step_size to eps. 2^STEPS is at least `count`. The grid has a program for each
    block of all parameters.
    """
    block = tl.program_id(0)
    found, above = 0, count
    for _ in range(STEPS):
        middle = (found + above) // 2
        is_behind = tl.load(table_ptr + 5 * count + middle) <= block
        above = tl.where(is_behind, above, middle)
        found = tl.where(is_behind, middle, found)
    element = (block - tl.load(table_ptr + 5 * count + found)) * BLOCK + tl.arange(0, BLOCK)
    inside = element < tl.load(table_ptr + 4 * count + found)
    param_ptr = _pointers(table_ptr + found, element, PARAM)
    grad_ptr = _pointers(table_ptr + count + found, element, GRAD)
    first_ptr = _pointers(table_ptr + 2 * count + found, element, STATE)
    second_ptr = _pointers(table_ptr + 3 * count + found, element, STATE)
    param = tl.load(param_ptr, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        grad *= tl.load(scale_ptr)
    if MAXIMIZE:
        grad = -grad
    grad += decay * param
    first += gain1 * (grad - first)
    second = beta2 * second + gain2 * grad * grad
    param = kept * param - step_size * first / (tl.sqrt(second) / correction + eps)
    tl.store(param_ptr, param, mask=inside)
    tl.store(first_ptr, first, mask=inside)
    tl.store(second_ptr, second, mask=inside)


def why_not_adam_updates(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor]
) -> str | None:
    """Return the reason that one launch cannot update these tensors, or None if it can."""
    for name, group in (("params", params), ("grads", grads), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        kinds = {(tensor.dtype, tensor.device) for tensor in group}
        if len(group) != len(params) or len(kinds) != 1 or not {dtype for dtype, _ in kinds} <= set(FLOATS):
            return f"it takes equally many {name} and params, of one dtype out of {FLOATS}, one device; found {kinds}."
    if exp_avgs[0].dtype != exp_avg_sqs[0].dtype:
        return f"it takes moments of one dtype; found {exp_avgs[0].dtype} and {exp_avg_sqs[0].dtype}."
    unlike = [tuple(x.shape) for x, *others in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
              if any(other.shape != x.shape for other in others)]  # fmt: skip
    return f"gradients and moments have other shapes than the parameters {unlike}." if unlike else None


def _adam_updates(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    scale: Tensor | None,
    hyper: Tensor,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Update parameters and moments in place. A tensor that is not contiguous is updated through a copy."""
    require("triton_adam_updates_", why_not_adam_updates(params, grads, exp_avgs, exp_avg_sqs))
    written = (params, exp_avgs, exp_avg_sqs)
    ordered = [[tensor.contiguous() for tensor in group] for group in (params, grads, exp_avgs, exp_avg_sqs)]
    sizes = [tensor.numel() for tensor in params]
    blocks = [0, *accumulate(triton.cdiv(size, _BLOCK) for size in sizes)]
    addresses = [[tensor.data_ptr() for tensor in group] for group in ordered]
    device = params[0].device
    table = torch.tensor([*addresses, sizes, blocks[:-1]], dtype=torch.int64, pin_memory=device.type == "cuda")
    table = table.to(device, non_blocking=True)  # a blocking copy would wait for the device's queue
    options: dict[str, float] = dict(zip(ADAM_HYPER, hyper.tolist(), strict=True))
    launch(
        adam_kernel,
        lambda _: (blocks[-1],),
        device,
        *(table, None if scale is None else scale.to(torch.float32), len(params), *_factors(options, decoupled)),
        changes=(*ordered[0], *ordered[2], *ordered[3]),
        PARAM=_TYPES[params[0].dtype],
        GRAD=_TYPES[grads[0].dtype],
        STATE=_TYPES[exp_avgs[0].dtype],
        MAXIMIZE=maximize,
        STEPS=max(1, (len(params) - 1).bit_length()),
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    for group, held in zip(written, (ordered[0], ordered[2], ordered[3]), strict=True):
        for tensor, copy in zip(group, held, strict=True):
            if tensor is not copy and not tensor.is_contiguous():
                tensor.copy_(copy)


def _factors(options: dict[str, float], decoupled: bool) -> tuple[float, ...]:
    """Return the scalar arguments of `adam_kernel`, from step_size to eps.

    `options` has the values of `ADAM_HYPER` by name.
    """
    step = options["step"] + 1
    lr, decay = options["lr"], options["weight_decay"]
    step_size = lr / (1 - options["beta1"] ** step)
    correction = math.sqrt(1 - options["beta2"] ** step)
    kept, added = (1 - lr * decay, 0.0) if decoupled else (1.0, decay)
    return (
        step_size,
        kept,
        added,
        1 - options["beta1"],
        options["beta2"],
        1 - options["beta2"],
        correction,
        options["eps"],
    )


adam_updates_ = define(
    "triton_adam_updates_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor? scale, "
    "Tensor hyper, bool decoupled, bool maximize) -> ()",
    _adam_updates,
    lambda *args: None,
)


def examples() -> tuple[ExampleCompilation, ...]:
    """Return compilations for float32 and for bfloat16 parameters, with float32 moments."""
    constants = {"MAXIMIZE": False, "STEPS": 9, "BLOCK": _BLOCK, "GRAD": tl.float32, "STATE": tl.float32}
    types = "*i64 *fp32 i32" + " fp32" * 8
    return tuple(
        block_example(adam_kernel, types, 4096, _NUM_WARPS, **constants, PARAM=dtype)
        for dtype in (tl.float32, tl.bfloat16)
    )
