"""`autoshard::native_attention` and its backward: attention on torch's fused kernels, in memory linear in the sequence.

Arguments and results are those of `autoshard::attention`. The kernel depends on nothing but device, dtypes and shapes:

| call | kernel |
|---|---|
| CPU | `aten._scaled_dot_product_flash_attention_for_cpu` |
| CUDA, 16 bits, no mask; if causal, as many queries as keys | `aten._scaled_dot_product_flash_attention` |
| calls of the row above, where torch prefers cuDNN (`_prefers_cudnn`) | `aten._scaled_dot_product_cudnn_attention` |
| CUDA, otherwise | `aten._scaled_dot_product_efficient_attention` |
| dropout; no queries or keys; head sizes that no kernel takes | the definition, a block of queries at a time |

Three steps turn a call into calls that the kernels take:

1. With a split sequence, the first local query of a causal call may be `shift` tokens after the first local key. Such
   a call becomes two calls. In the first call, all queries attend to the first `shift` keys. The second call is causal
   attention to the other keys. The log-sum-exps of both calls merge their results. Each call's backward takes the
   merged result and log-sum-exp, and gives its share of the gradients (Dao et al. 2022, appendix B.4).
2. A mask becomes a bias, which is added to the scores, for a block of queries at a time. In causal attention, the bias
   has -inf for later keys.
3. Key heads that several query heads share are repeated, and their gradients are summed.

A row that is masked throughout has log-sum-exp -inf and a result of zeros. Dropout draws Philox numbers at the global
index of a score, which no fused kernel of torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from autoshard.kernels.attention import (
    ARGUMENTS,
    BACKWARD_ARGUMENTS,
    attention_backward_reference,
    attention_reference,
    check_attention,
    empty_results,
    empty_row_major,
    fake_attention,
    fake_attention_backward,
    in_layout_of,
    in_result_layout,
    in_row_major_layout,
)
from autoshard.kernels.library import accumulation_dtype, define

aten = torch.ops.aten

_BLOCK_ELEMENTS = 1 << 22
"""Greatest number of scores, or of elements of a bias, in a block of queries: 16 MiB of float32."""
_LARGEST_FLASH_HEAD = 256
"""Largest head size of the flash kernels for CUDA (Dao 2023, FlashAttention-2)."""
_LARGEST_CUDNN_HEAD, _FIRST_CUDNN = 128, 91500
"""Largest head size of cuDNN's kernels, backward included, and the version from which torch prefers them."""
HEAD_STEP = 8
"""Head sizes of the fused kernels for CUDA are multiples of this number."""
_ROW_STEP, _MASK_STEP = 32, 16
"""Multiples that the memory-efficient kernel needs: of rows in a log-sum-exp, and of columns in a bias."""

Result = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _LibraryKernel:
    """A fused kernel of torch, as a forward and a backward function.

    `forward` takes (q, k, v, bias, is_causal, scale), and returns out and lse [B, H, S]. `backward` takes (grad_out, q,
    k, v, bias, out, lse, is_causal, scale), and returns the gradients of q, k and v.
    """

    forward: Callable[..., Result]
    backward: Callable[..., Gradients]


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """One call of a kernel: attention of some queries to some keys.

    With `is_causal`, query number i of `rows`, from 0, attends only to the first i + 1 keys of `keys`. `bias` is
    [B or 1, H or 1, rows, keys].
    """

    rows: range
    keys: range
    is_causal: bool = False
    bias: Tensor | None = None

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _cut(q, self.rows), _cut(k, self.keys), _cut(v, self.keys)


def _cut(x: Tensor, places: range) -> Tensor:
    """Return `x` [B, H, S, ...] at the positions `places` of the sequence; `x` itself if they are all positions."""
    return x if len(places) == x.shape[2] else x.narrow(2, places.start, len(places))


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float, site: int, offset: Sequence[int], global_shape: Sequence[int],
) -> Result:  # fmt: skip
    """Compute attention by torch's fused kernels. Arguments, results and errors are those of `attention_reference`."""
    check_attention(q, k, v, seed, dropout_p)
    found: list[Result] = []
    if dropout_p > 0.0 or not _has_kernel(q, k, v):
        for rows in _blocks(q, q.shape[0] * q.shape[1] * k.shape[2]):
            block = (
                _cut(q, rows),
                k,
                v,
                None if mask is None else _rows_of(mask, rows),
                seed,
                dropout_p,
                is_causal,
                scale,
                site,
            )
            found.append(attention_reference(*block, _moved(offset, rows), global_shape))
    else:
        k, v = _repeated(k, q), _repeated(v, q)
        for rows, parts in _parts(q, k, mask, is_causal, offset):
            results = [_forward(*part.of(q, k, v), part, scale) for part in parts]
            found.append(_merge(results) if results else _nothing(_cut(q, rows), v))
    if len(found) == 1:
        return found[0]
    outs, norms = zip(*found, strict=True)
    out, lse = empty_results(q, v)
    return torch.cat(outs, 2, out=out), torch.cat(norms, 2, out=lse)


