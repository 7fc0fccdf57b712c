"""The bound rules of a program's calls, which do not depend on the plan that the program is lowered by.

Searches lower one program by several plans. Each call's rule is bound once, and kept with the program's graph, for as
long as the operator has that rule.
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
    """Rules that were bound, each with the function that gave it.

    Args:
        program: as it is planned.
        ranges: of its values.
    """

    program: Program
    ranges: Ranges
    found: dict[fx.Node, tuple[RuleFunction | None, BoundRule | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> BoundRules:
        """Those of a program, made once."""
        kept = program.graph_module.meta.get(_KEPT)
        if kept is None or kept.program is not program:
            kept = program.graph_module.meta[_KEPT] = cls(program, find_ranges(program.graph_module))
        return kept

    def of_call(self, node: fx.Node) -> BoundRule | None:
        """The rule of a call; None where its operator has none."""
        function, rule = self.found.get(node, (None, None))
        if function is None or function is not find_rule(node.target):
            rule = rule_of(node, self.ranges)
            self.found[node] = (find_rule(node.target), rule)
        return rule
