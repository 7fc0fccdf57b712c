"""Find the strategy of a call from the specs of its operands and results in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from autoshard.errors import PlanMismatchError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Choice, Split, Strategy, assemble_strategy, axis_choices
from autoshard.rules.notation import BoundRule, Dims


def match_strategy(rule: BoundRule | None, mesh: Mesh, node_plan: NodePlan, name: str) -> Strategy:
    """Return the strategy of `rule` with the operand and result specs of `node_plan`.

    Args:
        rule: the sharding rule of the call, or None if it has none.
        mesh: the mesh of the plan.
        node_plan: the call in the plan.
        name: the call's name for the error message.

    Raises:
        PlanMismatchError: the rule admits no strategy with these specs.
    """
    specs = (*node_plan.inputs, *node_plan.outputs)
    if all(spec.is_fully_replicated for spec in specs):
        return Strategy(node_plan.inputs, node_plan.outputs, (None,) * len(mesh.axes))
    if rule is not None:
        candidates = [[c for c in axis_choices(rule) if _agrees(rule, axis, c, node_plan)] for axis in mesh.axis_names]
        for choices in product(*candidates):
            strategy = assemble_strategy(rule, mesh, choices)
            if strategy and (strategy.inputs, strategy.outputs) == (node_plan.inputs, node_plan.outputs):
                return strategy
    raise PlanMismatchError(
        f"the plan lays out node {name!r} as {list(node_plan.inputs)} -> {list(node_plan.outputs)} on {mesh}, "
        "which no sharding rule admits. Plan again with this release."
    )


def _agrees(rule: BoundRule, axis: str, choice: Choice, node_plan: NodePlan) -> bool:
    """Whether a strategy that has `choice` for the mesh axis `axis` splits the same dims over it as the plan.

    The reductions of partial values are not compared.
    """
    factors = choice.factors if isinstance(choice, Split) else ()
    pairs = [
        *zip(rule.inputs, node_plan.inputs, strict=True),
        *zip(rule.outputs, node_plan.outputs, strict=True),
    ]
    return all(_dim_of(dims, factors) == spec.dim_of(axis) for dims, spec in pairs) and (
        choice is not None or not any(axis in spec.axes for spec in _specs(node_plan))
    )


def _specs(node_plan: NodePlan) -> tuple[PartitionSpec, ...]:
    return (*node_plan.inputs, *node_plan.outputs)


def _dim_of(dims: Dims, factors: Sequence[str]) -> int | None:
    return next((index for index, dim in enumerate(dims) if not set(factors).isdisjoint(dim)), None)
