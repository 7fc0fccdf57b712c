"""Work and exchanges of attention on a ring: the busiest rank, messages, and the share beside computation."""

from __future__ import annotations

import pytest

from cost_models.exchanges import EXCHANGES, WORKSPACE_BYTES, Exchanged
from cost_models.operators import work
from cost_models.topology import GroupLinks, Link
from cost_models.work import AttentionShape, TensorInfo

RANKS, BATCH, HEADS, GROUPS, PIECE, DEPTH = 4, 2, 8, 2, 64, 16


def floats(*shape: int) -> TensorInfo:
    return TensorInfo(shape, 2, "bf16")


Q, K = floats(BATCH, HEADS, PIECE, DEPTH), floats(BATCH, GROUPS, PIECE, DEPTH)
LSE = TensorInfo((BATCH, HEADS, PIECE), 4, "f32")
OPERANDS = {"ring_attention": [Q, K, K], "ring_attention_backward": [Q, Q, K, K, Q, LSE]}
Q_BYTES, K_BYTES = 2 * BATCH * HEADS * PIECE * DEPTH, 2 * BATCH * GROUPS * PIECE * DEPTH
LSE_BYTES = 4 * BATCH * HEADS * PIECE


def arguments(name: str, is_causal: bool, is_paired: bool) -> tuple[object, ...]:
    before = (None,) * (8 if name.endswith("backward") else 5)
    shape, starts = [BATCH, HEADS, RANKS * PIECE, RANKS * PIECE], [PIECE * rank for rank in range(RANKS)]
    called = (0.0, is_causal, 1.0, 0, [0] * 4, shape)
    return (*before, *called, None, starts, [PIECE] * RANKS, is_paired, "context")


def name_of(name: str) -> str:
    return f"autoshard.{name}.default"


@pytest.mark.parametrize("name", OPERANDS)
def test_all_wait_for_the_rank_with_most_work(name: str) -> None:
    """Under a causal mask, the FLOPs are those of the last rank, which has the most keys.

    The last rank leaves out half of its own keys. In pairs of an early and a late block, each rank leaves out half
    of all keys.
    """
    whole = AttentionShape(BATCH * HEADS, PIECE, RANKS * PIECE, DEPTH, DEPTH, False, name.endswith("backward")).flops

    def flops(is_causal: bool, is_paired: bool) -> float:
        return work(name_of(name), OPERANDS[name], [Q], arguments(name, is_causal, is_paired)).flops

    assert flops(False, False) == whole
    assert flops(True, False) == pytest.approx(whole * (1 - 1 / (2 * RANKS)))
    assert flops(True, True) == whole / 2


def test_pieces_go_round() -> None:
    """Keys and values are sent n - 1 times, their float32 gradients n times, and pairs move their pieces once
    before and after."""

    def sent(name: str, is_paired: bool) -> list[Exchanged]:
        return EXCHANGES[name_of(name)](OPERANDS[name], arguments(name, True, is_paired))

    hop = Exchanged(2 * K_BYTES, True, 1 / RANKS)
    assert sent("ring_attention", False) == [hop] * (RANKS - 1)
    backward = sent("ring_attention_backward", False)
    assert sum(each.size_bytes for each in backward) == (RANKS - 1) * 2 * K_BYTES + RANKS * 4 * K_BYTES
    assert (backward[0], backward[-1]) == (hop, Exchanged(4 * K_BYTES, True))
    relaid = [each.size_bytes for each in sent("ring_attention", True) if not each.is_shift]
    assert relaid == [Q_BYTES, K_BYTES, K_BYTES, Q_BYTES, LSE_BYTES]
    relaid = [each.size_bytes for each in sent("ring_attention_backward", True) if not each.is_shift]
    assert relaid == [Q_BYTES, Q_BYTES, K_BYTES, K_BYTES, Q_BYTES, LSE_BYTES, Q_BYTES, K_BYTES, K_BYTES]


def test_what_is_sent_beside_computation_is_not_waited_for() -> None:
    """Communication that overlaps computation is waited for only beyond its share of the time, and other
    communication wholly."""
    links = GroupLinks(4, 4, 1, Link(1e9, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0), None)
    hop, rest = Exchanged(1e9, True, overlapped_share=0.25), Exchanged(1e9, True)
    hidden = 0.0
    assert hop.waited_s(links, 8.0, None) == rest.waited_s(links, 8.0, hidden) == pytest.approx(1.0)
    assert hop.waited_s(links, 8.0, hidden) == 0.0
    assert hop.waited_s(links, 2.0, hidden) == pytest.approx(0.5)
    assert hop.waited_s(links, 2.0, 0.1) == pytest.approx(0.55)
    assert (hop.sent_bytes(4), Exchanged(1e9).sent_bytes(4)) == (1e9, 0.75e9)


@pytest.mark.parametrize("name", OPERANDS)
def test_no_more_than_two_pieces_of_others_are_held(name: str) -> None:
    """The workspace of three ranks is that of 64, and two pieces more than that of two."""

    def count(ranks: int) -> float:
        before = arguments(name, True, False)[:-4]
        return WORKSPACE_BYTES[name_of(name)](OPERANDS[name], (*before, [0] * ranks, [PIECE] * ranks, False, "context"))

    assert count(2) + 2 * K_BYTES == count(3) == count(64)
