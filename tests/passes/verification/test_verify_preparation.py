"""`verify_preparation` accepts prepared programs, and refuses prepared programs with other values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import fx, nn

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from passes.preparation.rewriting import copy_program
from passes.verification.verify_preparation import verify_preparation

aten = torch.ops.aten


class Model(nn.Module):
    """A biased layer between products with views of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        return ((self.layer(x) @ weight).relu() @ weight.t()).square().sum()


@cache
def traced() -> Program:
    torch.manual_seed(0)
    return trace(Model(), (torch.randn(4, 4),), {})


def test_canonical_programs_with_hubs_keep_their_values() -> None:
    """A program that preparation changed, with repeated views and fan-outs, is accepted."""
    prepared = prepare(traced())
    assert traced().text() != prepared.text()
    verify_preparation(traced(), prepared)


def _scale(node: fx.Node) -> None:
    node.args = (node.args[0], 3)


def _swap(node: fx.Node) -> None:
    node.args = node.args[::-1]


@pytest.mark.parametrize(("target", "change"), [(aten.pow.Tensor_Scalar, _scale), (aten.mm.default, _swap)])
def test_a_changed_expression_is_refused(target: object, change: Callable[[fx.Node], None]) -> None:
    """A prepared program with another exponent, or with exchanged operands of a product, is refused."""
    prepared = copy_program(prepare(traced()))
    change(next(node for node in prepared.graph.nodes if node.target is target))
    with pytest.raises(VerificationError, match="once the program is prepared"):
        verify_preparation(traced(), prepared)


def test_results_that_the_slots_do_not_name_are_refused() -> None:
    """Results in the opposite order of the slots are refused, and so is a slot with the name of no node."""
    prepared = copy_program(prepare(traced()))
    output = prepared.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]
    with pytest.raises(VerificationError, match="where its slots name"):
        verify_preparation(traced(), prepared)
    missing = copy_program(prepare(traced()))
    slot = missing.outputs[-1]
    missing.nodes_by_name()[slot.node]._rename("renamed")
    with pytest.raises(VerificationError, match="where its slots name"):
        verify_preparation(traced(), missing)
