"""Wrong programs of the overlap passes: buckets, late waits, writes in place.

Mutants are drawn from programs with as few buckets as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.graphs.fill_buckets import fill_buckets
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.in_flight import WITH_OVERLAP, InFlight
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.order import Moment, Pass, passes_at
from passes.verification.verify_in_place import written_operands
from tests.passes import bucket_mutations, mutations, training_mutations
from tests.passes.bucket_mutations import BUCKET_MUTATIONS, FLIGHT_MUTATIONS, ancestors
from tests.passes.fill_mutations import FILL_MUTATIONS
from tests.passes.hoist_mutations import HOIST_MUTATIONS
from tests.passes.in_place import in_place
from tests.passes.mutants import (
    Found,
    Kinds,
    Mutant,
    Mutate,
    Place,
    exchange_kept,
    exchange_places,
    in_phase,
    mutate,
    of_steps,
)
from tests.passes.mutations import Mutation, NothingError, alike, choose, copy_of, is_tensor, pick

_aten = torch.ops.aten
LARGE = BucketCollectives(end_bytes=2**30, least_bytes=2**30, most_bytes=2**30)
"""Buckets of up to 1 GiB, more than any program of the tests sends."""

_TRIES = 5
_RARE, _RARELY = ("hoist_gather", "lower_wait", "gather_before_the_update", "hoist_what_differs"), 0.1
"""Kinds that few programs have, and the share of draws from these kinds; otherwise the kinds would hardly appear."""


def in_buckets(phased: PhasedProgram) -> PhasedProgram:
    """Apply every overlap pass to a program, without a memory limit."""
    return _after(_passes(InFlight(buckets=LARGE)), phased)


def _passes(in_flight: InFlight) -> tuple[Pass, ...]:
    return passes_at(Moment.IN_FLIGHT, LoweringOptions(in_flight=in_flight))


def _after(passes: Sequence[Pass], phased: PhasedProgram) -> PhasedProgram:
    for rewrite in passes:
        phased = rewrite(phased)
    return phased


def draw_overlap_mutant(plain: PhasedProgram, phased: PhasedProgram, random: Random) -> Mutant:
    """Draw a mutant of `phased`, which is `in_buckets(plain)`; a tenth of the draws are of rare kinds."""
    kinds = overlap_kinds(plain)
    rare = [kind for kind in kinds if kind[1] in _RARE]
    while True:
        place, kind = random.choice(rare if random.random() < _RARELY else list(kinds))
        for _ in range(_TRIES):
            found = mutate(phased, place, kind, random, kinds)
            if found is not None:
                return found


# The update, as it is written in place.


def _in_update(mutation: Mutation) -> Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> Found:
        if phased.update is None:
            raise NothingError
        wrong = in_place(phased)
        assert wrong.update is not None
        module = copy_of(wrong.update)
        what = mutation(module.graph, random, phased.lowered.mesh)
        return what, replace(wrong, update=module), phased.lowered.traced

    return mutate


def _is_writing(node: fx.Node) -> bool:
    return any(written_operands(node)) or _is_many(node)


def _is_many(node: fx.Node) -> bool:
    """Whether a call updates many parameters."""
    return "_updates_" in str(node.target)


def hoist_gather(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move a collective with its operands ahead of a call that writes."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    pairs = [
        (writer, node)
        for writer in graph.nodes
        for node in graph.nodes
        if _is_writing(writer) and is_collective(node) and places[writer] < places[node]
    ]
    if not pairs:
        raise NothingError
    writer, gather = choose(random, pairs)
    for node in sorted(ancestors(gather) | {gather}, key=places.__getitem__):
        if places[node] > places[writer]:
            writer.prepend(node)
    return f"{gather} ahead of {writer}"


def lower_wait(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move a wait with its readers behind a call that writes."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    pairs = [
        (wait, writer)
        for wait in graph.nodes
        for writer in graph.nodes
        if is_wait(wait) and _is_writing(writer) and places[wait] < places[writer]
    ]
    pairs = [(wait, writer) for wait, writer in pairs if wait not in ancestors(writer)]
    if not pairs:
        raise NothingError
    wait, writer = choose(random, pairs)
    behind = writer
    for node in list(graph.nodes)[places[wait] : places[writer]]:
        if node is wait or wait in ancestors(node):
            behind.append(node)
            behind = node
    return f"{wait} behind {writer}"


def _of_updates(change: Callable[[list[list[Any]], Random], bool]) -> Mutation:
    """Make a mutation that changes the lists of a call that updates many parameters, and raises if it cannot."""

    def mutation(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
        node = pick(graph, random, _is_many)
        lists = [list(item) for item in node.args if isinstance(item, (list, tuple))]
        if not change(lists, random):
            raise NothingError
        node.args = (*lists, *node.args[len(lists) :])
        return f"{node} updates otherwise"

    mutation.__name__ = getattr(change, "__name__", "")
    return mutation


def exchange_updated(lists: list[list[Any]], random: Random) -> bool:
    """Exchange two items of one list, such as two gradients; return False if there is one parameter only."""
    if len(lists[0]) < 2:
        return False
    items = random.choice(lists)
    first, second = random.sample(range(len(items)), 2)
    items[first], items[second] = items[second], items[first]
    return True


def leave_updated_out(lists: list[list[Any]], random: Random) -> bool:
    """Leave a parameter out of the update, and return True."""
    index = random.randrange(len(lists[0]))
    for items in lists:
        del items[index]
    return True


def update_twice(lists: list[list[Any]], random: Random) -> bool:
    """Update a parameter twice, and return True."""
    index = random.randrange(len(lists[0]))
    for items in lists:
        items.append(items[index])
    return True


def skip_copy(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove a copy of a value that is read later, or a copy into an overwritten input."""
    node: Any = pick(graph, random, lambda node: node.target in (_aten.clone.default, _aten.copy_.default))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return f"without {node}"


