"""The program of one sequence follows from the programs of two and three sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, TraceError, tracing
from autoshard.ir.execution import Execution
from autoshard.ir.program import Program, tensor_values
from passes.driver.pricing import price_execution
from passes.search.layers.fold_program import fold_program, is_layout, program_of_one
from tests.passes.decoders import PRICED
from tests.passes.executions import under
from tests.zoo.table import ARCHITECTURES


class Mixer(nn.Module):
    """A linear layer over tokens, whose product autograd turns round for one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.over_tokens, self.over_features = nn.Linear(12, 24), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.over_tokens(self.over_features(x).transpose(1, 2))


def _square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A model that cannot be traced with one sequence.

    Args:
        model: the model.
        inputs: inputs of a number of sequences.
        loss_fn: loss of the model.
    """

    model: nn.Module
    inputs: Callable[[int], Any]
    loss_fn: Callable[..., torch.Tensor] | None = _square


def _vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def _mamba() -> Case:
    model, inputs = ARCHITECTURES["mamba"].build()
    return Case(model, lambda batch: {name: item[:1].expand(batch, -1) for name, item in inputs.items()}, None)


CASES: dict[str, Callable[[], Case]] = {
    "transformer": lambda: Case(
        nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        lambda batch: (torch.zeros(batch, 6, 16), torch.zeros(batch, 5, 16)),
    ),
    "batch norm of vectors": lambda: Case(_vectors(), lambda batch: (torch.zeros(batch, 12),)),
    "mixer": lambda: Case(Mixer(), lambda batch: (torch.zeros(batch, 12, 16),)),
    "mamba": _mamba,
}


def _traced(case: Case, batch: int) -> Program:
    inputs = case.inputs(batch)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return tracing.trace(case.model, args, kwargs, loss_fn=case.loss_fn)


def _shapes(program: Program) -> list[tuple[str, list[tuple[int, ...]]]]:
    return [
        (str(node.target), [tuple(value.shape) for value in tensor_values(node) if value is not None])
        for node in program.graph.nodes
        if node.op == "placeholder" or (node.op == "call_function" and not is_layout(node))
    ]


_CASES = [pytest.param(name, marks=pytest.mark.slow) if name == "mamba" else name for name in CASES]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize("name", _CASES)
def test_sizes_follow_from_two_and_three_sequences(name: str) -> None:
    """The sizes derived for five sequences equal a trace of five sequences in every call."""
    case = CASES[name]()
    two, three, five = (_traced(case, batch) for batch in (2, 3, 5))
    single = program_of_one(two, three)
    fold_program(two, three, ())
    for (target, one), (_, twin), (same, many) in zip(_shapes(single), _shapes(two), _shapes(five), strict=True):
        assert target == same
        for first, second, fifth in zip(one, twin, many, strict=True):
            assert fifth == tuple(a + 4 * (b - a) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize("name", _CASES)
def test_such_models_are_priced_and_planned(name: str) -> None:
    """Recipes of the model have prices, for any example batch, and a search finds one at most as dear."""
    case = CASES[name]()
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=2)
    recipe = under(Execution(data=2, global_batch=8, micro_batch=2, precision="f32"), master_weights=False)
    price = [price_execution(case.model, cluster, recipe, case.inputs(batch), loss_fn=case.loss_fn) for batch in (1, 4)]
    times = [item.predicted.step_time_s for item in price]
    assert times[0] == times[1] > 0
    found = autoshard.plan(
        case.model, cluster, example_inputs=case.inputs(4), loss_fn=case.loss_fn, optimizer="adamw", global_batch=8,
        precision="f32", runtime=replace(PRICED, master_weights=False),
    )  # fmt: skip
    assert found.objective is not None
    assert found.objective <= times[0] * (1 + 1e-9)
    assert math.isclose(found.predicted.step_time_s, found.objective, rel_tol=1e-9)


class Fickle(nn.Module):
    """Does something else for each number of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y.relu(), y.sigmoid(), y.tanh())[x.shape[0] % 3].sum()


def test_a_model_that_does_other_things_for_three_is_refused() -> None:
    """The message names both operators."""
    with pytest.raises(TraceError, match=r"other operators for three sequences than for two: .*relu.* of .*tanh"):
        price_execution(Fickle(), Cluster("h100_sxm", 1, 2), Execution(data=2), (torch.ones(1, 4),))


class Pairs(nn.Module):
    """A model that compares every sequence with every other sequence along one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y @ y.t()).flatten().exp().cumsum(0).sum()


def test_sizes_that_are_none_for_one_sequence_are_refused() -> None:
    """A dim of four for two sequences and nine for three is refused, because one sequence would give -1."""
    two, three = (tracing.trace(Pairs(), (torch.ones(batch, 4),), {}) for batch in (2, 3))
    with pytest.raises(TraceError, match=r"aten.* has a tensor of \[4\] for two sequences, and of \[9\] for three"):
        program_of_one(two, three)
