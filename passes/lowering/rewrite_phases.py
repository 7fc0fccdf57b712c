"""Functions that several passes share: rewrite all phases, and find the calls that lead only to a phase's results."""

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
    """Return the program with each phase replaced by `rewrite(phase)`. The field `lowered` stays, for verification."""
    rewritten: dict[str, Any] = {name: rewrite(phase) for name, phase in phased.phases.items()}
    return replace(phased, **rewritten)


def only_moves(node: fx.Node) -> bool:
    """Whether a call changes no element: a wait, a view or a copy."""
    return is_wait(node) or bool(aliased_operands(node)) or node.target in _COPIES


def only_returned(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls of a graph whose results serve only to be returned.

    All readers of such a call are the output or calls of the same kind. If a later collective sends the call's result
    on, the call must itself be a collective, a wait, a view or a copy.
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
