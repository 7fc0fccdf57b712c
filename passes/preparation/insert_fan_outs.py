"""Insert an identity, the *fan-out*, after every value with several users, to reshard the value once for all users.

Before → after: a value `x` with at least two uses gets `h = fan_out(x)` before its first use in the forward, and all
forward users read `h`. If several backward nodes use `x`, they read `g = fan_out(h)`, placed before the first of them.
All specs are strategies of a fan-out. The planner may then put one reshard, shared by all users, on the edge into the
fan-out, and reshards for single users behind the fan-out. Problems become pairwise, because a cost depends on at most
two nodes.

An optimizer's update reads a parameter directly instead of its fan-out, so that no resharded copy is saved for the
update. A gradient that the update reads gets a fan-out of its own in the backward, right after its computation. So only
the reduced gradient is stored until the update, and micro-batches accumulate the reduced gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import fx

from autoshard.ir.program import Program
from autoshard.rules.fan_out import fan_out
from passes.preparation.rewriting import copy_program, insert_call

_GRADIENT = "gradient"


def is_gradient_fan_out(node: fx.Node | None) -> bool:
    """Whether a node is the fan-out through which an optimizer's update reads a gradient."""
    return node is not None and _GRADIENT in node.meta


@dataclass(frozen=True, slots=True)
class InsertFanOuts:
    """Insert fan-outs after values with several users."""

    def __call__(self, program: Program) -> Program:
        program = copy_program(program)
        order = {node: index for index, node in enumerate(program.graph.nodes)}
        results = {slot.node for slot in program.outputs}
        for node in order:
            if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].ndim > 0:
                _insert(program.graph, node, order, is_result=node.name in results)
        program.graph_module.recompile()
        return program


def _insert(graph: fx.Graph, node: fx.Node, order: Mapping[fx.Node, int], *, is_result: bool) -> None:
    users = sorted((user for user in node.users if user.op == "call_function"), key=order.__getitem__)
    late = [user for user in users if user.meta["phase"] == "update"]
    if late and node.meta["phase"] == "backward":
        _gradient_fan_out(graph, node, late)
    users = [user for user in users if user not in late]
    if len(users) + is_result < 2:
        return
    forward = [user for user in users if user.meta["phase"] == "forward"]
    backward = [user for user in users if user.meta["phase"] == "backward"]
    if forward:
        node = _fan_out(graph, node, users)
    if len(backward) >= 2:
        _fan_out(graph, node, backward)


def _gradient_fan_out(graph: fx.Graph, node: fx.Node, users: list[fx.Node]) -> None:
    """Insert the fan-out of a gradient right after it. The `users` then read the fan-out.

    So only the gradient after its reduction is kept for the update.
    """
    with graph.inserting_after(node):
        inserted = insert_call(graph, fan_out, (node,), like=node)
    inserted.meta[_GRADIENT] = True
    for user in users:
        user.replace_input_with(node, inserted)


def _fan_out(graph: fx.Graph, node: fx.Node, users: list[fx.Node]) -> fx.Node:
    """Insert a fan-out of `node` before the first of `users`, and return it. All `users` then read the fan-out."""
    with graph.inserting_before(users[0]):
        inserted = insert_call(graph, fan_out, (node,), like=users[0])
    inserted.meta["module"] = _common_module(users)
    for user in users:
        user.replace_input_with(node, inserted)
    return inserted


def _common_module(users: Sequence[fx.Node]) -> str:
    """Return the path of the innermost module that contains all users.

    A table that all layers use gets the model's path.
    """
    levels = zip(*(user.meta.get("module", "").split(".") for user in users), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
