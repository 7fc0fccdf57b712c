"""Recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) as semantic operators, one for each layer and direction.

PyTorch runs these layers by cuDNN, by oneDNN, or step by step, depending on the device and on whether gradients are
wanted. Its decompositions for tracing leave out the dropout between layers (2.11 to 2.13). Here

* the input's product of all time steps is one `linear` outside the recurrence, which shards like any other;
* values are [B, T, features] throughout: `linear` flattens B and T, and B, which may be split, has to come first;
* dropout between layers is a call of `dropout`, as in every other module;
* a packed sequence [N, features] is unpacked to [B, T, features] with the length of each row, and packed after the last
  layer. Both are lookups of rows. Their indices are computed from `batch_sizes`, which Python does not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

import autoshard.kernels as kernels
from autoshard.tracing.replaced import replaced
from autoshard.tracing.transforms import call_operator

aten = torch.ops.aten

_State = tuple[Tensor, ...]
"""The state of one layer and direction: (h [B, P],), or for an LSTM (h [B, P], c [B, H])."""


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    """Weights of one layer in one direction. G is the number of gates.

    Args:
        w_ih: [G * H, I].
        w_hh: [G * H, P], where P is H without a projection.
        b_ih, b_hh: [G * H], or None without biases.
        w_hr: [P, H], or None without a projection.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None

    def both_biases(self) -> Tensor | None:
        """Return the sum of both biases, for cells whose gates add both; None without biases."""
        return None if self.b_ih is None or self.b_hh is None else self.b_ih + self.b_hh


_Direction = Callable[[Tensor, _State, _LayerWeights, Tensor | None, bool], tuple[Tensor, _State]]
"""Function that runs one layer in one direction. It takes (x [B, T, I], state, weights, lengths or None, reverse), and
returns (y [B, T, P], last state).
"""


@dataclass(frozen=True, slots=True)
class _Stack:
    direction: _Direction
    layers: int
    dropout: float
    train: bool
    bidirectional: bool

    def run(
        self, x: Tensor, states: Sequence[_State], weights: Sequence[_LayerWeights], lengths: Tensor | None = None
    ) -> tuple[Tensor, list[_State]]:
        """Return the last layer's result, and the last state of each layer and direction.

        `states` and `weights` have an item for each layer and direction: both directions of layer 0, then layer 1, and
        so on.
        """
        last, ways = [], 2 if self.bidirectional else 1
        for layer in range(self.layers):
            if layer > 0 and self.train and self.dropout > 0.0:
                x = torch.dropout(x, self.dropout, True)
            results = []
            for index in range(layer * ways, layer * ways + ways):
                y, state = self.direction(x, states[index], weights[index], lengths, index % ways == 1)
                results.append(y)
                last.append(state)
            x = torch.cat(results, dim=-1) if self.bidirectional else results[0]
        return x, last


def _lstm_direction(
    x: Tensor, state: _State, weights: _LayerWeights, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, _State]:
    inputs = F.linear(x, weights.w_ih, weights.both_biases())
    h0, c0, w_hh, w_hr = _cast(inputs.dtype, *state, weights.w_hh, weights.w_hr)
    y, h, c = call_operator(kernels.lstm, inputs, h0, c0, w_hh, w_hr, lengths, reverse)[:3]
    return y, (h, c)


def _gru_direction(
    x: Tensor, state: _State, weights: _LayerWeights, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, _State]:
    inputs = F.linear(x, weights.w_ih, weights.b_ih)
    h0, w_hh, b_hh = _cast(inputs.dtype, *state, weights.w_hh, weights.b_hh)
    y, h = call_operator(kernels.gru, inputs, h0, w_hh, b_hh, lengths, reverse)[:2]
    return y, (h,)


