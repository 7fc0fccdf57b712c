"""Mutations of a backward that writes each member of a bucket into the bucket when the member is computed.

Each mutation takes a graph in the form that processes run, as the mutations of `tests.passes.mutations` do.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.graphs.fill_buckets import INTO
from autoshard.ir.collectives import is_collective
from autoshard.ir.mesh import Mesh
from tests.passes.mutations import Mutation, NothingError, alike, choose, is_tensor, pick

_aten = torch.ops.aten


def _is_writer(node: fx.Node) -> bool:
    return node.target is _aten.copy_.default or node.target in INTO.values()


def _is_buffer(node: fx.Node) -> bool:
    return node.target is _aten.new_empty.default


def _written(writer: fx.Node) -> Any:
    """Return the tensor that a call writes."""
    return writer.kwargs.get("out", writer.args[0])


def _splits(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls that split a bucket of several parts."""
    found = [user for node in graph.nodes if _is_buffer(node) for user in node.users]
    return [node for node in found if node.target is _aten.split_with_sizes.default and len(node.users) > 1]


def exchange_written(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Exchange the parts of a bucket that two members are written to."""
    splits = _splits(graph)
    if not splits:
        raise NothingError
    first, second = random.sample(list(choose(random, splits).users), 2)
    first.args, second.args = second.args, first.args
    return f"{first} and {second} take each other's place"


def leave_unwritten(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove the write of a member of a bucket."""
    writer: Any = pick(graph, random, _is_writer)
    graph.erase_node(writer)
    return f"without {writer}"


def write_too_late(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move the write of a member behind the start of a collective that sends a bucket."""
    started = [node for node in graph.nodes if is_collective(node) and any(map(_is_buffer, node.all_input_nodes))]
    writers = [node for node in graph.nodes if _is_writer(node)]
    if not started or not writers:
        raise NothingError
    writer, behind = choose(random, writers), choose(random, started)
    behind.append(writer)
    return f"{writer} behind {behind}"


def write_again(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Write another value over a member of a bucket, after the member is written."""
    writer: Any = pick(graph, random, _is_writer)
    place = _written(writer)
    before = list(graph.nodes)[: list(graph.nodes).index(writer)]
    values = [node for node in before if node is not place and is_tensor(node) and alike(node, place)]
    if not values:
        raise NothingError
    value = choose(random, values)
    with graph.inserting_after(writer):
        graph.call_function(_aten.copy_.default, (place, value)).meta = dict(writer.meta)
    return f"{value} over {place}"


def shift_parts(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Cut a bucket into the same number of parts at wrong places."""
    splits = _splits(graph)
    if not splits:
        raise NothingError
    split: Any = choose(random, splits)
    sizes = list(split.args[1])
    random.shuffle(sizes)
    if sizes == list(split.args[1]):
        sizes[0], sizes[1] = sizes[0] + 1, sizes[1] - 1
    split.args = (split.args[0], sizes, *split.args[2:])
    return f"{split} into {sizes}"


def turn_place(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Write a product into a view of the reversed shape."""
    writer: Any = pick(graph, random, lambda node: node.target in INTO.values())
    place = _written(writer)
    shape = list(place.args[1])
    if shape == shape[::-1]:
        raise NothingError
    place.args = (place.args[0], shape[::-1])
    return f"{place} as {shape[::-1]}"


def send_a_part(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Let a later call read a part of a bucket in place of an operand of the same shape and type."""
    writer: Any = pick(graph, random, _is_writer)
    place = _written(writer)
    behind = list(graph.nodes)[list(graph.nodes).index(writer) + 1 :]
    readers = [(node, item) for node in behind for item in node.all_input_nodes]
    readers = [
        (node, item)
        for node, item in readers
        if item is not place and node.op == "call_function" and is_tensor(item) and alike(item, place)
    ]
    if not readers:
        raise NothingError
    reader, operand = choose(random, readers)
    reader.replace_input_with(operand, place)
    return f"{reader} reads {place}, not {operand}"


FILL_MUTATIONS: tuple[Mutation, ...] = (
    exchange_written, leave_unwritten, write_too_late, write_again, shift_parts, turn_place, send_a_part,
)  # fmt: skip
