"""Mutations that only training programs can have: of gradients, weights, seeds and constants."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.ir.local import axis_index
from autoshard.ir.mesh import Mesh
from tests.passes.mutations import REDUCING, Mutation, NothingError, alike, choose, insert, is_tensor, local_value, pick

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_POINTWISE = (
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.exp.default, aten.neg.default, aten.pow.Tensor_Scalar,
    aten.mul.Scalar, aten.rsqrt.default, aten.sigmoid.default, aten.tanh.default, aten.log.default, aten.sqrt.default,
    aten.le.Scalar, aten.add.Scalar, aten.clamp.default, aten.clone.default, aten.div.Scalar,
)  # fmt: skip


def _ends_reduction(node: fx.Node) -> bool:
    """Whether a node is the wait of a reduction."""
    return node.target is c10d.wait_tensor.default and getattr(node.args[0], "target", None) in REDUCING


def drop_gradient_reduction(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Drop the reduction of a gradient, so that each rank keeps its own addend."""
    wait = pick(graph, random, lambda node: _ends_reduction(node) and node.meta.get("phase") == "backward")
    reduction: Any = wait.args[0]
    operand = reduction.args[0]
    if reduction.target is c10d.reduce_scatter_tensor.default:
        with graph.inserting_before(wait):
            operand = graph.call_function(aten.narrow.default, (operand, 0, 0, local_value(wait).shape[0]))
    wait.replace_all_uses_with(operand)
    graph.erase_node(wait)
    graph.erase_node(reduction)
    return f"gradient without its reduction, {reduction}"


