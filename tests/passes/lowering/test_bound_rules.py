"""Rules of a program's calls are bound once, and bound anew after a change of a rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoshard.rules import registry
from autoshard.rules.ranges import find_ranges
from passes.lowering.bound_rules import BoundRules
from passes.lowering.lower_program import prepare
from passes.strategies.enumerate_strategies import rule_of
from tests.passes.blocks import blocks_program


def test_rules_are_those_of_the_calls() -> None:
    """Every call has the rule that `rule_of` gives, and a second lookup returns the same object."""
    program = prepare(blocks_program(batch=4, length=8, hidden=16))
    ranges = find_ranges(program.graph_module)
    calls = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert calls
    for node in calls:
        rule, again = BoundRules.of(program).of_call(node), rule_of(node, ranges)
        assert rule is not None
        assert again is not None
        assert replace(rule, local=None) == replace(again, local=None)
        assert rule is BoundRules.of(program).of_call(node)


def test_a_rule_that_was_replaced_is_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rule is replaced in the registry, the calls of an already bound program have the new rule."""
    program = prepare(blocks_program(batch=4, length=8, hidden=16))
    node = next(node for node in program.graph.nodes if node.target is torch.ops.aten.mm.default)
    assert BoundRules.of(program).of_call(node) is not None

    def refuse(*args: Any, **kwargs: Any) -> None:
        return None

    monkeypatch.setitem(registry._rules, node.target, refuse)
    assert BoundRules.of(program).of_call(node) is None
