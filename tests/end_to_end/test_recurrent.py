"""Recurrent layers, cells and packed sequences on a mesh equal one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn as packing

import autoshard
from autoshard import Mesh, P
from autoshard.ir.plan import Plan
from autoshard.testing import check_plan
from autoshard.tracing import trace
from tests.end_to_end.training import assert_equal, train
from tests.passes.greedy_plans import most_split_plan, most_uneven_plan

SQUARE = Mesh({"data": 2, "model": 2})
BY_BATCH = {"input:*": P("data")}


class Classifier(nn.Module):
    """A model that embeds tokens and classifies the last state of a recurrent layer; the loss is a mean."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layer = kind(8, 8, batch_first=True, **options)
        self.head = nn.Linear(8 * (2 if self.layer.bidirectional else 1), 5)

    def forward(self, tokens: Tensor, labels: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(tokens)
        if lengths is not None:
            x = packing.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.layer(x)
        state = last[0] if isinstance(last, tuple) else last
        both = state[-2:].transpose(0, 1).flatten(1) if self.layer.bidirectional else state[-1]
        return {"loss": F.cross_entropy(self.head(both), labels)}


def _batch(size: int = 8, steps: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 12, (size, steps), generator=generator)
    return {"labels": torch.randint(0, 5, (size,), generator=generator), "tokens": tokens}


def _classifier(kind: type[nn.RNNBase], **options: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(kind, **options)


_KINDS = [(nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.GRU, {"num_layers": 2}), (nn.RNN, {})]


def _compile(model: nn.Module, mesh: Mesh, plan: Plan | None = None, **options: Any) -> nn.Module:
    sharded = autoshard.compile(model, mesh, plan=plan, **options)
    assert isinstance(sharded, nn.Module)
    return sharded


def _split_plan(model: nn.Module, inputs: dict[str, Tensor]) -> Plan:
    """Return a plan under which every recurrent layer runs on a split batch, forward and backward."""
    program = trace(model, (), inputs)
    plan = most_split_plan(program, SQUARE)
    names = {node.name for node in program.graph.nodes if str(node.target).startswith("autoshard.")}
    layers = {
        name: choice for name, choice in plan.nodes.items() if name in names and name[:3] in ("lst", "gru", "rnn")
    }
    assert layers
    assert all(any(spec.dims for spec in choice.outputs) for choice in layers.values())
    assert not plan.coverage["without rule"]
    return plan


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_split", [False, True], ids=["chosen", "split"])
@pytest.mark.parametrize(("kind", "options"), _KINDS)
def test_training_equals_one_device(kind: type[nn.RNNBase], options: dict[str, Any], is_split: bool) -> None:
    """Losses, gradients and parameters of three steps equal one device, under the chosen plan and a split batch."""
    inputs = _batch()
    plan = _split_plan(_classifier(kind, **options), inputs) if is_split else None
    sharded = _compile(_classifier(kind, **options), SQUARE, plan)
    assert_equal(train(sharded, inputs), train(_classifier(kind, **options), inputs))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "options"), [(nn.LSTM, {"bidirectional": True}), (nn.GRU, {})])
def test_dropout_between_layers_does_not_depend_on_the_mesh(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    """With the same seed, training with dropout between layers on four ranks equals one rank."""
    inputs, options = _batch(), {**options, "num_layers": 2, "dropout": 0.4}
    trainings = []
    for mesh in (Mesh({"data": 1, "model": 1}), SQUARE):
        plan = _split_plan(_classifier(kind, **options), inputs) if mesh is SQUARE else None
        sharded = _compile(_classifier(kind, **options), mesh, plan)
        torch.manual_seed(7)
        trainings.append(train(sharded, inputs))
    assert_equal(trainings[1], trainings[0])
    evaluated = _classifier(kind, **options).eval()
    assert not torch.equal(evaluated(**inputs)["loss"].detach(), trainings[0].losses[0])


@pytest.mark.slow
def test_large_batches_are_split_by_choice() -> None:
    """The planner splits a large batch over an LSTM, whose weight gradients are then partial sums."""
    plan = autoshard.plan(_classifier(nn.LSTM), SQUARE, example_inputs=_batch(8192, 16))
    layers = [choice for name, choice in plan.nodes.items() if name.startswith("lstm")]
    assert len(layers) == 2
    assert all(choice.inputs[0].axes_of(0) for choice in layers)
    assert layers[1].outputs[-1].partial


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", [Mesh({"model": 4}), Mesh({"model": 3}), SQUARE], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_uneven_splits_equal_one_device(kind: type[nn.RNNBase], mesh: Mesh) -> None:
    """Five sequences of seven steps, with all values split unevenly, equal one device."""
    model, inputs = _classifier(kind, bidirectional=True), _batch(5, 7)
    plan = most_uneven_plan(trace(model, (), inputs), mesh)
    check_plan(model, mesh, inputs, plan=plan, precise=torch.float64).raise_if_different()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "options", "is_split"), [(*_KINDS[0], False), (*_KINDS[1], True)], ids=["chosen", "split"]
)
def test_packed_sequences_equal_one_device(kind: type[nn.RNNBase], options: dict[str, Any], is_split: bool) -> None:
    """Training on rows of unequal lengths, packed in the model, equals one device."""
    labels, tokens = _batch().values()
    inputs = {"labels": labels, "lengths": torch.tensor([6, 2, 3, 6, 1, 4, 4, 5]), "tokens": tokens}
    plan = _split_plan(_classifier(kind, **options), inputs) if is_split else None
    sharded = _compile(_classifier(kind, **options), SQUARE, plan)
    assert_equal(train(sharded, inputs), train(_classifier(kind, **options), inputs))


class Decoder(nn.Module):
    """A model that calls a recurrent cell for each step, as attention decoders do."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        state = None
        for step in range(x.size(1)):
            state = self.cell(x[:, step], state)
        last = state[0] if isinstance(state, tuple) else state
        return {"loss": F.cross_entropy(self.head(last), labels)}


_TENSOR = {"cell.*": P("model"), "input:*": P("data")}


@pytest.mark.sample(4)
@pytest.mark.parametrize("constraints", [{}, BY_BATCH, _TENSOR], ids=["chosen", "by batch", "by hidden values"])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_equal_one_device(kind: type[nn.Module], constraints: dict[str, P]) -> None:
    """Recurrent cells train as on one device, under the chosen plan, a split batch and split weights."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Decoder(kind(8, 8))

    inputs = {"x": torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(2)), "labels": _batch()["labels"]}
    sharded = _compile(build(), SQUARE, constraints=constraints)
    assert_equal(train(sharded, inputs), train(build(), inputs))
