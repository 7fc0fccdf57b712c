"""Gives the collectives of parameters and of gradients communicators of their own.

Collectives on one communicator run one after the other. So a wait for an activation would also wait for all gradients
whose reduction started earlier on the same communicator. Before → after, by the group's name in the collective
(`autoshard.ir.communicators`):

* `"data"` → `"data/parameters"`: gathers of values that are computed from parameters alone, and all gathers of the
  update;
* `"data"` → `"data/gradients"`: reductions whose result the backward only returns (a parameter's gradient), later
  collectives of this result, and all reductions of the update.

All other collectives (tensor and sequence parallelism, losses) keep the name of their axes. All ranks have the same
names, because they have the same program. The names change no result, so `verify_phases` ignores the purpose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoshard.ir.communicators import Purpose, for_purpose
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind
from passes.preparation.rewriting import with_groups

_c10d = torch.ops._c10d_functional
_GATHERS = (_c10d.all_gather_into_tensor.default,)
_REDUCTIONS = (_c10d.all_reduce.default, _c10d.reduce_scatter_tensor.default)


@dataclass(frozen=True, slots=True)
class NameCommunicators:
    """Renames the communicators of parameters' and gradients' collectives, for example "data" to "data/gradients"."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        inputs = phased.lowered.inputs
        hoisted = phased.hoisted
        held = [inputs[index].slot.kind is InputKind.PARAMETER for index in phased.forward_inputs]
        held += [] if hoisted is None else [True] * len(_results(hoisted))
        known = _computed_from(_chosen(phased.forward, held), phased.forward.graph)
        saved = _results(phased.forward)[len(phased.forward_outputs) :]
        kept = _computed_from(_chosen(phased.backward, [node in known for node in saved]), phased.backward.graph)
        update = phased.update
        return replace(
            phased,
            hoisted=None if hoisted is None else _named(hoisted, set(hoisted.graph.nodes), ()),
            forward=_named(phased.forward, known, ()),
            backward=_named(phased.backward, kept, _only_returned(phased.backward.graph)),
            update=None if update is None else _named(update, set(update.graph.nodes), set(update.graph.nodes)),
        )


def _named(
    graph_module: fx.GraphModule, of_parameters: Collection[fx.Node], returned: Collection[fx.Node]
) -> fx.GraphModule:
    def name(node: fx.Node) -> str:
        group = str(node.args[-1])
        if node.target in _GATHERS and node in of_parameters:
            return for_purpose(group, Purpose.PARAMETERS)
        if node.target in (*_GATHERS, *_REDUCTIONS) and node in returned:
            return for_purpose(group, Purpose.GRADIENTS)
        return group

    return with_groups(graph_module, name)


def _chosen(graph_module: fx.GraphModule, flags: Collection[bool]) -> list[fx.Node]:
    """Return the placeholders of a graph whose flag is true.

    `flags` has one flag for each of the first placeholders.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return [node for node, flag in zip(placeholders, flags, strict=False) if flag]


def _computed_from(sources: Collection[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes `sources`, and all nodes that are computed from them alone."""
    found = set(sources)
    for node in graph.nodes:
        operands = node.all_input_nodes
        if operands and node.op != "output" and found.issuperset(operands):
            found.add(node)
    return found


def _only_returned(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls that only the output reads, directly or through calls with one operand."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and all(user.op == "output" or _passes_on(user, found) for user in node.users):
            found.add(node)
    return found


def _passes_on(user: fx.Node, found: Collection[fx.Node]) -> bool:
    """Whether a reader of a value has only one operand, and is in `found`: the calls that lead only to the output."""
    return user in found and len(user.all_input_nodes) == 1


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    results = graph_module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list)), "a lowered program ends in a tuple of results"
    return [node for node in results if isinstance(node, fx.Node)]
