"""Ring attention: equal work on all ranks, strides of results as in the fakes, and memory as the cost model counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autoshard.kernels as kernels
from autoshard.kernels.exchange import EXCHANGING, Steps, run_together
from autoshard.kernels.ring_attention import Ring
from cost_models.exchanges import WORKSPACE_BYTES
from cost_models.work import TensorInfo
from tests.benchmarks.live_memory import LiveMemory

BATCH, HEADS, PIECE, DEPTH = 1, 8, 256, 64
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def place(rank: int, ranks: int, is_paired: bool) -> tuple[Any, ...]:
    """The constants of a causal ring call with equal pieces, which follow the operands."""
    shape = [BATCH, HEADS, ranks * PIECE, ranks * PIECE]
    called = (0.0, True, 0.125, 0, [0, 0, rank * PIECE, 0], shape)
    return (*called, rank, [PIECE * number for number in range(ranks)], [PIECE] * ranks, is_paired)


def pieces(ranks: int, dtype: torch.dtype, keys: int = HEADS) -> list[list[Tensor]]:
    """Queries, keys, values and gradients [B, H, S, D] of each rank, stored as [B, S, H, D]."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, keys, keys, HEADS)
    return [
        [torch.randn(BATCH, PIECE, h, DEPTH, generator=generator).to(dtype).transpose(1, 2) for h in heads]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_have_as_much_to_do_in_pairs(ranks: int) -> None:
    """With paired pieces, all ranks compute equally many scores at each hop. Otherwise rank r computes
    at r + 1 hops."""
    pairs, hops = [], []
    for rank in range(ranks):
        paired, alone = (Ring(*place(rank, ranks, is_paired)) for is_paired in (True, False))
        calls = [list(paired.calls(hop, PIECE)) for hop in range(ranks)]
        pairs.append([sum(_scores(*call) for call in found) for found in calls])
        hops.append(sum(bool(list(alone.calls(hop, PIECE))) for hop in range(ranks)))
    assert {tuple(counts) for counts in pairs} == {(PIECE * PIECE / 2,) * ranks}
    assert hops == [rank + 1 for rank in range(ranks)]


def _scores(rows: slice, keys: slice, _: slice, is_causal: bool, __: Sequence[int]) -> float:
    return (rows.stop - rows.start) * (keys.stop - keys.start) * (0.5 if is_causal else 1.0)


@pytest.mark.parametrize("is_paired", [False, True])
def test_sums_are_kept_in_float32(is_paired: bool) -> None:
    """With bfloat16 operands, results of four ranks equal float64's to a few roundings, with the
    strides of the fakes."""
    ranks = 4
    given = pieces(ranks, torch.bfloat16, keys=2)
    whole = [torch.cat([rank[operand].double() for rank in given], 2) for operand in range(4)]
    constants = (0.0, True, 0.125, 0, [0] * 4, [BATCH, HEADS, ranks * PIECE, ranks * PIECE])
    out, lse = kernels.attention(*whole[:3], None, None, *constants)
    expected = kernels.attention_backward(whole[3], *whole[:3], None, out, lse, None, *constants)
    forward, backward = (EXCHANGING[each] for each in (kernels.ring_attention, kernels.ring_attention_backward))
    placed = [place(rank, ranks, is_paired) for rank in range(ranks)]
    found = run_together([forward(*rank[:3], None, None, *at) for rank, at in zip(given, placed, strict=True)])
    grads = run_together([
        backward(rank[3], *rank[:3], None, *results, None, *at)
        for rank, results, at in zip(given, found, placed, strict=True)
    ])  # fmt: skip
    ours = [*zip(*found, strict=True), *zip(*grads, strict=True)]
    for ranks_have, theirs in zip(ours, (out, lse, *expected), strict=True):
        _assert_near(torch.cat(ranks_have, 2), theirs)
    meta = [tensor.to("meta") for tensor in given[0]]
    fakes = kernels.attention_backward(meta[3], *meta[:3], None, meta[3], meta[3][..., 0], None, *constants)
    assert [grad.stride() for grad in grads[0]] == [fake.stride() for fake in fakes]
    assert found[0][0].stride() == given[0][0].stride()


def _assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found.double() - expected).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("dtype", NAMES)
def test_memory_is_as_counted(ranks: int, is_paired: bool, dtype: torch.dtype) -> None:
    """The last rank's memory, beside operands and results, is within a sixth of the cost model's formula."""
    q, k, v, grad = pieces(1, dtype)[0]
    at = place(ranks - 1, ranks, is_paired)
    out, lse = _check_memory(kernels.ring_attention, (q, k, v), (None, None), at)
    _check_memory(kernels.ring_attention_backward, (grad, q, k, v, None, out, lse), (None,), at)


def _check_memory(operator: Any, operands: tuple[Any, ...], rest: tuple[Any, ...], at: tuple[Any, ...]) -> Any:
    tensors = [tensor for tensor in operands if tensor is not None]
    with LiveMemory(apart=tensors) as memory:
        results = alone(EXCHANGING[operator](*operands, *rest, *at))
    infos = [TensorInfo(tuple(tensor.shape), tensor.itemsize, NAMES[tensor.dtype]) for tensor in tensors]
    counted = WORKSPACE_BYTES[str(operator)](infos, (*operands, *rest, *at, "context"))
    taken = memory.peak_bytes - sum(result.nbytes for result in results)
    assert counted == pytest.approx(taken, rel=1 / 6)
    return results


def alone(steps: Steps) -> Any:
    """The results of one rank that receives as much as it sends."""
    answer = None
    try:
        while True:
            answer = [tensor.contiguous().clone() for tensor in steps.send(answer).tensors]  # type: ignore[arg-type]
    except StopIteration as done:
        return done.value
