"""Compute the values that decide a model's branches, for a whole batch, from its micro-batches (called parts).

`if mask.all():` may be true of one part and false of the batch. A traced program has a graph, the guards, that
computes such values from its inputs. The values for the batch are computed in three steps:

1. Each part computes the guards' reductions over its samples: `mask.sum()`, `mask.all()`, `x.max()`.
2. The results of all parts are reduced to the results of the batch. For example, sums are added, and the least of all
   minima is taken.
3. The rest of the graph is computed from these results. A sum may be compared with a number that grows with the batch:
   `mask.sum() == 24` for one part, `== 48` for two. Then the sum is first divided by the number of parts.

If the graph of the guards has no such form, the batch's values cannot be computed from the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.extract_graph import needed
from autoshard.ir.loss_weights import Branches
from autoshard.ir.program import InputKind, Program
from autoshard.ir.spec import Reduction
from passes.verification.batch_states import SlicedDim, State

aten = torch.ops.aten
_REDUCTIONS: Mapping[Any, Reduction] = {
    aten.sum.default: Reduction.SUM,
    aten.all.default: Reduction.MIN,
    aten.any.default: Reduction.MAX,
    aten.min.default: Reduction.MIN,
    aten.max.default: Reduction.MAX,
    aten.amin.default: Reduction.MIN,
    aten.amax.default: Reduction.MAX,
}
_COMPARISONS = (*(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),)


def combine_branches(
    part: Program, twins: Mapping[fx.Node, fx.Node], states: Mapping[fx.Node, Sequence[State]]
) -> Branches | None:
    """Return the graphs that compute the guards' results for a batch from its parts, or None if this is impossible.

    Args:
        part: the program of one micro-batch, with guards.
        twins: for each node of the guards, the same node in the guards of a program for two micro-batches at once.
        states: for each node of the guards, the state of each of its results.
    """
    assert part.guard_program is not None, "the program has guards"
    nodes = list(part.guard_program.graph.nodes)
    reduced = [node for node in nodes if _is_reduction(node, states)]
    (results,) = next(node for node in nodes if node.op == "output").args
    rest = sorted(needed(results, reduced).difference(reduced))
    if not all(_is_known(node, twins, reduced) for node in rest):
        return None
    slots = {slot.node: slot for slot in part.inputs}
    inputs = [node for node in nodes if node.op == "placeholder"]
    if any(slots[str(node.target)].kind not in (InputKind.INPUT, InputKind.BUFFER) for node in inputs):
        return None
    of_part, of_whole = fx.Graph(), fx.Graph()
    copies = {node: of_part.placeholder(node.name) for node in inputs}
    for node in sorted(needed(reduced, inputs).difference(inputs)):
        copies[node] = copy_node(of_part, node, copies.__getitem__)
    of_part.output(tuple(copies[node] for node in reduced))
    copies = {node: of_whole.placeholder(node.name) for node in reduced}
    parts = of_whole.placeholder("parts")
    for node in rest:
        copies[node] = copy_node(of_whole, node, copies.__getitem__)
        if _numbers(node) != _numbers(twins[node]):
            with of_whole.inserting_before(copies[node]):
                copies[node].update_arg(0, of_whole.call_function(aten.div.Tensor, (copies[node].args[0], parts)))
    of_whole.output(tuple(copies[node] for node in results))
    module = part.guard_program
    return Branches(
        fx.GraphModule(module, of_part),
        tuple(_REDUCTIONS[node.target] for node in reduced),
        fx.GraphModule(module, of_whole),
        tuple(guard.value for guard in part.guards),
        tuple((str(slots[str(node.target)].kind.value), slots[str(node.target)].name) for node in inputs),
    )


def _is_reduction(node: fx.Node, states: Mapping[fx.Node, Sequence[State]]) -> bool:
    if node.target not in _REDUCTIONS or node.meta["val"].dim() or len(node.all_input_nodes) != 1:
        return False
    state = states[node.all_input_nodes[0]][0]
    return isinstance(state, SlicedDim) and not state.exponent


def _is_known(node: fx.Node, twins: Mapping[fx.Node, fx.Node], reduced: Sequence[fx.Node]) -> bool:
    """Whether a call behind the reductions can be computed for the batch.

    This is so if the numbers among its arguments do not depend on the size of the batch. It is also so if the call
    compares a sum, one of the nodes `reduced`, with a number that grows with the batch.
    """
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    ours, theirs = _numbers(node), _numbers(twins[node])
    if ours == theirs:
        return True
    is_sum = node.args[0] in reduced and node.args[0].target is aten.sum.default  # type: ignore[union-attr]
    return node.target in _COMPARISONS and is_sum and theirs == [2 * number for number in ours]


def _numbers(node: fx.Node) -> list[Any]:
    return [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, int | float)]
