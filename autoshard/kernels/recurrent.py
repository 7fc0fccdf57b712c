"""`autoshard::lstm`, `gru`, `rnn` and their backwards: one operator runs all time steps of a layer in one direction.

* LSTM: Hochreiter, Schmidhuber, "Long short-term memory" (1997), with the forget gate of Gers et al. (2000) and the
  projection of Sak et al. (2014).
* GRU: Cho et al., "Learning phrase representations using RNN encoder-decoder" (2014). The reset gate acts after the
  product, as in cuDNN.
* RNN: Elman, "Finding structure in time" (1990).

The caller computes the product of the input with its weights for all steps at once, as an ordinary matrix product.
Source: Appleyard et al., "Optimizing performance of recurrent neural networks on GPUs" (2016).

Shapes: B batch, T time, H hidden, P output size. P is H, or less with a projection. The operand `inputs` at step t is
x_t [B, gates H], the product of the input with its weights. The state before the step is h' and c'.

    lstm   i, f, g, o = x_t + h' W^T;  c = sigmoid(f) c' + sigmoid(i) tanh(g);  h = (sigmoid(o) tanh(c)) R^T
    gru    r, z, n = x_t;  u, v, q = h' W^T + b;  r = sigmoid(r + u), z = sigmoid(z + v), n = tanh(n + r q);
           h = n + z (h' - n)
    rnn    h = tanh(x_t + h' W^T), or relu

With `lengths` [B], row b runs its first lengths[b] steps, and keeps its state in all other steps, as packed sequences
do. Matrix products have the operands' dtype. Gates and cells are computed in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.library import accumulation_dtype, define, differentiate


def lstm_reference(
    inputs: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, w_hr: Tensor | None, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run all time steps of an LSTM layer, of at least one step. Raise `ValueError` if shapes do not fit.

    Args:
        inputs: [B, T, 4 H], the product x W_ih^T plus all biases, gates in the order i, f, g, o.
        h0: the first output state [B, P].
        c0: the first cell state [B, H].
        w_hh: W [4 H, P].
        w_hr: R [P, H], or None without a projection (P = H).
        lengths: int64 [B], the number of steps of each row, in [0, T]. None stands for T.
        reverse: whether to run from the last step to the first.

    Returns:
        y [B, T, P] and the states after the last step, [B, P] and [B, H]. For the backward, also gates [B, T, 4 H]
        after their nonlinearities, and cells [B, T, H].
    """
    _check("lstm", 4, inputs, (h0, c0), w_hh, w_hr)
    h, c = h0, c0.to(accumulation_dtype(inputs.dtype))
    outputs, gates, cells = [], [], []
    for t in _order(inputs, reverse):
        gates_t = torch.addmm(inputs[:, t], h, w_hh.mT).to(c.dtype)
        i, f, g, o = gates_t.chunk(4, dim=1)
        gates_t[:, : 2 * g.shape[1]].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        cell = torch.addcmul(f * c, i, g)
        hidden = (o * torch.tanh(cell)).to(inputs.dtype)
        hidden = hidden if w_hr is None else torch.mm(hidden, w_hr.mT)
        running = _running(lengths, t)
        h, c = _advance(running, hidden, h), _advance(running, cell, c)
        outputs.append(h)
        cells.append(c)
        gates.append(gates_t)
    y, gates, cells = (_stack(steps, inputs, reverse) for steps in (outputs, gates, cells))
    return y, h, c.to(c0.dtype), gates, cells


