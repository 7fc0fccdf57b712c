"""`autoshard::lstm`, `gru` and `rnn` against torch's layers in float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn as packing
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.kernels import gru, lstm, recurrent, rnn
from cost_models.recurrent import LAUNCHES

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "projected": lambda *args, **kwargs: nn.LSTM(*args, proj_size=2, **kwargs),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
REFERENCES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lstm": (recurrent.lstm_reference, recurrent.lstm_backward_reference),
    "gru": (recurrent.gru_reference, recurrent.gru_backward_reference),
    "tanh": (recurrent.rnn_reference, recurrent.rnn_backward_reference),
}
KINDS = st.sampled_from(sorted(LAYERS))
INPUT, HIDDEN = 3, 4


def _layer(kind: str, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.RNNBase:
    """Return a torch layer of both directions."""
    torch.manual_seed(0)
    return LAYERS[kind](INPUT, HIDDEN, bias=bias, bidirectional=True, batch_first=True).to(dtype)


def _states(kind: str, batch: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return first states h, or h and c, of both directions [2, B, ...]."""
    sizes = {"lstm": [HIDDEN, HIDDEN], "projected": [2, HIDDEN]}.get(kind, [HIDDEN])
    return [torch.randn(2, batch, size, dtype=dtype, requires_grad=True) for size in sizes]


def _run(
    kind: str, layer: nn.RNNBase, x: Tensor, states: list[Tensor], lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, ...]:
    """Run one direction with our operator, and return the result and the last states."""
    suffix = "_l0_reverse" if reverse else "_l0"
    weights = {name.removesuffix(suffix): w for name, w in layer.named_parameters() if name.endswith(suffix)}
    w_hh, b_ih, b_hh = weights["weight_hh"], weights.get("bias_ih"), weights.get("bias_hh")
    state = [both[int(reverse)] for both in states]
    if kind == "gru":
        y, h, _ = gru(F.linear(x, weights["weight_ih"], b_ih), *state, w_hh, b_hh, lengths, reverse)
        return y, h
    inputs = F.linear(x, weights["weight_ih"], None if b_ih is None or b_hh is None else b_ih + b_hh)
    if kind in ("tanh", "relu"):
        return rnn(inputs, *state, w_hh, lengths, kind == "relu", reverse)
    return lstm(inputs, *state, w_hh, weights.get("weight_hr"), lengths, reverse)[:3]


def _run_both(
    kind: str, layer: nn.RNNBase, x: Tensor, states: list[Tensor], lengths: Tensor | None = None
) -> list[Tensor]:
    """Return the result [B, T, 2 P] and the last states [2, B, ...] of both directions."""
    (y, *last), (back, *last_back) = (_run(kind, layer, x, states, lengths, reverse) for reverse in (False, True))
    return [torch.cat((y, back), -1), *(torch.stack(pair) for pair in zip(last, last_back, strict=True))]


def _flat(result: Any) -> list[Tensor]:
    y, last = result
    return [y, *(last if isinstance(last, tuple) else (last,))]


