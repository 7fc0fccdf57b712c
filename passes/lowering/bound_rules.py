"""The bound rules of a program's calls, and the strategies that plans name for them.

A search lowers one program by several plans, and the program's blocks are alike. The rule of calls that look alike is
bound once and cached with the program's graph, as long as the operator keeps that rule. So are the strategies.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import Program
from autoshard.rules.enumeration import Strategy
from autoshard.rules.notation import BoundRule
from autoshard.rules.ranges import Ranges, facts_of, find_ranges
from autoshard.rules.registry import RuleFunction, find_rule
from passes.preparation.number_values import call_key
from passes.strategies.enumerate_strategies import rule_of
from passes.strategies.local_tracer import form_of
from passes.strategies.match_strategy import match_strategy

_KEPT = "autoshard: bound rules"


@dataclass(frozen=True, slots=True)
class BoundRules:
    """Bound rules of calls, each with its rule function.

    Args:
        program: the program in planning form.
        ranges: ranges of its values.
    """

    program: Program
    ranges: Ranges
    found: dict[fx.Node, tuple[RuleFunction | None, BoundRule | None]] = field(default_factory=dict)
    alike: dict[Hashable, BoundRule | None] = field(default_factory=dict)
    strategies: dict[Hashable, Strategy] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> BoundRules:
        """Return the cached rules of a program."""
        kept = program.graph_module.meta.get(_KEPT)
        if kept is None or kept.program is not program:
            kept = program.graph_module.meta[_KEPT] = cls(program, find_ranges(program.graph_module))
        return kept

    def of_call(self, node: fx.Node) -> BoundRule | None:
        """The rule of a call, or None."""
        function, rule = self.found.get(node, (None, None))
        known = find_rule(node.target)
        if function is None or function is not known:
            call = call_key(node.op, node.target, node.args, node.kwargs, lambda operand: form_of(operand.meta["val"]))
            key = (known, call, facts_of(node, self.ranges))
            if key not in self.alike:
                self.alike[key] = rule_of(node, self.ranges)
            rule = self.alike[key]
            self.found[node] = (known, rule)
        return rule

    def strategy(self, node: fx.Node, mesh: Mesh, node_plan: NodePlan) -> Strategy:
        """The strategy of a call that a plan names; see `match_strategy`."""
        rule = self.of_call(node)
        key = (id(rule), mesh, node_plan.inputs, node_plan.outputs)  # `alike` keeps the rule
        if key not in self.strategies:
            self.strategies[key] = match_strategy(rule, mesh, node_plan, node.name)
        return self.strategies[key]
