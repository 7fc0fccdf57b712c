"""Recurrent layers become one operator per layer and direction, for any length, options and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn as packing

from autoshard.errors import TraceError
from autoshard.ir.program import OutputKind
from autoshard.tracing import trace
from tests.tracing.running import assert_equals_eager, count_operators, run_program

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
OPERATORS = {"lstm": "autoshard::lstm", "gru": "autoshard::gru", "tanh": "autoshard::rnn", "relu": "autoshard::rnn"}


def _layer(kind: str, *args: int, **kwargs: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return LAYERS[kind](*args, **kwargs)


_OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "batch_first": True},
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", _OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_equal_eager(kind: str, options: dict[str, Any]) -> None:
    """Outputs, last states and gradients equal eager's, with one operator forward and one backward per layer and
    direction."""
    layer, x = _layer(kind, 3, 4, **options), torch.randn(5, 2, 3)
    program = trace(layer, (x,))
    counts = count_operators(program)
    expected = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    assert counts[OPERATORS[kind]] == counts[f"{OPERATORS[kind]}_backward"] == expected
    assert_equals_eager(program, layer, (x,))


@pytest.mark.parametrize("kind", LAYERS)
def test_given_states_and_unbatched_sequences(kind: str) -> None:
    """States given as input get gradients, and a sequence without a batch is traced. Both equal eager."""
    layer = _layer(kind, 3, 4, num_layers=2)
    state = torch.randn(2, 2, 4, requires_grad=True)
    states = (state, torch.randn(2, 2, 4, requires_grad=True)) if kind == "lstm" else state
    args = (torch.randn(5, 2, 3, requires_grad=True), states)
    program = trace(layer, args)
    assert len(program.outputs_of(OutputKind.INPUT_GRADIENT)) == (3 if kind == "lstm" else 2)
    assert_equals_eager(program, layer, args)
    sequence = (torch.randn(5, 3),)
    assert_equals_eager(trace(layer, sequence), layer, sequence)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
def test_projections(options: dict[str, Any]) -> None:
    """An LSTM with a projection becomes one operator per layer and direction, and equals eager."""
    layer, x = _layer("lstm", 3, 4, proj_size=2, **options), torch.randn(5, 2, 3)
    program = trace(layer, (x,))
    assert count_operators(program)["autoshard::lstm"] == (4 if options else 1)
    assert_equals_eager(program, layer, (x,))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_graph_does_not_grow_with_time(kind: str, train: bool) -> None:
    """A sequence of 50 steps has the operators of a sequence of 2 steps, and none of oneDNN's."""
    layer = _layer(kind, 3, 4, num_layers=2).train(train).requires_grad_(train)
    short, long = (count_operators(trace(layer, (torch.randn(steps, 2, 3),))) for steps in (2, 50))
    assert short == long
    assert sum(long.values()) < 60
    assert not any("mkldnn" in name for name in long)


def test_dropout_is_between_layers() -> None:
    """Three layers have two dropouts in training and none in evaluation."""
    layer, x = _layer("gru", 3, 4, num_layers=3, dropout=0.5), torch.randn(5, 2, 3)
    counts = count_operators(trace(layer, (x,), grad=False))
    assert counts["autoshard::dropout"] == 2
    assert_equals_eager(trace(layer.eval(), (x,)), layer, (x,))
    sure = _layer("lstm", 3, 4, num_layers=2, dropout=1.0)
    assert_equals_eager(trace(sure, (x,)), sure, (x,))


def test_half_precision_and_autocast() -> None:
    """Results have the layer's dtype, or the dtype of autocast, and gradients under autocast are float32."""
    layer, x = _layer("lstm", 3, 4).bfloat16(), torch.randn(5, 2, 3)
    (y, *_), _ = _results(layer, x.bfloat16())
    assert y.dtype == torch.bfloat16
    expected = _layer("lstm", 3, 4)(x)[0]
    torch.testing.assert_close(y.float(), expected.detach(), rtol=0, atol=0.02)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _layer("lstm", 3, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x)[0]

    (y,), gradients = _results(Cast(), x)
    assert y.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    torch.testing.assert_close(y.float(), expected.detach(), rtol=0, atol=0.02)


