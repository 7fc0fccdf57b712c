"""The table of rules admits the placements that brute force finds on PyTorch's samples."""

from __future__ import annotations

import pytest

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule
from tests.rules.oracle import NotJudgedError, Strategy, find_valid_placements
from tests.rules.recording import Call, database_calls, even_samples, is_functional
from tests.rules.run_strategy import results_of

MESH = Mesh({"axis": 2})

# fmt: off
_SAMPLED = [
    "add", "amax", "any", "baddbmm", "cat", "clamp", "cumsum", "div", "exp", "flip", "gather", "index_add",
    "index_select", "maximum", "mean", "mul", "neg", "nn.functional.embedding", "nn.functional.linear",
    "nn.functional.relu", "nn.functional.softmax", "permute", "prod", "sum", "tril", "where",
]
# fmt: on


def listed(call: Call) -> list[Strategy]:
    """The strategies of `autoshard.rules.strategies`, also where the size of a result depends on values."""
    rule = bound_rule(call.op, call.args, call.kwargs, results_of(call.op, call.args, call.kwargs))
    found = [] if rule is None else enumerate_strategies(rule, MESH)
    return [
        (
            tuple(spec.to_placements(MESH)[0] for spec in strategy.inputs),
            tuple(spec.to_placements(MESH)[0] for spec in strategy.outputs),
        )
        for strategy in found
    ]


@pytest.mark.filterwarnings("ignore")
def test_most_valid_placements_are_admitted() -> None:
    """The rules admit at least 95 % of the placements that brute force finds valid on PyTorch's samples."""
    with even_samples():
        calls = [call for _, call in database_calls(_SAMPLED, 1, is_functional)]
    admitted, missed = 0, []
    for call in calls:
        try:
            found = find_valid_placements(call.op, call.args, call.kwargs, MESH.size)
        except NotJudgedError:
            continue
        strategies = listed(call)
        missed += [(call.op, item) for item in found if not item.is_admitted_by(strategies)]
        admitted += sum(item.is_admitted_by(strategies) for item in found)
    assert admitted > 150
    assert admitted >= 0.95 * (admitted + len(missed)), missed
