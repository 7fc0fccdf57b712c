"""Look up the bound rule of each call of a program, and the strategy that a plan gives the call, with caches.

A bound rule is the sharding rule of an operator with the sizes of one call. A search lowers one program by several
plans, and the program repeats equal calls. So bound rules are cached with the program's graph, and equal calls share
one bound rule. If a new rule is registered for an operator, the new rule is bound to its calls.
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
    """The cached bound rules and strategies of a program's calls.

    Args:
        program: the prepared program.
        ranges: range of each value of the program (`find_ranges`).
        found: rule function and bound rule of each call that was looked up.
        alike: bound rule by the operator and operands of a call, so that equal calls share one rule.
        strategies: strategy by bound rule, mesh, and specs in the plan.
    """

    program: Program
    ranges: Ranges
    found: dict[fx.Node, tuple[RuleFunction | None, BoundRule | None]] = field(default_factory=dict)
    alike: dict[Hashable, BoundRule | None] = field(default_factory=dict)
    strategies: dict[Hashable, Strategy] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> BoundRules:
        """Return the cache that is stored with the program's graph. If there is none, a new cache is stored first."""
        kept = program.graph_module.meta.get(_KEPT)
        if kept is None or kept.program is not program:
            kept = program.graph_module.meta[_KEPT] = cls(program, find_ranges(program.graph_module))
        return kept

    def of_call(self, node: fx.Node) -> BoundRule | None:
        """Return the bound rule of a call, or None if its operator has no rule."""
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
        """Return the strategy under which a call has the specs of `node_plan` (`match_strategy`).

        Raises:
            PlanMismatchError: the call's rule admits no such strategy.
        """
        rule = self.of_call(node)
        key = (id(rule), mesh, node_plan.inputs, node_plan.outputs)  # `alike` keeps the rule
        if key not in self.strategies:
            self.strategies[key] = match_strategy(rule, mesh, node_plan, node.name)
        return self.strategies[key]
