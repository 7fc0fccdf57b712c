"""Mutations of lowered programs: mistakes that a wrong pass could make.

Each mutation takes a graph, a seeded source of choices and the mesh. A mutation changes the graph in place, and returns
a description of the change. It raises `NothingError` if the graph has no place for the mutation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import fx, nn

from autoshard.errors import AutoshardError
from autoshard.ir.communicators import group_axes
from autoshard.ir.local import axis_index
from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.mesh import Mesh
from autoshard.runtime.simulator import simulate

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Mutation = Callable[[fx.Graph, Random, Mesh], str]

COLLECTIVES = (
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
)
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.bitwise_or.Tensor)
REDUCING = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)


class Copy(nn.Module):
    """A copied graph with its constants.

    Unlike a GraphModule, it writes no code, which would take longer than a proof.
    """

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.graph, self.meta = graph, dict[str, Any]()
        for name, value in constants.items():
            setattr(self, name, value)


def copy_of(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the same program over a copy of its graph."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        environment[node] = graph.node_copy(node, environment.__getitem__)
        environment[node].meta = dict(node.meta)
    names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    copied: Any = Copy(graph, {name: getattr(graph_module, name) for name in names})
    graph.owning_module = copied
    return copied


class NothingError(Exception):
    """A graph has nothing of the kind that a mutation changes."""


def choose(random: Random, items: Sequence[Any]) -> Any:
    """Choose an item; raise `NothingError` without items."""
    if not items:
        raise NothingError
    return random.choice(items)


def pick(graph: fx.Graph, random: Random, wanted: Callable[[fx.Node], bool]) -> Any:
    """Choose a call with the property `wanted`; raise `NothingError` if no call has the property."""
    return choose(random, [node for node in graph.nodes if node.op == "call_function" and wanted(node)])


def tried(mutation: Mutation, graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Return the description of a mutation; None if the graph has no place for the mutation."""
    try:
        return mutation(graph, random, mesh)
    except NothingError:
        return None


def local_value(node: Any) -> torch.Tensor:
    """Return the fake value of a node on a rank."""
    return node.meta["val"]


def is_tensor(node: Any) -> bool:
    """Whether an argument is a node that yields a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def alike(left: fx.Node, right: fx.Node) -> bool:
    """Whether two nodes yield tensors of one shape and type."""
    return local_value(left).shape == local_value(right).shape and local_value(left).dtype == local_value(right).dtype


def insert(graph: fx.Graph, after: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call on `after` behind `after`, and let all users of `after` read the call's result."""
    users = list(after.users)
    with graph.inserting_after(after):
        inserted = graph.call_function(target, (after, *args))
    inserted.meta = dict(after.meta)
    for user in users:
        user.replace_input_with(after, inserted)
    return inserted