def native_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    seed: Tensor | None, dropout_p: float, is_causal: bool, scale: float, site: int, offset: Sequence[int],
    global_shape: Sequence[int],
) -> Gradients:  # fmt: skip
    """Compute `attention_backward_reference`, the gradients of q, k and v, by torch's fused kernels."""
    sums = _GradientSums(q, k, v)
    if dropout_p > 0.0 or not _has_kernel(q, k, v):
        for rows in _blocks(q, q.shape[0] * q.shape[1] * k.shape[2]):
            of_rows = (_cut(out, rows), _cut(lse, rows), seed, dropout_p, is_causal, scale, site)
            block = (
                _cut(grad_out, rows),
                _cut(q, rows),
                k,
                v,
                None if mask is None else _rows_of(mask, rows),
                *of_rows,
            )
            sums.add(
                _AttentionCall(rows, range(k.shape[2])),
                attention_backward_reference(*block, _moved(offset, rows), global_shape),
            )
        return sums.gradients()
    all_k, all_v = _repeated(k, q), _repeated(v, q)
    for _, parts in _parts(q, k, mask, is_causal, offset):
        for part in parts:
            rows = part.rows
            given = (_cut(grad_out, rows), *part.of(q, all_k, all_v), part.bias, _cut(out, rows), _cut(lse, rows))
            dq, dk, dv = _kernel_of(q, part).backward(*given, part.is_causal, scale)
            sums.add(part, (dq, _summed(dk, k), _summed(dv, v)))
    return sums.gradients()


class _GradientSums:
    """Adds up the gradients of q, k and v of the kernel calls into which one attention was cut.

    The gradients of a call with all queries and all keys are kept without a copy.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._like = (q, k, v)
        self._whole: Gradients | None = None
        self._sums: Gradients | None = None

    def add(self, part: _AttentionCall, gradients: Gradients) -> None:
        q, k, _ = self._like
        if self._sums is None and (len(part.rows), len(part.keys)) == (q.shape[2], k.shape[2]):
            self._whole = gradients
            return
        if self._sums is None:
            self._sums = self._zeros()
        for total, gradient, place in zip(self._sums, gradients, (part.rows, part.keys, part.keys), strict=True):
            _cut(total, place).add_(gradient)

    def gradients(self) -> Gradients:
        found = self._whole or self._sums or self._zeros()
        dq, dk, dv = (total.to(item.dtype) for total, item in zip(found, self._like, strict=True))
        return dq, dk, dv

    def _zeros(self) -> Gradients:
        dq, dk, dv = (empty_row_major(item, dtype=accumulation_dtype(item.dtype)).zero_() for item in self._like)
        return dq, dk, dv


def _has_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether some fused kernel of torch takes these dtypes and sizes. No CUDA kernel takes float64.

    No kernel takes zero queries or keys. The kernel for CPUs would end the process by a division by zero.
    """
    if 0 in (*q.shape, *k.shape):
        return False
    if q.device.type == "cpu":
        return q.shape[-1] == v.shape[-1]
    is_narrow = q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return q.device.type == "cuda" and is_narrow and q.shape[-1] % HEAD_STEP == 0 == v.shape[-1] % HEAD_STEP


def _kernel_of(q: Tensor, part: _AttentionCall) -> _LibraryKernel:
    if q.device.type == "cpu":
        return _CPU
    is_square = not part.is_causal or len(part.rows) == len(part.keys)
    if q.dtype == torch.float32 or part.bias is not None or not is_square or q.shape[-1] > _LARGEST_FLASH_HEAD:
        return _EFFICIENT
    is_large = min(len(part.rows), len(part.keys)) > 1 and q.shape[-1] <= _LARGEST_CUDNN_HEAD
    return _CUDNN if is_large and _prefers_cudnn(q.device) else _FLASH


