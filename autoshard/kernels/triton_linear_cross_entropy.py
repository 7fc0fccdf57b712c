"""Cross-entropy fused with the linear layer before it, so that not all logits are in memory at one time.

The logits are computed one chunk of classes after another. Wijmans et al., "Cut your losses in large-vocabulary
language models" (ICLR 2025), section 4, tile inside a kernel. Here, cuBLAS (or the device's own library) computes the
matrix product of a chunk. For x [N, K], w [C, K] and the classes c of a chunk:

    forward:   z = x w_c^T,  lse' = log(exp(lse) + sum_c exp(z)),  y' = y + (1 - e) z_t + (e / C) sum_c z
    backward:  z = x w_c^T,  dz = dloss (exp(z - lse) - (1 - e) [c = t] - e / C),  dx += dz w_c,  dw_c = dz^T x

lse and the expected logit y are carried from chunk to chunk. The loss is lse - y (`triton_cross_entropy.py`). A chunk
has as many classes as x has features, but at least `LEAST_CLASSES`. Each row of dw belongs to one chunk, so only dx is
summed over chunks, in float32. The backward computes the logits again: four matrix products in all instead of three.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from autoshard.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.launch import define_kernel
from autoshard.kernels.triton_cross_entropy import Chunk, cross_entropy_backward_into, cross_entropy_into

_aten = torch.ops.aten
LEAST_CLASSES = 4096
"""The least number of classes in a chunk. GPT-2 would otherwise have 50 chunks, which no host launches in time."""


def chunk_classes(depth: int) -> int:
    """Return the number of classes in a chunk, for a layer with `depth` input features."""
    return max(LEAST_CLASSES, triton.next_power_of_2(depth))


def _refuse(hidden: Tensor, weight: Tensor, target: Tensor, **_: object) -> str | None:
    shapes = f"hidden={tuple(hidden.shape)}, weight={tuple(weight.shape)}, target={tuple(target.shape)}"
    if hidden.dim() < 2 or weight.dim() != 2 or 0 in (*hidden.shape, *weight.shape):
        return f"the kernel takes hidden [..., K] and weight [C, K], not empty; found {shapes}."
    classes, depth = weight.shape
    if hidden.shape[-1] != depth or target.shape != (hidden.numel() // depth,):
        return f"the kernel takes one target [N] for each row of hidden; found {shapes}."
    if hidden.dtype != weight.dtype:
        return f"the kernel takes hidden and weight of one dtype; found {hidden.dtype} and {weight.dtype}."
    if classes <= chunk_classes(depth):
        return f"all {classes} classes fit into one chunk of {chunk_classes(depth)}, whose logits are held at once."
    return None


def _chunks(x: Tensor, weight: Tensor) -> Iterator[tuple[Chunk, slice, Tensor]]:
    """Yield each chunk of classes, its slice of `weight`, and its logits, in memory that the next chunk overwrites."""
    classes, depth = weight.shape
    size = chunk_classes(depth)
    memory = x.new_empty((len(x), size))
    for first in range(0, classes, size):
        part = slice(first, min(first + size, classes))
        logits = memory[:, : part.stop - first]
        torch.mm(x, weight[part].t(), out=logits)
        yield Chunk(first, classes), part, logits


def _fill(
    results: tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int,
    label_smoothing: float,
) -> None:  # fmt: skip
    expected_logit, target = torch.empty_like(results[0]), target.contiguous()
    for chunk, _, logits in _chunks(hidden.reshape(-1, weight.shape[1]), weight):
        cross_entropy_into(*results, logits, target, ignore_index, label_smoothing, chunk, expected_logit)


def _fill_backward(
    grads: tuple[Tensor, Tensor], grad_loss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, lse: Tensor,
    ignore_index: int, label_smoothing: float,
) -> None:  # fmt: skip
    grad, grad_weight = grads
    x = hidden.reshape(grad.shape)
    total = torch.zeros_like(grad, dtype=torch.float32)
    rows = (target.contiguous(), lse.contiguous(), ignore_index, label_smoothing)
    grad_loss = grad_loss.contiguous()
    for chunk, part, logits in _chunks(x, weight):
        cross_entropy_backward_into(logits, grad_loss, logits, *rows, chunk)
        torch.mm(logits.t(), x, out=grad_weight[part])
        total += torch.mm(logits, weight[part])
    grad.copy_(total)


def _empty_losses(hidden: Tensor, target: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    loss, lse = (hidden.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
    return loss, lse


def _empty_gradients(hidden: Tensor, weight: Tensor, target: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((target.shape[0], hidden.shape[-1])), weight.new_empty(weight.shape)


linear_cross_entropy = define_kernel(
    "triton_linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor target, SymInt ignore_index, float label_smoothing)"
    " -> (Tensor loss, Tensor lse)",
    _empty_losses,
    _fill,
    _refuse,
)
linear_cross_entropy_backward = define_kernel(
    "triton_linear_cross_entropy_backward",
    "(Tensor grad_loss, Tensor hidden, Tensor weight, Tensor target, Tensor lse, SymInt ignore_index, "
    "float label_smoothing) -> (Tensor grad_hidden, Tensor grad_weight)",
    _empty_gradients,
    _fill_backward,
    _refuse,
)


def _reshape(x: Any, *shape: Any) -> Any:
    return _aten.reshape.default(x, list(shape))


def _product(hidden: Any, weight: Any, sizes: tuple[Any, ...], is_wide: bool) -> tuple[Any, Any]:
    """Return the rows [N, K] of hidden, and their logits [N, C].

    `sizes` are empty for hidden [N, K]. For hidden [B, S, K] they are the values of `_SIZES`. Models then reshape the
    logits to [B, S, C] and back, and so do these calls. If `is_wide`, the logits are cast to float32, as in
    transformers.
    """
    batch, length, rows, depth, classes = sizes or (None,) * len(_SIZES)
    x = _reshape(hidden, rows, depth) if sizes else hidden
    logits = _aten.mm.default(x, _aten.t.default(weight))
    logits = _reshape(logits, batch, length, classes) if sizes else logits
    logits = _aten._to_copy.default(logits, dtype=torch.float32) if is_wide else logits
    return x, _reshape(logits, -1, classes) if sizes else logits


def _forward_form(is_sequence: bool, is_wide: bool) -> Form:
    """Return the `Form` of the forward, for hidden [B, S, K] if `is_sequence`, else for hidden [N, K]."""

    def compose(
        like: Tensor, hidden: Any, weight: Any, target: Any, ignore_index: Any, label_smoothing: Any, *sizes: Any
    ) -> Any:
        _, logits = _product(hidden, weight, sizes, is_wide)
        results = cross_entropy(_aten.permute.default(logits, [0, 1]), target, ignore_index, label_smoothing)
        return operator.getitem(results, 0), operator.getitem(results, 1)

    return Form(compose, derived_variables=_SIZES if is_sequence else {}, dims=1)


def _backward_form(is_sequence: bool, is_wide: bool) -> Form:
    def compose(
        like: Tensor, grad_loss: Any, hidden: Any, weight: Any, target: Any, lse: Any, ignore_index: Any,
        label_smoothing: Any, *sizes: Any,
    ) -> Any:  # fmt: skip
        x, logits = _product(hidden, weight, sizes, is_wide)
        logits = _aten.permute.default(logits, [0, 1])
        grad = cross_entropy_backward(grad_loss, logits, target, lse, ignore_index, label_smoothing)
        grad = _aten.permute.default(grad, [0, 1])
        batch, length, rows, _, classes = sizes or (None,) * len(_SIZES)
        grad = _reshape(grad, batch, length, classes) if sizes else grad
        if is_wide:
            grad = _aten._to_copy.default(grad, dtype=like.dtype, layout=torch.strided, device=like.device)
        grad = _reshape(grad, rows, classes) if sizes else grad
        return _aten.mm.default(grad, weight), _aten.mm.default(_aten.t.default(grad), x)

    return Form(compose, derived_variables=_SIZES if is_sequence else {}, dims=2)


def _dim_of_hidden(index: int) -> Callable[[Mapping[str, Any]], object]:
    """Return a function from the kernel's arguments by name to the size of dim `index` of hidden [B, S, K].

    The function returns None if hidden does not have three dims.
    """

    def compute(arguments: Mapping[str, Any]) -> object:
        shape = arguments["hidden"].shape
        return shape[index] if len(shape) == 3 else None

    return compute


_SIZES: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "batch": _dim_of_hidden(0),
    "length": _dim_of_hidden(1),
    "rows": lambda arguments: arguments["target"].shape[0],
    "depth": _dim_of_hidden(2),
    "classes": lambda arguments: arguments["weight"].shape[0],
}

_KINDS = tuple(product((True, False), (False, True)))

FUSED = (
    FusedKernel(
        linear_cross_entropy_backward,
        tuple(_backward_form(*kind) for kind in _KINDS),
        allowed_readers=frozenset({cross_entropy}),
    ),
    FusedKernel(linear_cross_entropy, tuple(_forward_form(*kind) for kind in _KINDS)),
)
