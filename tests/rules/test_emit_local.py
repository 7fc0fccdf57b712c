"""The local form of a call, one program for all ranks, has the right shapes, offsets and reductions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules.enumeration import Strategy, enumerate_strategies
from autoshard.rules.notation import BoundRule
from autoshard.rules.registry import bound_rule
from tests.rules.recording import tensor
from tests.rules.run_strategy import local_program, results_of

aten = torch.ops.aten
_MESH = Mesh({"data": 2, "model": 2})


def _program(op: Any, args: tuple[Any, ...], **wanted: PartitionSpec) -> str:
    """The code of the local program under the first strategy with these specs of its result and first operand."""
    results = results_of(op, args, {})
    rule = bound_rule(op, args, {}, results)
    assert rule is not None
    strategy = _strategy(rule, wanted["output"], wanted.get("operand"))
    program, _ = local_program(op, args, {}, rule, strategy, _MESH)
    return fx.GraphModule(torch.nn.Module(), program).code


def _strategy(rule: BoundRule, output: PartitionSpec, operand: PartitionSpec | None) -> Strategy:
    return next(
        strategy
        for strategy in enumerate_strategies(rule, _MESH)
        if strategy.outputs[0] == output and (operand is None or strategy.inputs[0] == operand)
    )


def test_an_operator_without_rewrite_is_called_as_it_is() -> None:
    """A split matrix product calls the operator on its local operands, without the index of the rank."""
    text = _program(aten.mm.default, (tensor(4, 4), tensor(4, 4)), output=P("data", "model"))
    assert "aten.mm.default(operand_1, operand_2)" in text
    assert "axis_index" not in text


def test_views_name_the_local_shape() -> None:
    """A view becomes a reshape to the local shape, because the strides of a piece may forbid a view."""
    text = _program(aten.view.default, (tensor(4, 8), [32]), output=P(("data", "model")))
    assert "aten.reshape.default(operand_1, [8])" in text
    whole = _program(aten.view.default, (tensor(4, 8), [32]), output=P())
    assert "aten.reshape.default(operand_1, [32])" in whole


def test_an_offset_counts_all_axes_of_a_dim() -> None:
    """A range split over two axes reads the index of the rank along each axis once."""
    text = _program(aten.arange.default, (8,), output=P(("data", "model")))
    assert "axis_index('data')" in text
    assert "axis_index('model')" in text
    assert text.count("axis_index(") == 2


def test_a_rewrite_reduces_over_the_axes_of_its_factor() -> None:
    """A norm over the columns of a matrix sums only over the axis that splits the columns."""
    args = (tensor(4, 8), 2, [1])
    text = _program(aten.linalg_vector_norm.default, args, output=P("data"), operand=P("data", "model"))
    assert text.count("all_reduce.default(") == 1
    assert "'sum', 'model'" in text