@cache
def _prefers_cudnn(device: torch.device) -> bool:
    """Whether torch's own attention tries cuDNN first on `device`: Hopper or Blackwell, with cuDNN 9.15 or later."""
    if not torch.cuda.is_available() or torch.version.hip or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    version = torch.backends.cudnn.version()
    has_kernels = torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
    return has_kernels and version is not None and version >= _FIRST_CUDNN


def _forward(q: Tensor, k: Tensor, v: Tensor, part: _AttentionCall, scale: float) -> Result:
    out, lse = _kernel_of(q, part).forward(q, k, v, part.bias, part.is_causal, scale)
    if part.bias is None:
        return out, lse
    is_dead = (part.bias == -math.inf).all(-1)  # [B or 1, H or 1, S or 1]
    return out.masked_fill_(is_dead.unsqueeze(-1), 0.0), lse.masked_fill_(is_dead, -math.inf)


def _parts(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, offset: Sequence[int]
) -> Iterator[tuple[range, Sequence[_AttentionCall]]]:
    """Yield each block of queries, in order: its positions in the sequence, and its calls of a kernel.

    A block has no calls if its queries attend to no key.
    """
    shift, queries, keys = offset[2] - offset[3], range(q.shape[2]), range(k.shape[2])
    if mask is not None:
        for rows in _blocks(q, mask.shape[0] * mask.shape[1] * len(keys)):
            yield rows, (_AttentionCall(rows, keys, bias=_bias_of(mask, rows, q, k, shift if is_causal else None)),)
    elif not is_causal or shift >= len(keys) - 1:
        yield queries, (_AttentionCall(queries, keys),)
    elif shift == 0:
        yield queries, (_AttentionCall(queries, keys, is_causal=True),)
    elif shift > 0:
        yield queries, (_AttentionCall(queries, keys[:shift]), _AttentionCall(queries, keys[shift:], is_causal=True))
    else:
        yield queries[:-shift], ()
        if queries[-shift:]:
            yield queries[-shift:], (_AttentionCall(queries[-shift:], keys, is_causal=True),)


def _bias_of(mask: Tensor, rows: range, q: Tensor, k: Tensor, shift: int | None) -> Tensor:
    """Return the bias of a block of queries, [B or 1, H or 1, rows, T], which is added to the scores.

    `q` and `k` are read for shapes and dtype. In causal attention, `shift` is the number of tokens from the first key
    to the first query. Otherwise it is None.
    """
    block = _rows_of(mask, rows)
    if block.dtype == torch.bool:
        block = q.new_zeros(block.shape).masked_fill(block.logical_not(), -math.inf)
    block = block.to(q.dtype)
    if shift is not None:
        places = block.new_ones(max(rows.stop, k.shape[2]), dtype=torch.int64).cumsum(0)
        queries, keys = places.narrow(0, rows.start, len(rows)), places.narrow(0, 0, k.shape[2])
        block = block.masked_fill(keys > queries.unsqueeze(-1) + shift, -math.inf)
    return block.expand(*block.shape[:2], len(rows), k.shape[2])


def _rows_of(mask: Tensor, rows: range) -> Tensor:
    return mask if mask.shape[2] == 1 else _cut(mask, rows)


def _blocks(q: Tensor, elements_of_row: int) -> list[range]:
    """Return the positions of consecutive blocks of queries, each with at most `_BLOCK_ELEMENTS` elements of a bias.

    A query has `elements_of_row` elements of a bias. A block has at least one query, unless there are none.
    """
    count = q.shape[2]
    size = max(1, _BLOCK_ELEMENTS // max(1, elements_of_row))
    return [range(start, min(start + size, count)) for start in range(0, count, size)] or [range(0)]


def _moved(offset: Sequence[int], rows: range) -> list[int]:
    return [offset[0], offset[1], offset[2] + rows.start, offset[3]]


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each key head for the query heads that share it: [B, G, T, D] becomes [B, H, T, D], row-major."""
    if x.shape[1] == q.shape[1]:
        return x
    return x.transpose(1, 2).repeat_interleave(q.shape[1] // x.shape[1], 2).transpose(1, 2)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum the gradients of repeated key heads: [B, H, T, D] becomes the shape of `x`, [B, G, T, D]."""
    if gradient.shape[1] == x.shape[1]:
        return gradient
    return gradient.transpose(1, 2).unflatten(2, (x.shape[1], -1)).sum(3).transpose(1, 2)


def _nothing(q: Tensor, v: Tensor) -> Result:
    """Return result and log-sum-exp of queries that attend to no key: zeros and -inf."""
    out, lse = empty_results(q, v)
    return out.zero_(), lse.fill_(-math.inf)


def _merge(results: Sequence[Result]) -> Result:
    """Return merged result and log-sum-exp of calls with the same queries, over one or two disjoint sets of keys."""
    (first, lse), *others = results
    out = first if not others else first.to(lse.dtype)
    for other, other_lse in others:
        lse = merge_into(out, lse, other, other_lse)
    return out.to(first.dtype), lse


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge two results of attention of the same queries over disjoint sets of keys, and return the merged log-sum-exp.

    Args:
        out: result [B, H, S, E] over the first keys, in the accumulation dtype. Overwritten with the merged result.
        lse: log-sum-exp [B, H, S] over the first keys.
        other, other_lse: result and log-sum-exp over the second keys, -inf for a query that attends to none of them.
    """
    total = torch.logaddexp(lse, other_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)
    out.mul_(torch.exp(lse - finite).unsqueeze(-1))
    out.addcmul_(other.to(out.dtype), torch.exp(other_lse - finite).unsqueeze(-1))
    return total


def _without_dead_rows(lse: Tensor) -> Tensor:
    """Replace -inf by inf, so that a kernel computes probabilities of 0 instead of NaN for rows without a key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Result:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)