def copy_into_other(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Copy a result over another input of the same shape and type."""
    node: Any = pick(graph, random, lambda node: node.target is _aten.copy_.default)
    inputs = [item for item in graph.nodes if item.op == "placeholder" and is_tensor(item)]
    others = [item for item in inputs if item is not node.args[0] and alike(item, node.args[0])]
    if not others:
        raise NothingError
    node.args = (choose(random, others), node.args[1])
    return f"{node} over {node.args[0]}"


# The backward, as it fills its buckets.


def _in_backward(mutation: Mutation) -> Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> Found:
        module = copy_of(fill_buckets(phased.backward))
        if not module.graph.find_nodes(op="call_function", target=_aten.new_empty.default):
            raise NothingError
        what = mutation(module.graph, random, phased.lowered.mesh)
        return what, replace(phased, backward=module), phased.lowered.traced

    return mutate


# What one rank does otherwise.


def start_earlier(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Start a collective with its operands ahead of another collective."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    started = [node for node in graph.nodes if is_collective(node)]
    if len(started) < 2:
        raise NothingError
    first, second = sorted(random.sample(started, 2), key=places.__getitem__)
    if first in ancestors(second):
        raise NothingError
    for node in sorted(ancestors(second) | {second}, key=places.__getitem__):
        if places[node] > places[first]:
            first.prepend(node)
    return f"{second} ahead of {first}"


def _passes_otherwise(plain: PhasedProgram) -> Mutate:
    """Run the overlap passes of one rank with other limits on buckets or on messages in flight."""
    sizes = (64, 256, 1024, 4096)
    choices = (*WITH_OVERLAP, *(InFlight(buckets=_limited(size)) for size in sizes))

    def mutate(phased: PhasedProgram, random: Random) -> Found:
        index = random.randrange(len(choices))
        return f"passes of choice {index}", _after(_passes(choices[index]), plain), phased.lowered.traced

    return mutate


def _limited(size: int) -> BucketCollectives:
    return BucketCollectives(end_bytes=size, least_bytes=size, most_bytes=size)


# All of them.

_ANY = (
    mutations.drop_collective, mutations.double_collective, mutations.move_collective_to_other_axis,
    mutations.change_reduction, mutations.reverse_ranks, mutations.remove_wait,
    mutations.replace_operand, mutations.scale_value, mutations.change_literal, mutations.skip_node,
    training_mutations.change_nested_literal,
)  # fmt: skip
"""Mistakes of any pass that rewrites collectives."""

_IN_FLIGHT = (bucket_mutations.write_in_flight, bucket_mutations.wait_for_other, bucket_mutations.move_call)
"""Mistakes with messages in flight."""

_IN_UPDATE = (
    hoist_gather, lower_wait, *map(_of_updates, (exchange_updated, leave_updated_out, update_twice)), skip_copy,
    copy_into_other, mutations.replace_operand, mutations.swap_results, *BUCKET_MUTATIONS, *_IN_FLIGHT,
)  # fmt: skip

_OF_ONE_RANK = (
    start_earlier, bucket_mutations.move_call, bucket_mutations.change_communicator, bucket_mutations.exchange_members,
)  # fmt: skip


def overlap_kinds(plain: PhasedProgram) -> Kinds:
    """Return the kinds of mutants of the overlap passes; `plain` is the program without overlap."""
    return {
        **{(Place.PHASES, item.__name__): in_phase(item) for item in (*BUCKET_MUTATIONS, *FLIGHT_MUTATIONS, *_ANY)},
        **{(Place.PHASES, item.__name__): item for item in (exchange_kept, exchange_places)},
        **{(Place.PHASES, item.__name__): of_steps(item) for item in HOIST_MUTATIONS},
        **{(Place.IN_PLACE, item.__name__): _in_update(item) for item in _IN_UPDATE},
        **{(Place.FILLED, item.__name__): _in_backward(item) for item in (*FILL_MUTATIONS, *_ANY, *_IN_FLIGHT)},
        **{(Place.ONE_RANK, item.__name__): in_phase(item) for item in _OF_ONE_RANK},
        (Place.ONE_RANK, "pass_otherwise"): _passes_otherwise(plain),
    }
