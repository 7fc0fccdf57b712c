"""Reduce 16-bit gradients of 32-bit weights over ranks only after their conversion to 32 bits.

Each rank computes a weight's gradient from its part of the batch, and the gradient is the sum over ranks. In bfloat16
each addition rounds to 8 bits, so the error of the sum grows with the number of ranks. If gradients are first converted
to float32, only each rank's addend is rounded, but twice the bytes are sent. One device adds over its whole batch in
float32 before it rounds, and a mesh has to give the same gradient.

This module finds the links on which a gradient travels in 16 bits, from the calls that compute it to its conversion.
Reshards that reduce a sum are forbidden on these links. (Megatron-LM and torchtitan also reduce in float32 by default;
FSDP2 reduces in the type of the gradient.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import fx

from autoshard.ir.program import OutputKind, Program
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.rules.fan_out import fan_out
from passes.preparation.insert_fan_outs import is_gradient_fan_out
from passes.solver.assignment import Floats

if TYPE_CHECKING:
    from autoshard.rules.notation import BoundRule

_aten = torch.ops.aten


def find_narrow_gradients(program: Program, rules: Mapping[str, BoundRule | None]) -> frozenset[tuple[str, str]]:
    """Return the links (maker's name, reader's name) of the prepared program on which a gradient is still in 16 bits.

    Args:
        rules: the bound rule of each call, by the node's name.
    """
    gradients = {slot.node for slot in program.outputs_of(OutputKind.GRADIENT)}
    found: set[tuple[str, str]] = set()
    for node in program.graph.nodes:
        if _widens(node) and (node.name in gradients or any(map(is_gradient_fan_out, node.users))):
            found |= _trail(node, rules)
    return frozenset(found)


def _widens(node: fx.Node) -> bool:
    """Whether a node of the backward converts 16-bit floating point numbers to a wider type."""
    if node.target is not _aten._to_copy.default or node.meta["phase"] != "backward":
        return False
    value, (operand,) = node.meta["val"], node.all_input_nodes
    return value.is_floating_point() and operand.meta["val"].dtype.itemsize == 2 < value.dtype.itemsize


def _trail(conversion: fx.Node, rules: Mapping[str, BoundRule | None]) -> set[tuple[str, str]]:
    """Return the links (maker, reader) on all paths backwards from a conversion, in names of nodes.

    A path goes on through additions, fan-outs and calls that only move elements (a view, a transpose). It ends at any
    other call, and at a value that is also read elsewhere.
    """
    trail, passed, waiting = set[tuple[str, str]](), {conversion}, [conversion]
    while waiting:
        node = waiting.pop()
        for operand in node.all_input_nodes:
            trail.add((operand.name, node.name))
            if _passes_on(operand, rules) and passed.issuperset(operand.users):
                passed.add(operand)
                waiting.append(operand)
    return trail


def _passes_on(node: fx.Node, rules: Mapping[str, BoundRule | None]) -> bool:
    rule = rules.get(node.name)
    return node.target in (fan_out, _aten.add.Tensor) or (rule is not None and rule.transparent)


def without_sums(table: Floats, sources: Sequence[PartitionSpec], targets: Sequence[PartitionSpec]) -> Floats:
    """Return a table of seconds, [sources, targets], with infinity for each reshard that reduces a partial sum.

    `sources` and `targets` are the specs before and after the reshards of `table`.
    """
    kinds: dict[frozenset[str], int] = {}
    before, after = ([kinds.setdefault(_sums(spec), len(kinds)) for spec in specs] for specs in (sources, targets))
    kept = np.array([[one <= other for other in kinds] for one in kinds])
    return np.where(kept[np.ix_(before, after)], table, np.inf)


def _sums(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(axis for axis, reduction in spec.partial if reduction is Reduction.SUM)
