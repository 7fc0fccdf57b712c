"""Mutations of phases with overlapped communication: wrong buckets, and reads or writes of memory in flight.

Each mutation changes the graph of a phase in place and returns a description, as in `tests.passes.mutations`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import Purpose, for_purpose, without_purpose
from autoshard.ir.mesh import Mesh
from tests.passes.mutations import Mutation, NothingError, alike, choose, is_tensor, local_value, pick

_aten = torch.ops.aten
_SPLITS = (_aten.split_with_sizes.default, _aten.split_with_sizes_copy.default)


def waited_for(split: fx.Node) -> Any:
    """Return the wait whose result `split` cuts into parts, directly or through a view; None for any other call."""
    received: Any = split.args[0] if split.target in _SPLITS else None
    if isinstance(received, fx.Node) and received.target is _aten.view.default:
        received = received.args[0]
    return received if isinstance(received, fx.Node) and is_wait(received) else None


def is_packed(node: fx.Node) -> bool:
    """Whether a call concatenates values into a bucket that a collective sends."""
    return node.target is _aten.cat.default and any(is_collective(user) for user in node.users)


def _split(graph: fx.Graph, random: Random) -> Any:
    """A random call that cuts a received bucket into parts."""
    return pick(graph, random, lambda node: waited_for(node) is not None)


def exchange_parts(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Exchange the parts that two members of a bucket read from the received bucket."""
    split = _split(graph, random)
    first, second = random.sample(list(split.users), 2)
    first.args, second.args = (split, second.args[1]), (split, first.args[1])
    return f"{first} and {second} take each other's part"