def _rnn_direction(relu: bool) -> _Direction:
    def direction(
        x: Tensor, state: _State, weights: _LayerWeights, lengths: Tensor | None, reverse: bool
    ) -> tuple[Tensor, _State]:
        inputs = F.linear(x, weights.w_ih, weights.both_biases())
        h0, w_hh = _cast(inputs.dtype, *state, weights.w_hh)
        y, h = call_operator(kernels.rnn, inputs, h0, w_hh, lengths, relu, reverse)
        return y, (h,)

    return direction


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors cast to `dtype`, the dtype of the inputs' product. Autocast makes this dtype narrower."""
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _weights(params: Sequence[Tensor], has_biases: bool, projected: bool) -> list[_LayerWeights]:
    """Return torch's flat list of weights, grouped by layer and direction."""
    size = 2 + 2 * has_biases + projected
    groups = (list(params[start : start + size]) for start in range(0, len(params), size))
    return [
        _LayerWeights(
            group[0], group[1], *(group[2:4] if has_biases else (None, None)), w_hr=group[-1] if projected else None
        )
        for group in groups
    ]


def _lstm(
    x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    stack = _Stack(_lstm_direction, num_layers, dropout, train, bidirectional)
    y, states = stack.run(_batch_first(x, batch_first), _states(hx), _lstm_weights(hx, params, has_biases))
    return _batch_first(y, batch_first), *map(torch.stack, zip(*states, strict=True))


def _lstm_packed(
    data: Tensor, batch_sizes: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    stack = _Stack(_lstm_direction, num_layers, dropout, train, bidirectional)
    weights = _lstm_weights(hx, params, has_biases)
    return _run_packed(stack, data, batch_sizes, _states(hx), weights)


def _lstm_weights(hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool) -> list[_LayerWeights]:
    return _weights(params, has_biases, projected=hx[0].size(2) != hx[1].size(2))


def _one_state(direction: _Direction) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two replacements of torch's layer with one state (GRU, RNN): for a sequence, and for a packed sequence."""

    def run(
        x: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        stack = _Stack(direction, num_layers, dropout, train, bidirectional)
        weights = _weights(params, has_biases, projected=False)
        y, states = stack.run(_batch_first(x, batch_first), _states([hx]), weights)
        return _batch_first(y, batch_first), *map(torch.stack, zip(*states, strict=True))

    def run_packed(
        data: Tensor, batch_sizes: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        stack = _Stack(direction, num_layers, dropout, train, bidirectional)
        weights = _weights(params, has_biases, projected=False)
        return _run_packed(stack, data, batch_sizes, _states([hx]), weights)

    return run, run_packed


def _states(hx: Sequence[Tensor]) -> list[_State]:
    """Return one state for each layer and direction, from torch's tensors `hx`: h, or h and c.

    Each tensor is [layers * directions, B, ...].
    """
    return list(zip(*(tensor.unbind(0) for tensor in hx), strict=True))


def _batch_first(x: Tensor, is_already: bool) -> Tensor:
    return x if is_already else x.transpose(0, 1)


# Packed sequences. Row n of data [N, ...] is time step t of batch row b. Rows are ordered by t, then by b. The entries
# of batch_sizes [T] are the numbers of batch rows with a step t.


def _run_packed(
    stack: _Stack, data: Tensor, batch_sizes: Tensor, states: Sequence[_State], weights: Sequence[_LayerWeights]
) -> tuple[Tensor, ...]:
    batch_sizes = batch_sizes.to(data.device)
    lengths = _lengths(batch_sizes, states[0][0].size(0))
    y, last = stack.run(_unpack(data, batch_sizes, lengths), states, weights, lengths)
    return _pack(y, batch_sizes, data.size(0)), *map(torch.stack, zip(*last, strict=True))


def _lengths(batch_sizes: Tensor, batch: int) -> Tensor:
    """Return the number of time steps of each sequence, int64 [batch], from the number of sequences at each step."""
    rows = torch.arange(batch, device=batch_sizes.device)
    return (batch_sizes > rows.unsqueeze(1)).sum(1)


def _unpack(data: Tensor, batch_sizes: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows of a packed sequence, `data` [N, ...], as [B, T, ...].

    Elements behind a sequence's end are copies of data[0].
    """
    steps, rows = (torch.arange(size, device=data.device) for size in (batch_sizes.size(0), lengths.size(0)))
    starts = batch_sizes.cumsum(0) - batch_sizes
    index = starts + rows.unsqueeze(1)  # [B, T]
    return _look_up(data, torch.where(steps < lengths.unsqueeze(1), index, 0))


def _pack(padded: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    """Return `padded` [B, T, ...] as rows [N, ...] of a packed sequence, with N = `rows`: the inverse of `_unpack`."""
    ends = batch_sizes.cumsum(0)
    numbers = torch.arange(rows, device=padded.device)
    step = (ends <= numbers.unsqueeze(1)).sum(1)  # [N]
    row = numbers - (ends - batch_sizes)[step]
    return _look_up(padded.flatten(0, 1), row * padded.size(1) + step)


def _look_up(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]` by an embedding, whose table has two dims."""
    table = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    return F.embedding(index, table).reshape(*index.shape, *rows.shape[1:])


def _pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the results of `torch._pack_padded_sequence`: the packed rows [N, ...], and the batch size of each step.

    Python reads `lengths` during the trace, because the shapes of the results depend on its values.
    """
    if not bool((lengths[1:] <= lengths[:-1]).all() & (lengths > 0).all()):
        raise ValueError(
            "pack_padded_sequence takes positive lengths in decreasing order; with enforce_sorted=False it sorts them."
        )
    lengths = lengths.to(x.device)
    steps, rows = int(lengths.max()), int(lengths.sum())
    batch_sizes = (lengths > torch.arange(steps, device=x.device).unsqueeze(1)).sum(1)
    return _pack(_batch_first(x, batch_first)[:, :steps], batch_sizes, rows), batch_sizes


def _pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the results of `torch._pad_packed_sequence`: the padded rows and their lengths.

    Python reads the first batch size during the trace, because it is the number of sequences.
    """
    lengths = _lengths(batch_sizes, int(batch_sizes[0]))
    x = _unpack(data, batch_sizes, lengths)
    steps = torch.arange(x.size(1), device=x.device)
    is_real = (steps < lengths.unsqueeze(1)).reshape(*lengths.shape, -1, *([1] * (x.dim() - 2)))
    x = torch.where(is_real, x, x.new_full((), padding_value))
    if total_length > x.size(1):
        rest = torch.full((x.size(0), total_length - x.size(1), *x.shape[2:]), padding_value).to(x)
        x = torch.cat((x, rest), dim=1)
    return _batch_first(x, batch_first), lengths


def computing_packed_sequences() -> contextlib.AbstractContextManager[None]:
    """Return a context in which sequences are packed and padded by computed indices. torch's would read memory."""
    replacements = {"_pack_padded_sequence": _pack_padded_sequence, "_pad_packed_sequence": _pad_packed_sequence}
    return replaced({(torch._VF, name): replacement for name, replacement in replacements.items()})


# Cells, which torch fuses only on GPUs.


def _lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh)).chunk(4, dim=1)
    c = torch.sigmoid(f) * hx[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    r, z, n = F.linear(x, w_ih, b_ih).chunk(3, dim=1)
    u, v, q = F.linear(hx, w_hh, b_hh).chunk(3, dim=1)
    n = torch.tanh(n + torch.sigmoid(r + u) * q)
    return n + torch.sigmoid(z + v) * (hx - n)


_gru, _gru_packed = _one_state(_gru_direction)
_rnn_tanh, _rnn_tanh_packed = _one_state(_rnn_direction(relu=False))
_rnn_relu, _rnn_relu_packed = _one_state(_rnn_direction(relu=True))

RECURRENT: dict[OpOverload, Callable[..., Any]] = {
    aten.lstm.input: _lstm,
    aten.lstm.data: _lstm_packed,
    aten.gru.input: _gru,
    aten.gru.data: _gru_packed,
    aten.rnn_tanh.input: _rnn_tanh,
    aten.rnn_tanh.data: _rnn_tanh_packed,
    aten.rnn_relu.input: _rnn_relu,
    aten.rnn_relu.data: _rnn_relu_packed,
    aten.lstm_cell.default: _lstm_cell,
    aten.gru_cell.default: _gru_cell,
}
"""Composite operator of torch → the function that replaces it during a trace."""
