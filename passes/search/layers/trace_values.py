"""Follow values of a folded program to their makers and readers, through views and copies that kernels do not need."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.ir.program import tensor_values
from passes.search.layers.fold_program import FoldedProgram, is_layout
from passes.strategies.enumerate_strategies import operands_of

aten = torch.ops.aten


def is_free(node: fx.Node) -> bool:
    """Whether a call takes no time: a view, a selection of a result, or a layout copy that kernels do not need."""
    return node.op == "call_function" and is_layout(node) and not _is_copy(node)


def _is_copy(node: fx.Node) -> bool:
    """Whether a call is a `clone` that really runs.

    A `clone` does not run if attention or a batched product makes its operand or reads its result, also through views.
    The kernels of these operators read strided tensors.
    """
    if node.target is not aten.clone.default:
        return False
    around: list[fx.Node] = list(node.all_input_nodes)
    while around and is_layout(around[-1]) and around[-1].all_input_nodes:
        around.append(around[-1].all_input_nodes[0])
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        around.append(user)
        waiting += user.users if is_layout(user) else []
    return not any("attention" in str(item.target) or item.target is aten.bmm.default for item in around)


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that made a value, and the index of the value among the node's results.

    `node` is the value, or a view or needless copy of it.
    """
    while is_free(node) and node.all_input_nodes:
        parent = node.all_input_nodes[0]
        if getattr(node.target, "__name__", "") == "getitem" and not is_layout(parent):
            index = node.args[1]
            assert isinstance(index, int)
            return parent, index
        node = parent
    return node, 0


def readers_of(node: fx.Node, index: int | None = None) -> list[fx.Node]:
    """Return the calls that read the results of a node, or only result `index`, directly or through views."""
    found: dict[fx.Node, None] = {}
    waiting = [user for user in node.users if index is None or not _is_other(user, node, index)]
    while waiting:
        user = waiting.pop(0)
        if is_free(user):
            waiting += list(user.users)
        elif user.op == "call_function":
            found[user] = None
    return list(found)


def _is_other(user: fx.Node, node: fx.Node, index: int) -> bool:
    return len(tensor_values(node)) > 1 and bool(user.args[1] != index)


def depending(folded: FoldedProgram, sources: set[str]) -> frozenset[str]:
    """Return `sources`, and the names of all nodes whose values depend on these placeholders."""
    found = set(sources)
    for node in folded.single.graph.nodes:
        if any(item.name in found for item in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def makers_of_outputs(folded: FoldedProgram) -> frozenset[str]:
    """Return the names of the nodes that make the program's outputs, such as gradients of parameters."""
    nodes = folded.single.nodes_by_name()
    return frozenset(source_of(nodes[slot.node])[0].name for slot in folded.single.outputs if slot.node in nodes)


def attention_cores(folded: FoldedProgram) -> frozenset[str]:
    """Return the names of the forward calls in attention's cores.

    A core is two products of activations, and the calls between them.
    """
    nodes = [node for node in folded.single.graph.nodes if node.op == "call_function"]
    forward = [node for node in nodes if node.meta["phase"] == "forward"]
    products = [node for node in forward if node.target is aten.bmm.default and not _multiplies_weight(node)]
    after: set[fx.Node] = set()
    for node in forward:
        if any(item in after or item in products for item in node.all_input_nodes):
            layer = folded.layer_of.get(node.name)
            if any(folded.layer_of.get(item.name) == layer for item in node.all_input_nodes):
                after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(forward):
        if any(user in before or (user in products and user in after) for user in node.users):
            before.add(node)
    inside = {node.name for node in forward if node in before and (node in after or node in products)}
    return frozenset(inside | {node.name for node in forward if node in products and node in after})


def _multiplies_weight(node: fx.Node) -> bool:
    return any(source_of(operand)[0].op == "placeholder" for operand in operands_of(node))