def drop_collective(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Replace a collective by a rank's own value, reshaped to the expected shape."""
    wait = pick(graph, random, lambda node: node.target is c10d.wait_tensor.default)
    collective = wait.args[0]
    operand = collective.args[0]
    if collective.target is c10d.all_gather_into_tensor.default:
        with graph.inserting_before(wait):
            operand = graph.call_function(aten.cat.default, ([operand] * collective.args[1],))
    elif collective.target is c10d.reduce_scatter_tensor.default:
        with graph.inserting_before(wait):
            operand = graph.call_function(aten.narrow.default, (operand, 0, 0, local_value(wait).shape[0]))
    wait.replace_all_uses_with(operand)
    graph.erase_node(wait)
    graph.erase_node(collective)
    return f"dropped {collective}"


def double_collective(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """All-reduce the result of an all-reduce again."""
    wait = pick(
        graph,
        random,
        lambda node: node.target is c10d.wait_tensor.default and node.args[0].target is c10d.all_reduce.default,
    )
    again = insert(graph, wait, c10d.all_reduce.default, *wait.args[0].args[1:])
    insert(graph, again, c10d.wait_tensor.default)
    return f"doubled {wait.args[0]}"


def move_collective_to_other_axis(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    node = pick(graph, random, lambda node: node.target in COLLECTIVES)
    if len(mesh.axes) < 2:
        raise NothingError
    other = choose(random, [axis for axis in mesh.axis_names if axis not in group_axes(node.args[-1])])
    node.args = (*node.args[:-1], other)
    return f"{node} over {other}"


def change_reduction(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    node = pick(graph, random, lambda node: node.target in REDUCING)
    other = choose(random, [name for name in ("sum", "max", "min", "avg", "product") if name != node.args[1]])
    node.args = (node.args[0], other, *node.args[2:])
    return f"{node} by {other}"


def swap_operands(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    def has_pair(node: fx.Node) -> bool:
        if node.target in COMMUTATIVE:
            return False
        operands = [item for item in node.args if is_tensor(item)]
        return len(operands) >= 2 and operands[0] is not operands[1] and alike(operands[0], operands[1])

    node = pick(graph, random, has_pair)
    first, second = [item for item in node.args if is_tensor(item)][:2]
    swap = {first: second, second: first}
    node.args = tuple(swap.get(item, item) if isinstance(item, fx.Node) else item for item in node.args)
    return f"swapped {first} and {second} in {node}"


def replace_operand(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Replace an operand by an earlier value of the same shape."""
    nodes = list(graph.nodes)
    node = pick(graph, random, lambda node: any(map(is_tensor, node.all_input_nodes)))
    operand = choose(random, [item for item in node.all_input_nodes if is_tensor(item)])
    earlier = nodes[: nodes.index(node)]
    others = [item for item in earlier if is_tensor(item) and item is not operand and alike(item, operand)]
    if not others:
        raise NothingError
    other = choose(random, others)
    node.replace_input_with(operand, other)
    return f"{node} reads {other} for {operand}"


def change_rank_axis(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    node = pick(graph, random, lambda node: node.target is axis_index)
    if len(mesh.axes) < 2:
        raise NothingError
    node.args = (next(axis for axis in mesh.axis_names if axis != node.args[0]),)
    return f"{node} along {node.args[0]}"


def forget_offset(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Replace the index of the rank by zero in the offset of a piece."""

    def reads_rank(node: fx.Node) -> bool:
        return isinstance(node.target, torch._ops.OpOverload) and any(map(_is_rank_integer, node.all_input_nodes))

    node = pick(graph, random, reads_rank)

    def forget(operand: fx.Node) -> Any:
        return 0 if _is_rank_integer(operand) else operand

    node.args, node.kwargs = fx.map_arg(node.args, forget), fx.map_arg(node.kwargs, forget)
    return f"{node} forgets its rank"


def _is_rank_integer(node: fx.Node) -> bool:
    return node.target is axis_index or (getattr(node.target, "__module__", "") == "_operator" and not is_tensor(node))


def permute_otherwise(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Exchange two entries of a permutation, and reshape the result to its former shape."""
    node = pick(graph, random, lambda node: node.target is aten.permute.default and len(node.args[1]) > 1)
    order = list(node.args[1])
    first, second = random.sample(range(len(order)), 2)
    order[first], order[second] = order[second], order[first]
    shape = list(local_value(node).shape)
    node.args = (node.args[0], order)
    insert(graph, node, aten.reshape.default, shape)
    return f"{node} with order={order}"


def reverse_ranks(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Flip the result of an all-gather or all-to-all along dim 0, as if ranks were in the opposite order."""
    moving = (c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default)
    wait = pick(graph, random, lambda node: node.target is c10d.wait_tensor.default and node.args[0].target in moving)
    insert(graph, wait, aten.flip.default, [0])
    return f"reversed the ranks of {wait.args[0]}"


def scale_value(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    node = pick(graph, random, lambda node: is_tensor(node) and local_value(node).is_floating_point())
    insert(graph, node, choose(random, (aten.mul.Scalar, aten.div.Scalar)), choose(random, (2, 4, 0.5)))
    return f"scaled {node}"


def change_literal(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Change a number among the arguments of a call, such as a size, an offset, a divisor or a dim."""

    def numbers(node: fx.Node) -> list[int]:
        return [index for index, item in enumerate(node.args) if isinstance(item, (int, float)) and item is not None]

    node = pick(graph, random, lambda node: bool(numbers(node)))
    index = choose(random, numbers(node))
    value = node.args[index]
    changed = not value if isinstance(value, bool) else choose(random, (value + 1, value * 2 + 1, -value - 1))
    node.args = (*node.args[:index], changed, *node.args[index + 1 :])
    return f"{node}: argument {index} is {changed} instead of {value}"


def skip_node(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove a node; users read an operand of the same shape instead."""

    def candidates(node: fx.Node) -> list[fx.Node]:
        if not is_tensor(node) or node.target in COLLECTIVES:
            return []
        return [item for item in node.all_input_nodes if is_tensor(item) and alike(item, node)]

    node = pick(graph, random, lambda node: bool(candidates(node)))
    node.replace_all_uses_with(choose(random, candidates(node)))
    graph.erase_node(node)
    return f"skipped {node}"


def remove_wait(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    node = pick(graph, random, lambda node: node.target is c10d.wait_tensor.default)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return f"removed the wait for {node.args[0]}"


def change_operator(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    others = {
        aten.add.Tensor: aten.sub.Tensor,
        aten.sub.Tensor: aten.add.Tensor,
        aten.mul.Tensor: aten.add.Tensor,
        aten.amax.default: aten.amin.default,
        aten.exp.default: aten.tanh.default,
        aten.lt.Scalar: aten.le.Scalar,
        aten.ge.Scalar: aten.gt.Scalar,
        aten.bitwise_or.Tensor: aten.bitwise_and.Tensor,
        aten.mul.Scalar: aten.div.Scalar,
        aten.div.Scalar: aten.mul.Scalar,
    }
    node = pick(graph, random, lambda node: node.target in others)
    node.target = others[node.target]
    return f"{node} calls {node.target}"


def swap_results(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    output = next(iter(reversed(graph.nodes)))
    results: Sequence[fx.Node] = output.args[0]
    pairs = [
        (left, right)
        for left in range(len(results))
        for right in range(left)
        if results[left] is not results[right] and alike(results[left], results[right])
    ]
    if not pairs:
        raise NothingError
    left, right = choose(random, pairs)
    swapped = list(results)
    swapped[left], swapped[right] = results[right], results[left]
    output.args = (tuple(swapped),)
    return f"swapped results {left} and {right}"


MUTATIONS: tuple[Mutation, ...] = (
    drop_collective, double_collective, move_collective_to_other_axis, change_reduction, swap_operands,
    replace_operand, change_rank_axis, forget_offset, permute_otherwise, reverse_ranks, scale_value, change_literal,
    skip_node, remove_wait, change_operator, swap_results,
)  # fmt: skip


def changes_numbers(
    program: LoweredProgram,
    mutated: fx.GraphModule,
    values: Sequence[list[torch.Tensor]],
    *,
    rtol: float,
    atol: float,
    equal_nan: bool = False,
) -> bool:
    """Whether any rank's results for `values` differ from the right program's; a failing program counts."""
    expected = simulate(program.graph_module, program.mesh, values)
    try:
        results = simulate(mutated, program.mesh, values)
    except (AutoshardError, RuntimeError, IndexError, TypeError, ValueError, AttributeError):
        return True
    pairs = [pair for ranks, others in zip(results, expected, strict=True) for pair in zip(ranks, others, strict=True)]
    return not all(
        left.shape == right.shape and torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=equal_nan)
        for left, right in pairs
    )
