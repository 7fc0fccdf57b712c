"""Mutations of phases that communicate while they compute: wrong buckets, and reads of what is in flight.

Each takes a graph of a phase, as those of `tests.passes.mutations` do.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.mesh import Mesh
from tests.passes.mutations import Mutation, pick

_aten = torch.ops.aten


def _is_split(node: fx.Node) -> bool:
    """Whether a call takes a bucket apart."""
    waited: Any = node.args[0] if node.args else None
    return node.target is _aten.split_with_sizes.default and isinstance(waited, fx.Node) and is_wait(waited)


def _is_packed(node: fx.Node) -> bool:
    """Whether a call packs a bucket."""
    return node.target is _aten.cat.default and any(is_collective(user) for user in node.users)


def exchange_parts(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Two members of a bucket that take each other's part, in the shape of their own where sizes agree."""
    split: Any = pick(graph, random, _is_split)
    if split is None:
        return None
    first, second = random.sample(list(split.users), 2)
    first.args, second.args = (split, second.args[1]), (split, first.args[1])
    return f"{first} and {second} take each other's part"


def shift_offsets(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """Parts of a bucket that begin elsewhere."""
    split: Any = pick(graph, random, _is_split)
    if split is None:
        return None
    sizes = list(split.args[1])
    longer, shorter = random.sample(range(len(sizes)), 2)
    sizes[longer], sizes[shorter] = sizes[longer] + 1, sizes[shorter] - 1
    split.args = (split.args[0], sizes)
    return f"{split} cuts elsewhere"


def exchange_members(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """A bucket that is packed in another order than it is read, or holds a member twice."""
    packed: Any = pick(graph, random, _is_packed)
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


def read_the_buffer(graph: fx.Graph, random: Random, mesh: Mesh) -> str | None:
    """What was packed is read where what was received should be: processes write over it meanwhile."""
    split: Any = pick(graph, random, _is_split)
    if split is None:
        return None
    split.args = (split.args[0].args[0].args[0], *split.args[1:])
    return f"{split} reads what is sent"


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


BUCKET_MUTATIONS: tuple[Mutation, ...] = (
    exchange_parts, shift_offsets, exchange_members, read_the_buffer, read_in_flight,
)  # fmt: skip
