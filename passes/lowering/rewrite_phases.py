"""Helpers of passes over phased programs: the same rewrite of each phase, and the values that a phase only returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram

_aten = torch.ops.aten
_COPIES = (_aten.cat.default, _aten.clone.default, _aten.split_with_sizes_copy.default)


def rewrite_phases(phased: PhasedProgram, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> PhasedProgram:
    """The program with every phase rewritten; the lowered program as a whole stays as it is, for verification."""
    rewritten: dict[str, Any] = {name: rewrite(phase) for name, phase in phased.phases.items()}
    return replace(phased, **rewritten)


def only_moves(node: fx.Node) -> bool:
    """Whether a call computes nothing: a wait, a view, a copy."""
    return is_wait(node) or bool(aliased_operands(node)) or node.target in _COPIES


def only_returned(graph: fx.Graph) -> set[fx.Node]:
    """Calls whose results only the output reads, through calls of the same kind.

    Behind a collective, only moves, waits and further collectives count.
    """
    found, sent_on = set[fx.Node](), set[fx.Node]()
    for node in reversed(graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        if node.op != "call_function" or not found.issuperset(users):
            continue
        if is_collective(node) or not sent_on.isdisjoint(users):
            if not (is_collective(node) or only_moves(node)):
                continue
            sent_on.add(node)
        found.add(node)
    return found
