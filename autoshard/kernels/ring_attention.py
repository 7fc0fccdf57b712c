"""`autoshard::ring_attention` and its backward: attention of one sequence on several ranks, which pass keys in a ring.

Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023), section 3. Each
rank of the group has one piece of the queries, and one piece of the keys and values. At hop r of n, a rank computes
attention of its queries to the keys of the rank r places before it. Meanwhile it sends these keys and values on to the
next rank. So it never holds more than two pieces of other ranks.

* Forward: the log-sum-exps merge the results of the hops (Dao et al. 2022, section 3.1), in the accumulation dtype.
  lse = log(exp(lse_A) + exp(lse_B)), out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B.
* Backward: the merged result and log-sum-exp give each hop's share of the gradients. The gradients of keys and values
  travel one hop behind the keys and values. Each rank adds its share, and the sums are complete after n hops.

If causality masks all keys of a hop, the rank computes nothing at this hop. So in a causal ring all ranks wait for the
last rank, which skips no hop. With `is_paired`, each rank computes equally much at each hop (Grattafiori et al., "The
Llama 3 herd of models" (2024), section 3.3.2). The sequence is cut into 2 n blocks, and is resharded before and after
the ring. Rank r of n gets an early block, number r, and a late block, number 2 n - 1 - r. All its queries attend to the
early keys of ranks before it. Its late queries attend to all keys of ranks after it.

Operands and results are those of `autoshard::attention`, for a rank's own piece. The mask has the rows of the rank's
queries, and the columns of all keys. Pieces may have unequal lengths. Keys beyond `lengths` are padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from autoshard.kernels.attention import (
    ARGUMENTS,
    BACKWARD_ARGUMENTS,
    empty_results,
    empty_row_major,
    fake_attention,
    fake_attention_backward,
    in_layout_of,
    in_row_major_layout,
)
from autoshard.kernels.exchange import Exchange, Steps, arrived, define_exchanging
from autoshard.kernels.library import accumulation_dtype
from autoshard.kernels.native_attention import merge_into, native_attention, native_attention_backward

Travelling = Generator[Exchange, Sequence[Tensor], list[Tensor]]
"""A generator that yields exchanges, as `Steps` does, and returns a list of tensors."""


class _HopCall(NamedTuple):
    """Attention of some of a rank's queries (`rows`) to some of the keys that are on the rank during a hop (`keys`).

    `columns` is the range of these keys among the keys of all ranks. `is_causal` and `offset` are arguments of
    `autoshard::attention`.
    """

    rows: slice
    keys: slice
    columns: slice
    is_causal: bool
    offset: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's position in the ring, and the arguments of `autoshard::ring_attention` that are no tensors.

    Args:
        dropout_p, is_causal, scale, site, global_shape: arguments of `autoshard::attention`.
        offset: global index [b, h, s, t] of the score of the rank's first query with the first key of all ranks.
        index: the rank's number within the ring.
        starts: for each rank, the global position of its first key.
        lengths: for each rank, the number of its keys.
        is_paired: whether each rank computes on an early and a late block.
    """

    dropout_p: float
    is_causal: bool
    scale: float
    site: int
    offset: Sequence[int]
    global_shape: Sequence[int]
    index: int
    starts: Sequence[int]
    lengths: Sequence[int]
    is_paired: bool

    @property
    def ranks(self) -> int:
        return len(self.starts)

    def send_on(self, *tensors: Tensor) -> Generator[Exchange, Sequence[Tensor], Sequence[Tensor]]:
        """Start to send pieces [B, H, T, ...] to the next rank and to receive the previous rank's pieces.

        The generator returns tensors in transit, for `wait_for_pieces`. Without `tensors`, there is no exchange.
        """
        if not tensors:
            return ()
        rows = tensors[0].shape[0]
        sent, received = (self._all_at(self.index + step, rows) for step in (1, -1))
        return (yield Exchange([tensor.transpose(1, 2) for tensor in tensors], sent, received, is_awaited=False))

    def _all_at(self, rank: int, rows: int) -> list[int]:
        return [rows if number == rank % self.ranks else 0 for number in range(self.ranks)]

    def calls(self, hop: int, queries: int) -> Iterator[_HopCall]:
        """Yield the calls of attention that the rank computes at hop number `hop`, from 0.

        There are no calls if causality masks all keys. `queries` is the number of the rank's queries.
        """
        visitor = (self.index - hop) % self.ranks
        start, length = self.starts[visitor], self.lengths[visitor]
        batch, head, row, column = self.offset
        rows, keys = slice(0, queries), slice(0, length)
        if not self.is_paired:
            columns, place = slice(start, start + length), [batch, head, row, column + start]
            if length and not (self.is_causal and row + queries <= column + start):
                yield _HopCall(rows, keys, columns, self.is_causal, place)
        elif visitor == self.index:
            yield _HopCall(rows, keys, keys, True, [batch, head, 0, 0])
        elif visitor < self.index:
            yield _HopCall(rows, slice(0, length // 2), keys, False, self.offset)
        else:
            yield _HopCall(slice(queries // 2, queries), keys, keys, False, self.offset)

    def attend(self, call: _HopCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None) -> Any:
        """Return out and log-sum-exp of `call`: attention of the queries `call.rows` to the keys `call.keys`."""
        operands = (q[:, :, call.rows], k[:, :, call.keys], v[:, :, call.keys], _columns(mask, call))
        return native_attention(*operands, seed, *self._constants(call))

    def gradients(
        self, call: _HopCall, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor,
        lse: Tensor, seed: Tensor | None,
    ) -> Any:  # fmt: skip
        """Return the addends of `call` to the gradients of q, k and v.

        `out` and `lse` are the merged results over all keys of the ring.
        """
        grad_out, q, out, lse = (tensor[:, :, call.rows] for tensor in (grad_out, q, out, lse))
        operands = (grad_out, q, k[:, :, call.keys], v[:, :, call.keys], _columns(mask, call), out, lse)
        return native_attention_backward(*operands, seed, *self._constants(call))

    def _constants(self, call: _HopCall) -> tuple[Any, ...]:
        return self.dropout_p, call.is_causal, self.scale, self.site, call.offset, self.global_shape

    def to_pairs(self, *tensors: Tensor) -> Travelling:
        """Reshard pieces [B, H, S, ...] so that each rank has an early and a late block of the sequence."""
        return self._exchange_blocks(tensors, self._neighbours, self._pair)

    def from_pairs(self, *tensors: Tensor) -> Travelling:
        """Reshard pieces back, so that each rank has consecutive blocks again, as before `to_pairs`."""
        return self._exchange_blocks(tensors, self._pair, self._neighbours)

    @staticmethod
    def _neighbours(rank: int) -> tuple[int, int]:
        """Return the numbers of the two consecutive blocks that a rank has before and after the ring."""
        return 2 * rank, 2 * rank + 1

    def _pair(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank

    def _exchange_blocks(
        self, tensors: Sequence[Tensor], before: Callable[[int], Sequence[int]], after: Callable[[int], Sequence[int]]
    ) -> Travelling:
        """Exchange half pieces [B, H, S / 2, ...] among all ranks, and return this rank's new pieces.

        `before` maps a rank to the numbers of the two blocks that it has, and `after` to those that it gets.
        """
        ranks = range(self.ranks)
        target, source = ({block: rank for rank in ranks for block in of(rank)} for of in (after, before))
        going, coming = before(self.index), after(self.index)
        sent = [sum(target[block] == rank for block in going) for rank in ranks]
        received = [sum(source[block] == rank for block in coming) for rank in ranks]
        leaving = sorted((target[block], block, half) for half, block in enumerate(going))
        coming_in = [block for _, block in sorted((source[block], block) for block in coming)]
        order = [coming_in.index(block) for block in coming]
        exchanged = []
        for tensor in tensors:
            halves = tensor.transpose(1, 2).unflatten(1, (2, -1)).movedim(1, 0)
            (rows,) = yield Exchange([halves[[half for *_, half in leaving]]], sent, received)
            exchanged.append(rows[order].movedim(0, 1).flatten(1, 2).transpose(1, 2))
        return exchanged


def wait_for_pieces(pending: Sequence[Tensor]) -> list[Tensor]:
    """Wait for the pieces that `Ring.send_on` began to receive, and return them as [B, H, T, ...]."""
    return [rows.transpose(1, 2) for rows in arrived(pending)]


def forward_steps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, *constants: Any) -> Steps:
    """Yield one rank's exchanges of `ring_attention`, and return out and lse. `constants` are the fields of `Ring`."""
    ring, dtype = Ring(*constants), q.dtype
    out, lse = empty_results(q, v)
    out, lse = out.to(accumulation_dtype(dtype)).zero_(), lse.fill_(-math.inf)
    if ring.is_paired:
        q, k, v = yield from ring.to_pairs(q, k, v)
    for hop in range(ring.ranks):
        is_last = hop == ring.ranks - 1
        pending = yield from ring.send_on(*(() if is_last else (k, v)))
        for call in ring.calls(hop, q.shape[2]):
            found = ring.attend(call, q, k, v, mask, seed)
            lse[:, :, call.rows] = merge_into(out[:, :, call.rows], lse[:, :, call.rows], *found)
            del found
        if not is_last:
            k, v = wait_for_pieces(pending)
    if not ring.is_paired:
        return out.to(dtype), lse
    found = yield from ring.from_pairs(out.to(dtype), lse)
    return tuple(in_layout_of(like, x) for like, x in zip((out, lse), found, strict=True))


def backward_steps(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    seed: Tensor | None, *constants: Any,
) -> Steps:  # fmt: skip
    """Yield one rank's exchanges of `ring_attention_backward`, and return the gradients of q, k and v.

    `constants` are the fields of `Ring`.
    """
    ring = Ring(*constants)
    if ring.is_paired:
        grad_out, q, k, v, out, lse = yield from ring.to_pairs(grad_out, q, k, v, out, lse)
    dtypes = (q.dtype, k.dtype, v.dtype)
    dq, sums = _zeros(q), list[Tensor]()
    for hop in range(ring.ranks):
        is_last = hop == ring.ranks - 1
        pending = yield from ring.send_on(*(() if is_last else (k, v)), *sums)
        shares = [_zeros(k), _zeros(v)]
        for call in ring.calls(hop, q.shape[2]):
            gradients = ring.gradients(call, grad_out, q, k, v, mask, out, lse, seed)
            _add((dq, *shares), (call.rows, call.keys, call.keys), gradients)
            del gradients
        arriving = wait_for_pieces(pending)
        if not is_last:
            k, v = arriving[:2]
        sums = [total.add_(share) for total, share in zip(arriving[-2:], shares, strict=True)] if sums else shares
    sums = wait_for_pieces((yield from ring.send_on(*sums)))
    grads = [total.to(dtype) for total, dtype in zip((dq, *sums), dtypes, strict=True)]
    if ring.is_paired:
        grads = yield from ring.from_pairs(*grads)
    return tuple(map(in_row_major_layout, grads))


def _add(totals: Sequence[Tensor], places: Sequence[slice], shares: Sequence[Tensor]) -> None:
    for total, place, share in zip(totals, places, shares, strict=True):
        total[:, :, place].add_(share)


def _zeros(x: Tensor) -> Tensor:
    return empty_row_major(x, dtype=accumulation_dtype(x.dtype)).zero_()


def _columns(mask: Tensor | None, call: _HopCall) -> Tensor | None:
    """Return the mask's columns for the keys of `call`, as a tensor of four dims, each of which may have size 1."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    return mask if mask.shape[3] == 1 else mask[..., call.columns]


_PLACE = ", SymInt index, int[] starts, int[] lengths, bool is_paired, str group)"

ring_attention = define_exchanging(
    "ring_attention",
    ARGUMENTS.replace(") ->", f"{_PLACE} ->"),
    forward_steps,
    lambda *args: fake_attention(*args[:11]),
)
ring_attention_backward = define_exchanging(
    "ring_attention_backward",
    BACKWARD_ARGUMENTS.replace(") ->", f"{_PLACE} ->"),
    backward_steps,
    lambda *args: fake_attention_backward(*args[:4]),
)