def _cpu_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float,
) -> Gradients:  # fmt: skip
    lse = lse if bias is None else _without_dead_rows(lse)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, bias: None, is_causal: bool, scale: float) -> Result:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]


def _flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float,
) -> Gradients:  # fmt: skip
    state = q.new_empty((), dtype=torch.int64)  # the state of a generator that is not used
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state, scale=scale
    )
    # The kernel gives them the layouts of q, k and v, mostly row-major.
    return in_row_major_layout(dq), in_row_major_layout(dk), in_row_major_layout(dv)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, bias: None, is_causal: bool, scale: float) -> Result:
    out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
    return in_result_layout(q, out), lse.view(q.shape[:3])


def _cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float,
) -> Gradients:  # fmt: skip
    state = q.new_empty((1,), dtype=torch.int64)  # the state of a generator that is not used
    # Up to 2.13, torch caches cuDNN's plans by the layouts of q, k and v only (pytorch/pytorch#191576 adds the others).
    # A plan made for another layout of `out` or `grad_out` would read wrong elements. So both get the layout of q.
    grad_out, out = in_layout_of(q, grad_out), in_layout_of(q, out)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse.unsqueeze(-1), state, state, None, None, None, q.shape[2], k.shape[2], 0.0,
        is_causal, scale=scale,
    )  # fmt: skip
    return in_row_major_layout(dq), in_row_major_layout(dk), in_row_major_layout(dv)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Result:
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q), True, 0.0, is_causal, scale=scale
    )
    lse = lse.narrow(2, 0, q.shape[2])
    return in_result_layout(q, out), lse if lse.is_contiguous() else lse.clone(memory_format=torch.contiguous_format)


def _efficient_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float,
) -> Gradients:  # fmt: skip
    state = q.new_empty((), dtype=torch.int64)
    lse = torch.nn.functional.pad(_without_dead_rows(lse), (0, -lse.shape[2] % _ROW_STEP), value=math.inf)
    wanted = [True, True, True, False]
    # In 16 bits, the kernel ignores the stride of rows in `out`, and assumes H times E elements (`o_strideM`).
    out = out if out.stride(2) == out.shape[1] * out.shape[3] else in_row_major_layout(out)
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, _aligned(bias, q), out, lse, state, state, 0.0, wanted, is_causal, scale=scale
    )[:3]


def _aligned(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a bias to [B, H, S, T]. Its rows begin at multiples of `_MASK_STEP` elements, as the kernel requires."""
    if bias is None:
        return None
    columns = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, -columns % _MASK_STEP))
    return padded.narrow(-1, 0, columns).expand(*q.shape[:2], -1, -1)


_CPU = _LibraryKernel(_cpu_forward, _cpu_backward)
_FLASH = _LibraryKernel(_flash_forward, _flash_backward)
_CUDNN = _LibraryKernel(_cudnn_forward, _cudnn_backward)
_EFFICIENT = _LibraryKernel(_efficient_forward, _efficient_backward)

native = define("native_attention", ARGUMENTS, native_attention, fake_attention)
native_backward = define(
    "native_attention_backward", BACKWARD_ARGUMENTS, native_attention_backward, fake_attention_backward
)
