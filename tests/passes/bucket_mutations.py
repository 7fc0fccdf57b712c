"""Mutations of phases that communicate while they compute: wrong buckets, and what touches what is in flight.

Each takes a graph of a phase, as those of `tests.passes.mutations` do.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import Purpose, for_purpose, without_purpose
from autoshard.ir.mesh import Mesh
from tests.passes.mutations import Mutation, alike, is_tensor, local_value, pick

_aten = torch.ops.aten
_SPLITS = (_aten.split_with_sizes.default, _aten.split_with_sizes_copy.default)


def waited_for(split: fx.Node) -> Any:
    """The wait for what a call takes apart, by a view of its rows if it was gathered; None for other calls."""
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


def exchange_parts(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Two members of a bucket that take each other's part, in the shape of their own where sizes agree."""
    split = _split(graph, random)
    if split is None:
        return None
    first, second = random.sample(list(split.users), 2)
    first.args, second.args = (split, second.args[1]), (split, first.args[1])
    return f"{first} and {second} take each other's part"


def take_part_of_other_bucket(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A member that takes a part of another bucket."""
    split = _split(graph, random)
    others = [node for node in graph.nodes if waited_for(node) is not None and node is not split]
    if not others:
        return None
    other = random.choice(others)
    part = random.choice(list(split.users))
    if list(graph.nodes).index(other) > list(graph.nodes).index(part):
        part.prev.append(other)  # as late as it may: what it reads may be later still
    part.args = (other, random.randrange(len(other.args[1])))
    return f"{part} is a part of {other}"


def shift_offsets(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Parts of a bucket that begin elsewhere."""
    split = _split(graph, random)
    if split is None:
        return None
    sizes = list(split.args[1])
    longer, shorter = random.sample(range(len(sizes)), 2)
    sizes[longer], sizes[shorter] = sizes[longer] + 1, sizes[shorter] - 1
    split.args = (split.args[0], sizes, *split.args[2:])
    return f"{split} cuts elsewhere"


def exchange_sizes(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A bucket cut into the sizes of its members in another order."""
    split = _split(graph, random)
    if split is None or len(set(split.args[1])) < 2:
        return None
    sizes = random.sample(split.args[1], len(split.args[1]))
    if sizes == list(split.args[1]):
        return None
    split.args = (split.args[0], sizes, *split.args[2:])
    return f"{split} cuts into {sizes}"


def cut_along_other_dim(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A bucket of rows that is packed, or cut, along the other dim."""
    found = pick(graph, random, lambda node: is_packed(node) or waited_for(node) is not None)
    if found is None:
        return None
    count = 1 if is_packed(found) else 2
    dims = () if found.args[count:] == (1,) else (1,)
    found.args = (*found.args[:count], *dims)
    return f"{found} along {dims or 0}"


def exchange_members(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A bucket that is packed in another order than it is read, or holds a member twice."""
    packed: Any = pick(graph, random, is_packed)
    if packed is None:
        return None
    members = list(packed.args[0])
    first, second = random.sample(range(len(members)), 2)
    if random.random() < 0.5:
        members[first], members[second] = members[second], members[first]
    else:
        members[first] = members[second]
    packed.args = (members, *packed.args[1:])
    return f"{packed} has members {first} and {second} otherwise"


def leave_member_out(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A bucket that lacks one of its members, whose place the next one takes."""
    split = _split(graph, random)
    if split is None or len(split.args[1]) < 2:
        return None
    packed = waited_for(split).args[0].args[0]
    if packed.target is not _aten.cat.default:
        return None
    index = random.randrange(len(split.args[1]))
    sizes, members = list(split.args[1]), list(packed.args[0])
    del sizes[index], members[index]
    split.args, packed.args = (split.args[0], sizes, *split.args[2:]), (members, *packed.args[1:])
    return f"{packed} lacks member {index}"


def read_the_buffer(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Read the packed values in place of the received ones: processes write over them meanwhile."""
    split = _split(graph, random)
    if split is None:
        return None
    waited = waited_for(split)
    (reader,) = waited.users
    reader.replace_input_with(waited, waited.args[0].args[0])
    return f"{reader} reads what is sent"


def read_in_flight(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A result that is read before it is waited for: the wait comes behind a reader, or not at all."""
    wait: Any = pick(graph, random, lambda node: is_wait(node) and any(user.op != "output" for user in node.users))
    if wait is None:
        return None
    reader = random.choice([user for user in wait.users if user.op != "output"])
    if random.random() < 0.5:
        reader.append(wait)
        return f"{wait} stands behind {reader}"
    reader.replace_input_with(wait, wait.args[0])
    return f"{reader} reads {wait.args[0]} unwaited"


def wait_for_other(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A wait for another collective, which gives the same shape."""
    wait: Any = pick(graph, random, is_wait)
    if wait is None:
        return None
    before = list(graph.nodes)[: list(graph.nodes).index(wait)]
    others = [node for node in before if is_collective(node) and node is not wait.args[0] and alike(node, wait)]
    if not others:
        return None
    other = random.choice(others)
    wait.args = (other,)
    return f"{wait} waits for {other}"


def write_in_flight(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Memory that is sent, or is received into, is written before it is waited for."""
    started: Any = pick(graph, random, is_collective)
    if started is None:
        return None
    (operand,) = started.all_input_nodes
    (wait,) = [user for user in started.users if is_wait(user)][:1] or [None]
    if wait is None or not local_value(operand).is_floating_point():
        return None
    between = list(graph.nodes)
    place = random.choice(between[between.index(started) : between.index(wait)])
    with graph.inserting_after(place):
        graph.call_function(_aten.mul_.Scalar, (operand, 2)).meta = dict(operand.meta)
    return f"{operand} is written behind {place}, before {wait}"


def change_communicator(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A collective on a communicator of another purpose: on all ranks the same numbers."""
    started: Any = pick(graph, random, is_collective)
    if started is None:
        return None
    group = str(started.args[-1])
    names = [without_purpose(group), *(for_purpose(group, item) for item in (Purpose.GRADIENTS, Purpose.PARAMETERS))]
    other = random.choice([name for name in names if name != group])
    started.args = (*started.args[:-1], other)
    return f"{started} over {other}"


def move_call(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A call at another place between its operands and its readers: where nothing is written, the same numbers."""
    node = pick(graph, random, lambda node: True)
    if node is None:
        return None
    nodes = list(graph.nodes)
    places = {other: place for place, other in enumerate(nodes)}
    first = max((places[item] for item in node.all_input_nodes), default=0)
    last = min((places[item] for item in node.users), default=len(nodes) - 1)
    others = [other for other in nodes[first:last] if other not in (node, node.prev) and other.op == "call_function"]
    if not others:
        return None
    behind = random.choice(others)
    behind.append(node)
    return f"{node} stands behind {behind}"


def gather_before_update(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A parameter that is gathered as it was before the update."""
    gathers = [node for node in graph.nodes if is_collective(node) and _updates_of(node)]
    if not gathers:
        return None
    gather = random.choice(gathers)
    update, updated = random.choice(_updates_of(gather))
    reaching = ancestors(gather) | {gather}
    for user in [user for user in updated.users if user in reaching]:
        user.replace_input_with(updated, update.args[0])
    return f"{gather} gathers {update.args[0]}, not {updated}"


def _updates_of(gather: fx.Node) -> list[tuple[Any, fx.Node]]:
    """Updates of one parameter and their first results, of which a collective sends something."""
    pairs = [(node.args[0], node) for node in ancestors(gather) if len(node.args) == 2 and node.args[1] == 0]
    return [(item, node) for item, node in pairs if isinstance(item, fx.Node) and "_update" in str(item.target)]


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


def replace_sent(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A collective, or a member of a bucket, of another value of the same shape."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    sent = [
        (reader, operand)
        for reader in graph.nodes
        if is_collective(reader) or is_packed(reader)
        for operand in reader.all_input_nodes
    ]
    if not sent:
        return None
    reader, operand = random.choice(sent)
    earlier = [node for node in graph.nodes if places[node] < places[reader] and is_tensor(node)]
    others = [node for node in earlier if node is not operand and alike(node, operand)]
    if not others:
        return None
    other = random.choice(others)
    reader.replace_input_with(operand, other)
    return f"{reader} sends {other}, not {operand}"


BUCKET_MUTATIONS: tuple[Mutation, ...] = (
    exchange_parts, shift_offsets, cut_along_other_dim, exchange_members, leave_member_out, read_the_buffer,
    read_in_flight,
)  # fmt: skip
"""Each changes what is computed of any phase that has buckets."""

FLIGHT_MUTATIONS: tuple[Mutation, ...] = (
    exchange_sizes, take_part_of_other_bucket, wait_for_other, write_in_flight, replace_sent, gather_before_update,
    change_communicator, move_call,
)  # fmt: skip
"""Some of them change nothing, some where there is nothing of their kind."""