def lstm_composite(
    inputs: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, w_hr: Tensor | None, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first three results of `lstm_reference` with operators that torch can differentiate."""
    h, c, outputs = h0, c0.to(accumulation_dtype(inputs.dtype)), []
    for t in _order(inputs, reverse):
        i, f, g, o = torch.addmm(inputs[:, t], h, w_hh.mT).to(c.dtype).chunk(4, dim=1)
        cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        hidden = (torch.sigmoid(o) * torch.tanh(cell)).to(inputs.dtype)
        hidden = hidden if w_hr is None else torch.mm(hidden, w_hr.mT)
        running = _running(lengths, t)
        h, c = _advance(running, hidden, h), _advance(running, cell, c)
        outputs.append(h)
    return _stack(outputs, inputs, reverse), h, c.to(c0.dtype)


def lstm_backward_reference(
    grad_y: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, h0: Tensor, c0: Tensor, w_hh: Tensor,
    w_hr: Tensor | None, lengths: Tensor | None, y: Tensor, gates: Tensor, cells: Tensor, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of inputs, h0, c0, w_hh and w_hr (None without a projection), in their shapes and dtypes.

    Args:
        grad_y, grad_h, grad_c: gradients of the first three results of `lstm_reference`. None stands for zero.
        h0, c0, w_hh, w_hr, lengths, reverse: arguments of `lstm_reference`.
        y, gates, cells: results of `lstm_reference`.
    """
    dtype = accumulation_dtype(y.dtype)
    i, f, g, o = gates.to(dtype).chunk(4, dim=2)  # [B, T, H]
    tanh_c, before = torch.tanh(cells.to(dtype)), _before(cells, c0, reverse)
    slopes = (g * _sigmoid_slope(i), before * _sigmoid_slope(f), i * _tanh_slope(g), tanh_c * _sigmoid_slope(o))
    slopes = _where_running(lengths, torch.cat(slopes, dim=2))  # from i, f, g to c, and from o to the output
    slope_c = o * _tanh_slope(tanh_c)
    dh, dc = _start(grad_h, h0, dtype), _start(grad_c, c0, dtype)
    d_inputs, d_hidden = [], []
    for t in reversed(_order(y, reverse)):
        dh = dh if grad_y is None else dh + grad_y[:, t]
        d_hidden.append(dh)
        d_out = dh if w_hr is None else torch.mm(dh.to(y.dtype), w_hr).to(dtype)
        d_cell = torch.addcmul(dc, d_out, slope_c[:, t])
        d_inputs.append((torch.cat((d_cell, d_cell, d_cell, d_out), dim=1) * slopes[:, t]).to(y.dtype))
        running = _running(lengths, t)
        dh = _advance(running, torch.mm(d_inputs[-1], w_hh).to(dtype), dh)
        dc = _advance(running, d_cell * f[:, t], dc)
    dx, dr = _stack(d_inputs, y, not reverse), None
    if w_hr is not None:
        d_projected = _where_running(lengths, _stack(d_hidden, y, not reverse))
        dr = _weight_gradient(d_projected, (o * tanh_c).to(y.dtype))
    return dx, dh.to(h0.dtype), dc.to(c0.dtype), _weight_gradient(dx, _before(y, h0, reverse)), dr


def gru_reference(
    inputs: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor | None, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all time steps of a GRU layer, of at least one step. Raise `ValueError` if shapes do not fit.

    Args:
        inputs: [B, T, 3 H], the product x W_ih^T + b_ih, gates in the order r, z, n.
        h0: the first state [B, H].
        w_hh: W [3 H, H].
        b_hh: b [3 H], or None for zero. It cannot be added to the input's bias, because the reset gate scales it.
        lengths, reverse: arguments of `lstm_reference`.

    Returns:
        y [B, T, H] and the state after the last step [B, H]. For the backward, also gates [B, T, 4 H], the values of
        r, z, n and q.
    """
    _check("gru", 3, inputs, (h0,), w_hh)
    dtype, parts = accumulation_dtype(inputs.dtype), (2 * h0.shape[1], h0.shape[1])
    h, outputs, gates = h0, [], []
    for t in _order(inputs, reverse):
        product = torch.mm(h, w_hh.mT) if b_hh is None else torch.addmm(b_hh, h, w_hh.mT)
        uv, q = product.to(dtype).split(parts, dim=1)
        rz, n = inputs[:, t].to(dtype).split(parts, dim=1)
        r, z = torch.sigmoid(rz + uv).chunk(2, dim=1)
        n = torch.tanh(torch.addcmul(n, r, q))
        h = _advance(_running(lengths, t), torch.addcmul(n, z, h.to(dtype) - n).to(inputs.dtype), h)
        outputs.append(h)
        gates.append(torch.cat((r, z, n, q), dim=1))
    return _stack(outputs, inputs, reverse), h, _stack(gates, inputs, reverse)


def gru_backward_reference(
    grad_y: Tensor | None, grad_h: Tensor | None, h0: Tensor, w_hh: Tensor, lengths: Tensor | None, y: Tensor,
    gates: Tensor, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of inputs, h0, w_hh and b_hh, in their shapes and dtypes.

    grad_y and grad_h are gradients of the first two results of `gru_reference`. None stands for zero. The other
    arguments are arguments and results of `gru_reference`.
    """
    dtype = accumulation_dtype(y.dtype)
    r, z, n, q = gates.to(dtype).chunk(4, dim=2)  # [B, T, H]
    before = _before(y, h0, reverse)
    slope_n = (1 - z) * _tanh_slope(n)
    slope_r, slope_z = slope_n * q * _sigmoid_slope(r), (before - n) * _sigmoid_slope(z)
    slopes = _where_running(lengths, torch.stack((slope_r, slope_z, slope_n * r), dim=2))  # [B, T, 3, H]
    dh, d_hidden, d_products = _start(grad_h, h0, dtype), [], []
    for t in reversed(_order(y, reverse)):
        dh = dh if grad_y is None else dh + grad_y[:, t]
        d_hidden.append(dh)
        d_products.append((dh.unsqueeze(1) * slopes[:, t]).flatten(1).to(y.dtype))
        product = torch.mm(d_products[-1], w_hh).to(dtype)
        dh = _advance(_running(lengths, t), torch.addcmul(product, dh, z[:, t]), dh)
    d_product = _stack(d_products, y, not reverse)
    d_n = _where_running(lengths, torch.stack(d_hidden[:: 1 if reverse else -1], dim=1) * slope_n)
    dx = torch.cat((d_product[..., : 2 * h0.shape[1]], d_n.to(y.dtype)), dim=2)
    return dx, dh.to(h0.dtype), _weight_gradient(d_product, before), d_product.sum((0, 1))


def rnn_reference(
    inputs: Tensor, h0: Tensor, w_hh: Tensor, lengths: Tensor | None, relu: bool, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Run all time steps of an Elman layer, of at least one step. Raise `ValueError` if shapes do not fit.

    Args:
        inputs: [B, T, H], the product x W_ih^T plus all biases.
        h0: the first state [B, H].
        w_hh: W [H, H].
        relu: whether to use relu in place of tanh.
        lengths, reverse: arguments of `lstm_reference`.

    Returns:
        y [B, T, H], and the state after the last step [B, H].
    """
    _check("rnn", 1, inputs, (h0,), w_hh)
    nonlinearity = torch.relu if relu else torch.tanh
    h, outputs = h0, []
    for t in _order(inputs, reverse):
        h = _advance(_running(lengths, t), nonlinearity(torch.addmm(inputs[:, t], h, w_hh.mT)), h)
        outputs.append(h)
    return _stack(outputs, inputs, reverse), h


def rnn_backward_reference(
    grad_y: Tensor | None, grad_h: Tensor | None, h0: Tensor, w_hh: Tensor, lengths: Tensor | None, y: Tensor,
    relu: bool, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of inputs, h0 and w_hh, in their shapes and dtypes.

    grad_y and grad_h are gradients of the results of `rnn_reference`. None stands for zero. The other arguments are
    arguments and results of `rnn_reference`.
    """
    dtype = accumulation_dtype(y.dtype)
    slopes = _where_running(lengths, (y > 0).to(dtype) if relu else _tanh_slope(y.to(dtype)))
    dh, d_inputs = _start(grad_h, h0, dtype), []
    for t in reversed(_order(y, reverse)):
        dh = dh if grad_y is None else dh + grad_y[:, t]
        d_inputs.append((dh * slopes[:, t]).to(y.dtype))
        dh = _advance(_running(lengths, t), torch.mm(d_inputs[-1], w_hh).to(dtype), dh)
    dx = _stack(d_inputs, y, not reverse)
    return dx, dh.to(h0.dtype), _weight_gradient(dx, _before(y, h0, reverse))


def _check(
    name: str, gates: int, inputs: Tensor, states: Sequence[Tensor], w_hh: Tensor, w_hr: Tensor | None = None
) -> None:
    h0, hidden = states[0], states[-1].shape[-1]
    fits = (
        inputs.dim() == 3
        and inputs.shape[1] > 0
        and inputs.shape[2] == gates * hidden
        and all(state.dim() == 2 and state.shape[0] == inputs.shape[0] for state in states)
        and tuple(w_hh.shape) == (gates * hidden, h0.shape[1])
        and (h0.shape[1] == hidden if w_hr is None else tuple(w_hr.shape) == (h0.shape[1], hidden))
    )
    if not fits:
        found = f"inputs={tuple(inputs.shape)}, states={[tuple(state.shape) for state in states]}"
        weights = f"w_hh={tuple(w_hh.shape)}" + ("" if w_hr is None else f", w_hr={tuple(w_hr.shape)}")
        raise ValueError(
            f"{name} takes inputs [B, T > 0, {gates} H], states [B, H], w_hh [{gates} H, H]; found {found}, {weights}."
        )


def _order(x: Tensor, reverse: bool) -> range:
    """Return the indices of the time steps of `x` [B, T, ...] in the order of execution, from the last if `reverse`."""
    steps = range(x.shape[1])
    return steps[::-1] if reverse else steps


def _stack(steps: list[Tensor], like: Tensor, reverse: bool) -> Tensor:
    """Return the values of time steps as a tensor [B, T, ...] in the order of time, with the dtype of `like`.

    `steps` has the values in the order of execution.
    """
    return torch.stack(steps[::-1] if reverse else steps, dim=1).to(like.dtype)


def _before(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step, given the state after each step, both [B, T, ...].

    `first` [B, ...] is the state before the first executed step.
    """
    first = first.unsqueeze(1).to(states.dtype)
    if reverse:
        return torch.cat((states[:, 1:], first), dim=1)
    return torch.cat((first, states[:, :-1]), dim=1)


def _running(lengths: Tensor | None, t: int) -> Tensor | None:
    """Return a bool tensor [B, 1] that says which rows run step t, or None if all rows run all steps."""
    return None if lengths is None else (lengths > t).unsqueeze(1)


def _advance(running: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if running is None else torch.where(running, new, old)


def _where_running(lengths: Tensor | None, values: Tensor) -> Tensor:
    """Return `values` [B, T, ...] with zeros beyond each row's length.

    So no gradient passes a step that did not run.
    """
    if lengths is None:
        return values
    runs = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
    return torch.where(runs.reshape(*runs.shape, *[1] * (values.dim() - 2)), values, 0.0)


def _start(grad: Tensor | None, state: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(state, dtype=dtype) if grad is None else grad.to(dtype)


def _sigmoid_slope(value: Tensor) -> Tensor:
    return value * (1 - value)


def _tanh_slope(value: Tensor) -> Tensor:
    return 1 - value * value


def _weight_gradient(grad: Tensor, operand: Tensor) -> Tensor:
    """Return the gradient of a weight [M, N], summed over batch and time.

    `grad` [B, T, M] is the gradient of the products, and `operand` [B, T, N] is the other factor of the products.
    """
    return torch.mm(grad.flatten(0, 1).mT, operand.flatten(0, 1))


def _fake_lstm(
    inputs: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, w_hr: Tensor | None, *_: object
) -> tuple[Tensor, ...]:
    _check("lstm", 4, inputs, (h0, c0), w_hh, w_hr)
    steps = inputs.shape[:2]
    return (
        inputs.new_empty((*steps, h0.shape[1])),
        inputs.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        inputs.new_empty(inputs.shape),
        inputs.new_empty((*steps, c0.shape[1])),
    )


def _fake_lstm_backward(
    grad_y: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, h0: Tensor, c0: Tensor, w_hh: Tensor,
    w_hr: Tensor | None, lengths: Tensor | None, y: Tensor, gates: Tensor, *_: object,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _like(gates, h0, c0, w_hh, w_hr)


def _fake_gru(inputs: Tensor, h0: Tensor, w_hh: Tensor, *_: object) -> tuple[Tensor, ...]:
    _check("gru", 3, inputs, (h0,), w_hh)
    y = (*inputs.shape[:2], h0.shape[1])
    return inputs.new_empty(y), inputs.new_empty(h0.shape), inputs.new_empty((*y[:2], 4 * y[2]))


def _fake_gru_backward(
    grad_y: Tensor | None, grad_h: Tensor | None, h0: Tensor, w_hh: Tensor, lengths: Tensor | None, y: Tensor, *_: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return y.new_empty((*y.shape[:2], w_hh.shape[0])), *_like(h0, w_hh), y.new_empty((w_hh.shape[0],))


def _fake_rnn(inputs: Tensor, h0: Tensor, w_hh: Tensor, *_: object) -> tuple[Tensor, ...]:
    _check("rnn", 1, inputs, (h0,), w_hh)
    return inputs.new_empty(inputs.shape), inputs.new_empty(h0.shape)


def _fake_rnn_backward(
    grad_y: Tensor | None, grad_h: Tensor | None, h0: Tensor, w_hh: Tensor, lengths: Tensor | None, y: Tensor, *_: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _like(y, h0, w_hh)


def _like(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors)


def _setup_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, c0, w_hh, w_hr, lengths, ctx.reverse = inputs
    y, _, _, gates, cells = output
    ctx.mark_non_differentiable(gates, cells)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h0, c0, w_hh, w_hr, lengths, y, gates, cells)


def _differentiate_lstm(
    ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    grads = grad_y, grad_h, grad_c
    if all(grad is None for grad in grads):
        return (None,) * 7
    return *lstm_backward(*grads, *ctx.saved_tensors, ctx.reverse), None, None


def _setup_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, w_hh, _, lengths, ctx.reverse = inputs
    y, _, gates = output
    ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h0, w_hh, lengths, y, gates)


def _differentiate_gru(ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_y is None and grad_h is None:
        return (None,) * 6
    dx, dh0, dw, db = gru_backward(grad_y, grad_h, *ctx.saved_tensors, ctx.reverse)
    return dx, dh0, dw, db if ctx.needs_input_grad[3] else None, None, None


def _setup_rnn(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, w_hh, lengths, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h0, w_hh, lengths, output[0])


def _differentiate_rnn(ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_y is None and grad_h is None:
        return (None,) * 6
    return *rnn_backward(grad_y, grad_h, *ctx.saved_tensors, *ctx.constants), None, None, None


_GRADS = "Tensor? grad_y, Tensor? grad_h"

lstm = define(
    "lstm",
    "(Tensor inputs, Tensor h0, Tensor c0, Tensor w_hh, Tensor? w_hr, Tensor? lengths, bool reverse)"
    " -> (Tensor y, Tensor h, Tensor c, Tensor gates, Tensor cells)",
    lstm_reference,
    _fake_lstm,
)
lstm_backward = define(
    "lstm_backward",
    f"({_GRADS}, Tensor? grad_c, Tensor h0, Tensor c0, Tensor w_hh, Tensor? w_hr, Tensor? lengths, Tensor y,"
    " Tensor gates, Tensor cells, bool reverse)"
    " -> (Tensor d_inputs, Tensor dh0, Tensor dc0, Tensor dw_hh, Tensor dw_hr)",
    lstm_backward_reference,
    _fake_lstm_backward,
)
gru = define(
    "gru",
    "(Tensor inputs, Tensor h0, Tensor w_hh, Tensor? b_hh, Tensor? lengths, bool reverse)"
    " -> (Tensor y, Tensor h, Tensor gates)",
    gru_reference,
    _fake_gru,
)
gru_backward = define(
    "gru_backward",
    f"({_GRADS}, Tensor h0, Tensor w_hh, Tensor? lengths, Tensor y, Tensor gates, bool reverse)"
    " -> (Tensor d_inputs, Tensor dh0, Tensor dw_hh, Tensor db_hh)",
    gru_backward_reference,
    _fake_gru_backward,
)
rnn = define(
    "rnn",
    "(Tensor inputs, Tensor h0, Tensor w_hh, Tensor? lengths, bool relu, bool reverse) -> (Tensor y, Tensor h)",
    rnn_reference,
    _fake_rnn,
)
rnn_backward = define(
    "rnn_backward",
    f"({_GRADS}, Tensor h0, Tensor w_hh, Tensor? lengths, Tensor y, bool relu, bool reverse)"
    " -> (Tensor d_inputs, Tensor dh0, Tensor dw_hh)",
    rnn_backward_reference,
    _fake_rnn_backward,
)
differentiate(lstm, _setup_lstm, _differentiate_lstm, lstm_composite)
differentiate(gru, _setup_gru, _differentiate_gru, gru_reference)
differentiate(rnn, _setup_rnn, _differentiate_rnn, rnn_reference)
