"""The bound rules of a program's calls, which are independent of the plan.

A search lowers one program by several plans. Each call's rule is bound once and cached with the program's graph, as
long as the operator keeps that rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autoshard.ir.program import Program
from autoshard.rules.notation import BoundRule
from autoshard.rules.ranges import Ranges, find_ranges
from autoshard.rules.registry import RuleFunction, find_rule
from passes.strategies.enumerate_strategies import rule_of

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
        if function is None or function is not find_rule(node.target):
            rule = rule_of(node, self.ranges)
            self.found[node] = (find_rule(node.target), rule)
        return rule