def _assert_same(mine: list[Tensor], torchs: list[Tensor], operands: list[Tensor]) -> None:
    """Check that results are equal, and that equal gradients of the results give equal gradients of `operands`."""
    grads = [torch.randn_like(result) for result in torchs]
    found = torch.autograd.grad(mine, operands, grads)
    expected = torch.autograd.grad(torchs, operands, grads)
    for ours, theirs in zip([*mine, *found], [*torchs, *expected], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@given(kind=KINDS, batch=st.integers(1, 4), steps=st.integers(1, 6), bias=st.booleans())
def test_equals_torch_in_float64(kind: str, batch: int, steps: int, bias: bool) -> None:
    """Results, last states, and gradients of inputs, states and weights equal torch's to rounding."""
    layer, states = _layer(kind, bias), _states(kind, batch)
    x = torch.randn(batch, steps, INPUT, dtype=torch.float64, requires_grad=True)
    expected = layer(x, tuple(states) if len(states) > 1 else states[0])
    _assert_same(_run_both(kind, layer, x, states), _flat(expected), [x, *states, *layer.parameters()])


@given(kind=KINDS, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_rows_of_different_lengths_equal_packed_sequences(kind: str, lengths: list[int]) -> None:
    """Rows with their own numbers of steps have the results and gradients of torch's packed sequences, in both
    directions."""
    layer, states = _layer(kind), _states(kind, len(lengths))
    x = torch.randn(len(lengths), max(lengths), INPUT, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor(lengths)
    packed = packing.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
    result, last = layer(packed, tuple(states) if len(states) > 1 else states[0])
    padded, _ = packing.pad_packed_sequence(result, batch_first=True)
    y, *found = _run_both(kind, layer, x, states, sizes)
    is_real = (torch.arange(max(lengths)) < sizes.unsqueeze(1)).unsqueeze(2)
    expected = _flat((padded, last))
    _assert_same([torch.where(is_real, y, 0.0), *found], expected, [x, *states, *layer.parameters()])


def test_a_row_without_steps_keeps_its_state() -> None:
    """For a row of no steps, the result at every step is its first state, and its inputs have no gradient."""
    inputs = torch.randn(2, 3, 4 * HIDDEN, dtype=torch.float64, requires_grad=True)
    h0, c0 = (torch.randn(2, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.randn(4 * HIDDEN, HIDDEN, dtype=torch.float64)
    y, h, c, _, _ = lstm(inputs, h0, c0, w, None, torch.tensor([3, 0]), False)
    assert torch.equal(y[1], h0[1].expand(3, -1))
    assert torch.equal(h[1], h0[1])
    assert torch.equal(c[1], c0[1])
    dx, dh, dc = torch.autograd.grad(h.sum() + c.sum(), (inputs, h0, c0))
    assert not dx[1].any()
    assert torch.equal(dh[1], torch.ones_like(dh[1]))
    assert torch.equal(dc[1], torch.ones_like(dc[1]))


_WHICH = [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]


@pytest.mark.parametrize("used", _WHICH)
def test_results_that_nothing_uses_have_no_gradient(used: tuple[bool, ...]) -> None:
    """Gradients equal torch's when only some of the results have a gradient."""
    layer, states = _layer("lstm"), _states("lstm", 2)
    x = torch.randn(2, 3, INPUT, dtype=torch.float64, requires_grad=True)
    pick = lambda results: [result for result, is_used in zip(results, used, strict=True) if is_used]  # noqa: E731
    expected = _flat(layer(x, tuple(states)))
    _assert_same(pick(_run_both("lstm", layer, x, states)), pick(expected), [x, *states, *layer.parameters()])


def _operands(kind: str, lengths: Tensor | None, reverse: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return an operator and its arguments. All floating-point tensors among them are float64 and require grad."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    if kind == "gru":
        return gru, (draw(3, 4, 6), draw(3, 2), draw(6, 2), draw(6), lengths, reverse)
    if kind in ("tanh", "relu"):
        return rnn, (draw(3, 4, 2), draw(3, 2), draw(2, 2), lengths, kind == "relu", reverse)
    size = 1 if kind == "projected" else 2
    projection = draw(1, 2) if kind == "projected" else None
    return lstm, (draw(3, 4, 8), draw(3, size), draw(3, 2), draw(8, size), projection, lengths, reverse)


@pytest.mark.sample(8)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 0, 2])], ids=["whole", "lengths"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradcheck_and_opcheck(kind: str, lengths: Tensor | None, reverse: bool) -> None:
    """Gradients equal finite differences, and torch's checks of a custom operator pass."""
    torch.manual_seed(1)
    operator, args = _operands(kind, lengths, reverse)
    differentiable = {"lstm": 3, "projected": 3}.get(kind, 2)
    assert torch.autograd.gradcheck(lambda *operands: operator(*operands)[:differentiable], args)
    torch.library.opcheck(operator, args)


class CountLaunches(TorchDispatchMode):
    """Counts the operators that ran, except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.name())
        return func(*args, **(kwargs or {}))


def _launches(kind: str, steps: int) -> tuple[int, int]:
    """Return the numbers of operators that the references run, forward and backward, in float32."""
    forward, backward = REFERENCES[kind]
    _, args = _operands(kind, None, False)
    inputs, *rest = (arg.detach().float() if isinstance(arg, Tensor) else arg for arg in args)
    with CountLaunches() as counted:
        y, *others = forward(inputs[:, :1].expand(-1, steps, -1), *rest)
    no_grads: list[Any] = [None] * (2 if kind == "lstm" else 1)
    weights = [rest[0], rest[1], None] if kind == "gru" else rest[: 5 if kind == "lstm" else 3]
    saved = others[-2:] if kind == "lstm" else others[-1:] if kind == "gru" else [False]
    with CountLaunches() as counted_backward:
        backward(torch.ones_like(y), *no_grads, *weights, y, *saved, False)
    return counted.count, counted_backward.count


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_launches_are_those_that_are_priced(kind: str) -> None:
    """Each time step launches as many kernels as the cost model counts."""
    few, more = _launches(kind, 4), _launches(kind, 5)
    grown = tuple(after - before for before, after in zip(few, more, strict=True))
    assert grown == LAUNCHES["rnn" if kind == "tanh" else kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", LAYERS)
def test_half_precision_rounds_at_steps(kind: str, dtype: torch.dtype) -> None:
    """Results and gradients are in the operands' dtype, and equal float64's to a few of its roundings."""
    layer, states = _layer(kind), _states(kind, 3)
    x = torch.randn(3, 5, INPUT, dtype=torch.float64, requires_grad=True)
    operands = [x, *states, *layer.parameters()]
    expected = _run_both(kind, layer, x, states)
    wanted = torch.autograd.grad(expected[0].sum(), operands)
    half = _layer(kind, dtype=dtype)
    half_x, half_states = x.detach().to(dtype).requires_grad_(), [s.detach().to(dtype).requires_grad_() for s in states]
    found = _run_both(kind, half, half_x, half_states)
    grads = torch.autograd.grad(found[0].sum(), [half_x, *half_states, *half.parameters()])
    for ours, exact in zip([*found, *grads], [*expected, *wanted], strict=True):
        assert ours.dtype == dtype
        scale = exact.detach().abs().max().item()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps * max(scale, 1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: lstm(x, x[:, 0, :2], x[:, 0, :2], x[0, 0, :2].expand(8, 2), None, None, False),
            r"\[B, T > 0, 4 H\]",
        ),
        (lambda x: gru(x[:, :0, :3], x[:, 0, :1], x[0, :3, :1], None, None, False), r"inputs=\(3, 0, 3\)"),
        (lambda x: gru(x[..., :3], x[:2, 0, :1], x[0, :3, :1], None, None, False), "gru takes inputs"),
        (lambda x: rnn(x, x[:, 0], x[0], None, False, False), r"rnn takes.*w_hh=\(4, 5\)"),
        (lambda x: lstm(x[..., :4], x[:, 0, :1], x[:, 0, :1], x[0, :, :1], x[0, :2, :1], None, False), "w_hr"),
        (lambda x: lstm(x[..., :4], x[:, 0, :2], x[:, 0, :1], x[0, :, :2], None, None, False), r"\(3, 2\), \(3, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[[Tensor], Any], message: str) -> None:
    """Operands whose shapes do not fit are refused, and the error shows the operator's shapes and the found ones."""
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 4, 5))


_FITTING: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "lstm": (lambda *x: lstm(*x, None, None, False), [(2, 3, 12), (2, 3), (2, 3), (12, 3)]),
    "projected": (lambda *x: lstm(*x, None, False), [(2, 3, 12), (2, 2), (2, 3), (12, 2), (2, 3)]),
    "gru": (lambda *x: gru(*x, None, None, False), [(2, 3, 9), (2, 3), (9, 3)]),
    "rnn": (lambda *x: rnn(*x, None, False, False), [(2, 3, 3), (2, 3), (3, 3)]),
}


@pytest.mark.parametrize("kind", sorted(_FITTING))
def test_no_size_may_differ_alone(kind: str) -> None:
    """A size that differs by one in one operand is refused, for every size but the number of steps."""
    call, shapes = _FITTING[kind]
    call(*map(torch.zeros, shapes))
    for place, shape in enumerate(shapes):
        for dim in range(len(shape)):
            for size in {shape[dim] - 1, shape[dim] + 1} if (place, dim) != (0, 1) else ():
                other = (*shape[:dim], size, *shape[dim + 1 :])
                with pytest.raises(ValueError, match="takes inputs"):
                    call(*map(torch.zeros, [*shapes[:place], other, *shapes[place + 1 :]]))
