"""Mutations of phases that overlap communication with computation: wrong buckets, and reads or writes in flight.

Each mutation takes a graph of a phase, as the mutations of `tests.passes.mutations` do.
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
    """Return the wait whose result a call takes apart, through a view of gathered rows; None for any other call."""
    received: Any = split.args[0] if split.target in _SPLITS else None
    if isinstance(received, fx.Node) and received.target is _aten.view.default:
        received = received.args[0]
    return received if isinstance(received, fx.Node) and is_wait(received) else None


def is_packed(node: fx.Node) -> bool:
    """Whether a call packs a bucket."""
    return node.target is _aten.cat.default and any(is_collective(user) for user in node.users)


def _split(graph: fx.Graph, random: Random) -> Any:
    """Some call that takes a bucket apart."""
    return pick(graph, random, lambda node: waited_for(node) is not None)


def exchange_parts(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Two members of a bucket that take each other's part, in the shape of their own where sizes agree."""
    split = _split(graph, random)
    first, second = random.sample(list(split.users), 2)
    first.args, second.args = (split, second.args[1]), (split, first.args[1])
    return f"{first} and {second} take each other's part"


def shift_offsets(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Parts of a bucket that begin elsewhere."""
    split = _split(graph, random)
    sizes = list(split.args[1])
    longer, shorter = random.sample(range(len(sizes)), 2)
    sizes[longer], sizes[shorter] = sizes[longer] + 1, sizes[shorter] - 1
    split.args = (split.args[0], sizes, *split.args[2:])
    return f"{split} cuts elsewhere"


def cut_along_other_dim(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Pack, or cut, a bucket of rows along the wrong dim."""
    found = pick(graph, random, lambda node: is_packed(node) or waited_for(node) is not None)
    count = 1 if is_packed(found) else 2
    dims = () if found.args[count:] == (1,) else (1,)
    found.args = (*found.args[:count], *dims)
    return f"{found} along {dims or 0}"


def exchange_members(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Pack a bucket in another order than the readers expect, or pack a member twice."""
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
    """Leave a member out of a bucket, and put the next member in its place."""
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
    """Read the packed values in place of the received values, which processes overwrite."""
    split = _split(graph, random)
    waited = waited_for(split)
    (reader,) = waited.users
    reader.replace_input_with(waited, waited.args[0].args[0])
    return f"{reader} reads what is sent"


def read_in_flight(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Read a result before its wait: move the wait behind a reader, or delete the wait."""
    wait: Any = pick(graph, random, lambda node: is_wait(node) and any(user.op != "output" for user in node.users))
    reader = choose(random, [user for user in wait.users if user.op != "output"])
    if random.random() < 0.5:
        reader.append(wait)
        return f"{wait} stands behind {reader}"
    reader.replace_input_with(wait, wait.args[0])
    return f"{reader} reads {wait.args[0]} unwaited"


def wait_for_other(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Wait for another collective with a result of the same shape."""
    wait: Any = pick(graph, random, is_wait)
    before = list(graph.nodes)[: list(graph.nodes).index(wait)]
    others = [node for node in before if is_collective(node) and node is not wait.args[0] and alike(node, wait)]
    if not others:
        raise NothingError
    other = choose(random, others)
    wait.args = (other,)
    return f"{wait} waits for {other}"


def write_in_flight(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Write, before the wait, memory that a collective sends or receives into."""
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
    """Move a collective to a communicator of another purpose, which keeps the numbers if all ranks do the same."""
    started: Any = pick(graph, random, is_collective)
    group = str(started.args[-1])
    names = [without_purpose(group), *(for_purpose(group, item) for item in (Purpose.GRADIENTS, Purpose.PARAMETERS))]
    other = choose(random, [name for name in names if name != group])
    started.args = (*started.args[:-1], other)
    return f"{started} over {other}"


def move_call(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move a call between its operands and its readers, which keeps the numbers unless a call writes."""
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
    """All that a node is computed from."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def replace_sent(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Send another value of the same shape in a collective or in a member of a bucket."""
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
"""Mutations that may keep all results, or may find no place in a phase."""
