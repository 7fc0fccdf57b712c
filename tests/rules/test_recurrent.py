"""Recurrent layers split their batch, with one device's results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import Reduction
from autoshard.rules import strategies
from autoshard.rules.registry import bound_rule, evaluate
from tests.rules.recording import check_recorded, check_splits

ops = torch.ops.autoshard
BATCH, STEPS, HIDDEN = 6, 3, 2
MESHES = (Mesh({"a": 2}), Mesh({"a": 4}), Mesh({"a": 2, "b": 2}))
KINDS = ["lstm", "projected", "gru", "gru without bias", "rnn"]


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _call(kind: str, lengths: Tensor | None = None, reverse: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator of a kind of layer, and drawn arguments."""
    if kind.startswith("gru"):
        bias = None if "without" in kind else _draw(3 * HIDDEN)
        operands = (_draw(BATCH, STEPS, 3 * HIDDEN), _draw(BATCH, HIDDEN), _draw(3 * HIDDEN, HIDDEN), bias)
        return ops.gru.default, (*operands, lengths, reverse)
    if kind == "rnn":
        operands = (_draw(BATCH, STEPS, HIDDEN), _draw(BATCH, HIDDEN), _draw(HIDDEN, HIDDEN))
        return ops.rnn.default, (*operands, lengths, False, reverse)
    size, projection = (1, _draw(1, HIDDEN)) if kind == "projected" else (HIDDEN, None)
    states = (_draw(BATCH, size), _draw(BATCH, HIDDEN))
    operands = (_draw(BATCH, STEPS, 4 * HIDDEN), *states, _draw(4 * HIDDEN, size), projection)
    return ops.lstm.default, (*operands, lengths, reverse)


@pytest.mark.sample(8)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 0, 2, 1, 3, 2])], ids=["whole", "lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_split(kind: str, lengths: Tensor | None, reverse: bool) -> None:
    """Under every strategy, recurrent layers and their gradients equal one device's, with and without lengths."""
    operator, args = _call(kind, lengths, reverse)
    check_splits(operator, *args, meshes=MESHES)
    done = check_recorded(lambda: operator(*args), meshes=MESHES)
    assert {str(operator), str(operator).replace(".default", "_backward.default")} <= done


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_results(used: tuple[int, ...]) -> None:
    """Under every strategy, an LSTM's backward equals one device's if only some results are used."""
    operator, args = _call("lstm")
    done = check_recorded(lambda: tuple(operator(*args)[index] for index in used), meshes=MESHES)
    assert "autoshard.lstm_backward.default" in done


def test_weights_gradients_are_sums_over_the_batch() -> None:
    """A split batch makes weight gradients partial, and a partial gradient makes all results partial."""
    operator, args = _call("gru")
    y, h, gates = operator(*args)
    backward = (torch.randn_like(y), torch.randn_like(h), args[1], args[2], None, y, gates, False)
    found = strategies(ops.gru_backward.default, backward, {}, 2)
    split = next(results for operands, results in found if operands[0].is_shard(0))
    assert [str(placement) for placement in split] == ["S(0)", "S(0)", "P(sum)", "P(sum)"]
    carried = next(pair for pair in found if all(placement.is_partial() for placement in pair[0][:2]))
    assert all(placement.is_replicate() for placement in carried[0][2:])
    assert all(placement.is_partial() for placement in carried[1])
    rule = bound_rule(ops.gru_backward.default, backward, {}, evaluate(ops.gru_backward.default, backward, {}))
    assert rule is not None
    assert (rule.splittable, rule.reduce) == (("b",), {"b": Reduction.SUM})


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_hidden_values_are_not_split(kind: str) -> None:
    """On one axis a recurrent layer has two strategies: whole on each rank, or a split batch."""
    operator, args = _call(kind)
    assert len(strategies(operator, args, {}, 2)) == 2