def move_collective(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move an all-reduce behind the pointwise call that reads its result."""

    def reads_reduced(node: fx.Node) -> bool:
        operand = node.args[0] if node.target in _POINTWISE and node.args else None
        return isinstance(operand, fx.Node) and _ends_reduction(operand) and alike(operand, node)

    call = pick(graph, random, reads_reduced)
    wait: Any = call.args[0]
    reduction: Any = wait.args[0]
    if reduction.target is not c10d.all_reduce.default:
        raise NothingError
    call.args = (reduction.args[0], *call.args[1:])
    moved = insert(graph, call, c10d.all_reduce.default, *reduction.args[1:])
    insert(graph, moved, c10d.wait_tensor.default)
    return f"{reduction} behind {call}"


def drop_addend(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove one of two addends: of a tied weight's gradient, or of a residual."""

    def adds(node: fx.Node) -> bool:
        return node.target is aten.add.Tensor and all(is_tensor(item) and alike(item, node) for item in node.args)

    node = pick(graph, random, adds)
    kept, lost = random.sample(node.args, 2)
    node.replace_all_uses_with(kept)  # type: ignore[arg-type]
    graph.erase_node(node)
    return f"{node} without {lost}"


def return_stale_value(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Return an input of the program, such as an old weight, in place of a result."""
    output = graph.output_node()
    results: Any = output.args[0]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and is_tensor(node)]
    pairs = [
        (index, item) for index, result in enumerate(results) for item in inputs
        if is_tensor(result) and item is not result and alike(result, item)
    ]  # fmt: skip
    if not pairs:
        raise NothingError
    index, item = choose(random, pairs)
    output.args = ((*results[:index], item, *results[index + 1 :]),)
    return f"result {index} is {item}, as it came in"


def read_unreduced(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Let one of several readers read an unreduced value, such as an unsynchronised weight."""
    wait = pick(graph, random, lambda node: _ends_reduction(node) and alike(node, node.args[0].args[0]))  # type: ignore[union-attr]
    if not wait.users:
        raise NothingError
    reduction: Any = wait.args[0]
    reader = choose(random, list(wait.users))
    reader.replace_input_with(wait, reduction.args[0])
    return f"{reader} reads {reduction.args[0]} before it is reduced"


def seed_locally(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Draw random numbers from a separate seed on each rank."""
    seed = next((node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("seed")), None)
    readers = [] if seed is None else list(seed.users)
    if not readers:
        raise NothingError
    reader, axis = choose(random, readers), choose(random, mesh.axis_names)
    with graph.inserting_before(reader):
        index = graph.call_function(axis_index, (axis,))
        own = graph.call_function(aten.add.Tensor, (seed, index))
    own.meta = dict(seed.meta)
    reader.replace_input_with(seed, own)
    return f"{reader} is seeded along {axis}"


def gather_along_other_dim(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Exchange the first two dims of a gathered value, and reshape it to its former shape."""

    def is_gathered(node: fx.Node) -> bool:
        wait: Any = node.args[0] if node.target is aten.view.default else None
        gather = wait.args[0] if getattr(wait, "target", None) is c10d.wait_tensor.default else None
        gathers = getattr(gather, "target", None) is c10d.all_gather_into_tensor.default
        return gathers and local_value(node).dim() > 1

    node = pick(graph, random, is_gathered)
    shape = list(local_value(node).shape)
    order = [1, 0, *range(2, len(shape))]
    turned = insert(graph, node, aten.permute.default, order)
    insert(graph, turned, aten.reshape.default, shape)
    return f"{node} with its pieces along another dim"


def change_nested_literal(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Change a number in a list of arguments or a keyword argument, such as a size, a pad or a stride."""

    def places(node: fx.Node) -> list[tuple[int | str, int | None]]:
        found: list[tuple[int | str, int | None]] = [
            (position, index)
            for position, argument in enumerate(node.args) if isinstance(argument, (list, tuple))
            for index, item in enumerate(argument) if _is_number(item)
        ]  # fmt: skip
        return found + [(name, None) for name, item in node.kwargs.items() if _is_number(item)]

    node = pick(graph, random, lambda node: bool(places(node)))
    position, index = choose(random, places(node))
    if isinstance(position, str):
        node.kwargs = {**node.kwargs, position: _other(node.kwargs[position], random)}
    else:
        items = list(node.args[position])  # type: ignore[arg-type]
        items[index] = _other(items[index], random)  # type: ignore[index]
        node.args = (*node.args[:position], items, *node.args[position + 1 :])
    return f"{node}: another number at {position}, {index}"


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, float))


def _other(item: Any, random: Random) -> Any:
    return not item if isinstance(item, bool) else item + random.choice((1, -1))


def change_constant(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Change the value of a constant of the program."""
    module = graph.owning_module
    found = [node for node in graph.nodes if node.op == "get_attr"]
    if not found or module is None:
        raise NothingError
    node = choose(random, found)
    name, value = str(node.target), getattr(module, str(node.target))
    if not isinstance(value, torch.Tensor):
        raise NothingError
    setattr(module, name, ~value if value.dtype is torch.bool else value + 1)
    return f"constant {name} is another"


def round_value(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Round a value to bfloat16 and back."""
    node = pick(graph, random, lambda node: is_tensor(node) and local_value(node).is_floating_point())
    rounded = insert(graph, node, aten._to_copy.default)
    rounded.kwargs = {"dtype": torch.bfloat16}
    back = insert(graph, rounded, aten._to_copy.default)
    back.kwargs = {"dtype": local_value(node).dtype}
    return f"rounded {node}"


def exchange_equal_calls(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Give a call the operands of an earlier call of the same operator, as of another layer or head."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node) and node.all_input_nodes and _has_own_operands(node):
            groups.setdefault((node.target, tuple(local_value(node).shape), local_value(node).dtype), []).append(node)
    pairs = [group for group in groups.values() if len(group) > 1]
    if not pairs:
        raise NothingError
    first, second = random.sample(choose(random, pairs), 2)
    earlier, later = sorted((first, second), key=list(graph.nodes).index)
    if earlier.args == later.args:
        raise NothingError
    later.args = earlier.args
    return f"{later} computes what {earlier} does"


def _has_own_operands(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "autoshard")


TRAINING_MUTATIONS: tuple[Mutation, ...] = (
    drop_gradient_reduction, move_collective, drop_addend, return_stale_value, read_unreduced, seed_locally,
    gather_along_other_dim, change_nested_literal, change_constant, round_value, exchange_equal_calls,
)  # fmt: skip
