"""FLOPs and bytes of ring attention (entries of `counting.TABLE`), and the messages between its ranks.

Each rank has a piece of the queries, and a piece of the keys and values. In each hop, a rank computes on one piece of
keys and values, while pieces move on to the next rank (`autoshard.kernels.ring_attention`). In a paired ring, each rank
gets an early and a late block of the sequence. So all ranks of a causal ring work equally long. Pieces are resharded to
these blocks before the ring, and results are resharded back.

Arguments end with: is_causal, scale, site, offset, global_shape, index, starts, lengths, is_paired, group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cost_models.counting import compute_dtype, operator_cost, size_bytes
from cost_models.exchanges import EXCHANGES, WORKSPACE_BYTES, Arguments, Exchanged, Tensors
from cost_models.work import AttentionShape, Kind, TensorInfo, Work

FORWARD, BACKWARD = "autoshard.ring_attention.default", "autoshard.ring_attention_backward.default"

_CAUSAL, _LENGTHS, _PAIRED = -10, -3, -2
"""Positions of is_causal, lengths and is_paired among the arguments, counted from the end."""

_WIDE = 4
"""The least bytes of an element in the accumulation type. An element of float64 has 8."""


def _work(inputs: Tensors, outputs: Tensors, operands: Tensors, arguments: Arguments, backward: bool) -> Work:
    """Return the work on the busiest rank.

    In a causal ring without pairs this is the last rank, which computes on all keys but half of its own. In a paired
    causal ring, each rank computes on half of all keys.
    """
    q, k, v = operands
    hops, keys = len(_lengths(arguments)), sum(_lengths(arguments))
    is_causal, is_paired = bool(arguments[_CAUSAL]), bool(arguments[_PAIRED])
    if is_causal and not is_paired:
        keys -= min(q.shape[2], keys) // 2
    shape = AttentionShape(prod(q.shape[:2]), q.shape[2], keys, q.shape[3], v.shape[3], is_paired, backward)
    sums = (q, k, v) if backward else (_out(q, v),)
    read = size_bytes(inputs) + hops * (size_bytes((k, v)) + 2 * _wide_bytes(sums))
    written = size_bytes(outputs) + hops * _wide_bytes(sums)
    return Work(shape.flops, read, written, Kind.ATTENTION, compute_dtype(inputs), attention=shape, steps=hops)


@operator_cost(FORWARD)
def ring_attention(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of ring attention on the busiest rank.

    inputs: a rank's (q [B, H, S, D], k [B, G, T, D], v, ...).
    """
    return _work(inputs, outputs, inputs[:3], arguments, False)


@operator_cost(BACKWARD)
def ring_attention_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the backward of ring attention on the busiest rank.

    inputs: the gradient of the result, then the inputs of the forward.
    """
    return _work(inputs, outputs, inputs[1:4], arguments, True)


def _passed_forward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Return the exchanges of a forward: in each hop, keys and values go to the next rank during computation.

    A paired ring also reshards operands before the ring, and results behind it.
    """
    q, k, v = inputs[:3]
    hops = len(_lengths(arguments))
    round_trip = [Exchanged(size_bytes((k, v)), is_shift=True, overlapped_share=1 / hops)] * (hops - 1)
    return _between(arguments, (q, k, v), round_trip, (_out(q, v), _lse(q)))


def _passed_backward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Return the exchanges of a backward: keys and values go around, and their gradients follow one hop behind.

    Gradients are sent in the accumulation type. Nothing overlaps with the last message.

    A paired ring also reshards operands before the ring, and results behind it.
    """
    grad, q, k, v = inputs[:4]
    hops, held, sums = len(_lengths(arguments)), size_bytes((k, v)), _wide_bytes((k, v))
    sizes = [held * (hop < hops - 1) + sums * (hop > 0) for hop in range(hops)]
    round_trip = [*(Exchanged(size, True, 1 / hops) for size in sizes), Exchanged(sums, is_shift=True)]
    return _between(arguments, (grad, q, k, v, grad, _lse(q)), round_trip, (q, k, v))


def _between(arguments: Arguments, before: Tensors, round_trip: list[Exchanged], behind: Tensors) -> list[Exchanged]:
    if not arguments[_PAIRED]:
        return round_trip
    first, last = ([Exchanged(size_bytes((tensor,))) for tensor in tensors] for tensors in (before, behind))
    return [*first, *round_trip, *last]


def _workspace_forward(inputs: Tensors, arguments: Arguments) -> float:
    """Return the bytes of a forward's workspace.

    It has pieces of other ranks, one hop's result, and sums of results in the accumulation type.
    """
    q, k, v = inputs[:3]
    out, relaid = _out(q, v), size_bytes((q,)) if arguments[_PAIRED] else 0
    return _visiting(arguments) * size_bytes((k, v)) + size_bytes((out,)) + 2 * _wider_bytes(out) + relaid


def _workspace_backward(inputs: Tensors, arguments: Arguments) -> float:
    """Return the bytes of a backward's workspace.

    It has pieces of other ranks, one hop's gradients, and sums of gradients that are not results.
    """
    grad, q, k, v = inputs[:4]
    relaid = size_bytes((grad, q, grad)) if arguments[_PAIRED] else 0
    sums = 3 * _wide_bytes((k, v)) + _wider_bytes(q) - size_bytes((k, v))
    return _visiting(arguments) * size_bytes((k, v)) + sums + size_bytes((q, k, v)) + relaid


def _visiting(arguments: Arguments) -> int:
    """Return how many pieces of keys and values of other ranks a rank holds at most at once."""
    return min(2, len(_lengths(arguments)) - 1 + bool(arguments[_PAIRED]))


def _lengths(arguments: Arguments) -> Sequence[int]:
    lengths = arguments[_LENGTHS]
    assert isinstance(lengths, Sequence), "how many keys each rank has are numbers of the call"
    return lengths


def _out(q: TensorInfo, v: TensorInfo) -> TensorInfo:
    return TensorInfo((*q.shape[:3], v.shape[3]), q.itemsize, q.dtype)


def _lse(q: TensorInfo) -> TensorInfo:
    return TensorInfo(q.shape[:3], max(_WIDE, q.itemsize), q.dtype)


def _wide_bytes(tensors: Tensors) -> int:
    """Return the bytes of tensors of these shapes in the accumulation type."""
    return sum(prod(tensor.shape) * max(_WIDE, tensor.itemsize) for tensor in tensors)


def _wider_bytes(result: TensorInfo) -> int:
    """Return the bytes of a result's sum in the accumulation type, or 0 if the result has this type."""
    return _wide_bytes((result,)) if result.itemsize < _WIDE else 0


EXCHANGES.update({FORWARD: _passed_forward, BACKWARD: _passed_backward})
WORKSPACE_BYTES.update({FORWARD: _workspace_forward, BACKWARD: _workspace_backward})