def _results(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    results = run_program(trace(model, (x,)), model, (x,))
    return [[value for (kind, _), value in results.items() if kind is wanted] for wanted in _KINDS]  # type: ignore[return-value]


_KINDS = (OutputKind.OUTPUT, OutputKind.GRADIENT)


class Packed(nn.Module):
    """A model that packs a sequence, runs a layer on it, and pads the result."""

    def __init__(self, layer: nn.RNNBase, **options: Any) -> None:
        super().__init__()
        self.layer = layer
        self.options = options

    def forward(self, x: Tensor, lengths: Tensor | list[int]) -> tuple[Tensor, Any, Tensor]:
        first = self.layer.batch_first
        packed = packing.pack_padded_sequence(x, lengths, first, enforce_sorted=False)
        y, last = self.layer(packed)
        return packing.pad_packed_sequence(y, first, **self.options)[0], last, packed.data.sum()


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", _OPTIONS[:3], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_are_whole(kind: str, options: dict[str, Any]) -> None:
    """Sequences of unequal lengths, packed in the model or before, have one operator per layer and direction, and
    equal eager."""
    layer, x = _layer(kind, 3, 4, **options), torch.randn(5, 5, 3, requires_grad=True)
    model, lengths = Packed(layer, padding_value=-1.0, total_length=6), torch.tensor([2, 5, 1, 3, 3])
    program = trace(model, (x, lengths))
    counts = count_operators(program)
    ways = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    assert counts[OPERATORS[kind]] == ways
    assert "_pack_padded_sequence" not in counts
    assert_equals_eager(program, model, (x, lengths))
    packed = packing.pack_padded_sequence(torch.randn(4, 3, 3), torch.tensor([4, 2, 1]))
    assert_equals_eager(trace(layer, (packed,)), layer, (packed,))


class RePacked(nn.Module):
    """A model that packs a sequence of any shape and type, and pads it again."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = packing.pack_padded_sequence(x, lengths, batch_first=True)
        return packed.data, packing.pad_packed_sequence(packed, batch_first=True)[0]


@pytest.mark.parametrize("x", [torch.arange(15).view(3, 5), torch.rand(3, 5, 2, 4)], ids=["tokens", "images"])
def test_sequences_of_numbers_and_images_are_packed(x: Tensor) -> None:
    """Packing works for sequences of integers and of tensors with several dims."""
    args = (x, torch.tensor([5, 4, 2]))
    assert_equals_eager(trace(RePacked(), args, grad=False), RePacked(), args)


def test_lengths_as_numbers() -> None:
    """Lengths that are a list of numbers give eager's results."""
    model, args = Packed(_layer("gru", 3, 4)), (torch.randn(5, 3, 3), [2, 5, 4])
    assert_equals_eager(trace(model, args), model, args)


def test_packed_sequences_have_dropout_between_layers() -> None:
    """A packed sequence through two layers has one dropout between them."""
    model = Packed(_layer("lstm", 3, 4, num_layers=2, dropout=0.5))
    counts = count_operators(trace(model, (torch.randn(5, 3, 3), torch.tensor([5, 4, 2])), grad=False))
    assert counts["autoshard::dropout"] == 1


def test_lengths_out_of_order_are_refused() -> None:
    """Lengths in increasing order are refused without `enforce_sorted=False`, as by torch."""

    class Sorted(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return packing.pack_padded_sequence(x, lengths)[0]

    x = torch.randn(5, 2, 3)
    assert_equals_eager(trace(Sorted(), (x, torch.tensor([5, 2]))), Sorted(), (x, torch.tensor([5, 2])))
    with pytest.raises(TraceError, match="positive lengths in decreasing order"):
        trace(Sorted(), (x, torch.tensor([2, 5])))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_pointwise(cell: Callable[..., nn.Module]) -> None:
    """The program of a recurrent cell has no fused operator, and equals eager with and without biases."""
    for bias in (True, False):
        torch.manual_seed(0)
        model, x = cell(3, 4, bias=bias), torch.randn(2, 3, requires_grad=True)
        program = trace(model, (x,))
        assert not any("fused" in name or "cell" in name for name in count_operators(program))
        assert_equals_eager(program, model, (x,))


def test_torch_packs_again_after_a_trace() -> None:
    """Torch's functions for packing are as before after a trace."""
    before = set(vars(torch._VF))
    trace(Packed(_layer("lstm", 3, 4)), (torch.randn(5, 2, 3), torch.tensor([5, 2])))
    assert set(vars(torch._VF)) == before