def shift_offsets(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Make one part of a received bucket an element longer, and another part an element shorter."""
    split = _split(graph, random)
    sizes = list(split.args[1])
    longer, shorter = random.sample(range(len(sizes)), 2)
    sizes[longer], sizes[shorter] = sizes[longer] + 1, sizes[shorter] - 1
    split.args = (split.args[0], sizes, *split.args[2:])
    return f"{split} cuts elsewhere"


def cut_along_other_dim(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Pack or cut a bucket along dim 1 in place of dim 0, or along dim 0 in place of dim 1."""
    found = pick(graph, random, lambda node: is_packed(node) or waited_for(node) is not None)
    count = 1 if is_packed(found) else 2
    dims = () if found.args[count:] == (1,) else (1,)
    found.args = (*found.args[:count], *dims)
    return f"{found} along {dims or 0}"


def exchange_members(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Exchange two members of a packed bucket, or pack one member twice in place of another member."""
    packed: Any = pick(graph, random, is_packed)
    members = list(packed.args[0])
    first, second = random.sample(range(len(members)), 2)
    if random.random() < 0.5:
        members[first], members[second] = members[second], members[first]
    else:
        members[first] = members[second]
    packed.args = (members, *packed.args[1:])
    return f"{packed} has members {first} and {second} otherwise"


def leave_member_out(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Leave a member out of a bucket, so that the readers of its part read the next member's part."""
    split = _split(graph, random)
    if len(split.args[1]) < 2:
        raise NothingError
    packed = waited_for(split).args[0].args[0]
    if packed.target is not _aten.cat.default:
        raise NothingError
    index = random.randrange(len(split.args[1]))
    sizes, members = list(split.args[1]), list(packed.args[0])
    del sizes[index], members[index]
    split.args, packed.args = (split.args[0], sizes, *split.args[2:]), (members, *packed.args[1:])
    return f"{packed} lacks member {index}"


def read_the_buffer(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Read the packed values that a collective sends, in place of the received values."""
    split = _split(graph, random)
    waited = waited_for(split)
    (reader,) = waited.users
    reader.replace_input_with(waited, waited.args[0].args[0])
    return f"{reader} reads what is sent"


def read_in_flight(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Read a collective's result before its wait: move the wait behind a reader, or read the unwaited result."""
    wait: Any = pick(graph, random, lambda node: is_wait(node) and any(user.op != "output" for user in node.users))
    reader = choose(random, [user for user in wait.users if user.op != "output"])
    if random.random() < 0.5:
        reader.append(wait)
        return f"{wait} stands behind {reader}"
    reader.replace_input_with(wait, wait.args[0])
    return f"{reader} reads {wait.args[0]} unwaited"


def wait_for_other(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Let a wait wait for another earlier collective, whose result has the same shape and type."""
    wait: Any = pick(graph, random, is_wait)
    before = list(graph.nodes)[: list(graph.nodes).index(wait)]
    others = [node for node in before if is_collective(node) and node is not wait.args[0] and alike(node, wait)]
    if not others:
        raise NothingError
    other = choose(random, others)
    wait.args = (other,)
    return f"{wait} waits for {other}"


def write_in_flight(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Multiply a collective's operand by two in place, between the collective's start and its wait."""
    started: Any = pick(graph, random, is_collective)
    (operand,) = started.all_input_nodes
    (wait,) = [user for user in started.users if is_wait(user)][:1] or [None]
    if not local_value(operand).is_floating_point():
        raise NothingError
    between = list(graph.nodes)
    place = choose(random, between[between.index(started) : between.index(wait)])
    with graph.inserting_after(place):
        graph.call_function(_aten.mul_.Scalar, (operand, 2)).meta = dict(operand.meta)
    return f"{operand} is written behind {place}, before {wait}"


def change_communicator(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move a collective to the communicator of another purpose. The numbers stay the same if all ranks do so."""
    started: Any = pick(graph, random, is_collective)
    group = str(started.args[-1])
    names = [without_purpose(group), *(for_purpose(group, item) for item in (Purpose.GRADIENTS, Purpose.PARAMETERS))]
    other = choose(random, [name for name in names if name != group])
    started.args = (*started.args[:-1], other)
    return f"{started} over {other}"


def move_call(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move a call to another place between its operands and its readers. Numbers change only if some call writes."""
    node = pick(graph, random, lambda node: True)
    nodes = list(graph.nodes)
    places = {other: place for place, other in enumerate(nodes)}
    first = max((places[item] for item in node.all_input_nodes), default=0)
    last = min((places[item] for item in node.users), default=len(nodes) - 1)
    others = [other for other in nodes[first:last] if other not in (node, node.prev) and other.op == "call_function"]
    if not others:
        raise NothingError
    behind = choose(random, others)
    behind.append(node)
    return f"{node} stands behind {behind}"


def ancestors(node: fx.Node) -> set[fx.Node]:
    """All nodes that a node is computed from, directly or through other nodes."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def replace_sent(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Replace an operand of a collective or of a packed bucket by another value of the same shape and type."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    sent = [
        (reader, operand)
        for reader in graph.nodes
        if is_collective(reader) or is_packed(reader)
        for operand in reader.all_input_nodes
    ]
    if not sent:
        raise NothingError
    reader, operand = choose(random, sent)
    earlier = [node for node in graph.nodes if places[node] < places[reader] and is_tensor(node)]
    others = [node for node in earlier if node is not operand and alike(node, operand)]
    if not others:
        raise NothingError
    other = choose(random, others)
    reader.replace_input_with(operand, other)
    return f"{reader} sends {other}, not {operand}"


BUCKET_MUTATIONS: tuple[Mutation, ...] = (
    exchange_parts, shift_offsets, cut_along_other_dim, exchange_members, leave_member_out, read_the_buffer,
    read_in_flight,
)  # fmt: skip
"""Mutations that change the result of any phase with buckets."""

FLIGHT_MUTATIONS: tuple[Mutation, ...] = (
    wait_for_other, write_in_flight, replace_sent, change_communicator, move_call,
)  # fmt: skip
"""Mutations that keep all results of some phases, or find no place in some phases."""
