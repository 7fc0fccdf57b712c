"""Gathers of parameters start ahead of their layer, in buckets, within the plan's memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.collectives import ALL_GATHER
from autoshard.ir.communicators import Purpose, is_for
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.overlap import overlapped
from passes.lowering.start_ahead import StartAhead
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes
from passes.verification.verify_phases import verify_phases
from tests.passes.lowering.overlapped import differ, gathered_blocks, of_one_batch, plain
from tests.passes.mutations import copy_of

SMALL = BucketCollectives(end_bytes=64, least_bytes=128, most_bytes=128)


@cache
def ahead(family: str, layout: str, by: int = 1, bucket: BucketCollectives | None = None) -> PhasedProgram:
    """Return the program with gathers started early, at most `by` ahead, each alone or in buckets of `bucket`."""
    apart = StartAhead(by=None)(WaitLate()(of_one_batch(family, layout)))
    return StartAhead(by=by)(apart if bucket is None else bucket(apart))


def gathers(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Gathers of parameters, in the order of their starts."""
    nodes = graph_module.graph.find_nodes(op="call_function", target=ALL_GATHER)
    return [node for node in nodes if is_for(str(node.args[-1]), Purpose.PARAMETERS)]


def places_of(starts: list[fx.Node]) -> list[tuple[int, int]]:
    """Return the positions of the start and the wait of each gather in its graph."""
    places = {node: place for place, node in enumerate(starts[0].graph.nodes)}
    return [(places[start], places[next(iter(start.users))]) for start in starts]


@pytest.mark.parametrize("by", [0, 1, 2])
def test_a_gather_starts_just_before_one_before_it_is_waited_for(by: int) -> None:
    """At the wait for each gather, the next `by` gathers are in flight, or all remaining gathers if fewer are left."""
    made = StartAhead(by=by)(StartAhead(by=None)(WaitLate()(gathered_blocks())))
    for phase in [item for item in (made.forward, made.backward) if gathers(item)]:
        places = places_of(gathers(phase))
        for place, (_, waited) in enumerate(places):
            assert sum(started < waited < other for started, other in places) == min(by, len(places) - place - 1)


def test_the_first_starts_at_the_head() -> None:
    """The first gather of the backward has at most three calls in front of it."""
    nodes = [node for node in ahead("llama", "ZeRO-3").backward.graph.nodes if node.op != "placeholder"]
    assert nodes.index(gathers(ahead("llama", "ZeRO-3").backward)[0]) <= 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "layout"), [("llama", "ZeRO-3"), ("gpt", "two axes"), ("lstm", "ZeRO-1")])
@pytest.mark.parametrize("bucket", [None, SMALL, BucketCollectives()])
def test_bits_stay(family: str, layout: str, bucket: BucketCollectives | None) -> None:
    """Early gathers, alone or in buckets, keep all bits of a step of two micro-batches."""
    made = ahead(family, layout, 1, bucket)
    verify_phases(made)
    assert differ(family, layout, made) == []


def test_gathers_come_into_buckets() -> None:
    """Each phase has one bucket of gathers per communicator, which are fewer than half of its gathers before."""
    plainly, made = of_one_batch("llama", "ZeRO-3"), ahead("llama", "ZeRO-3", 1, BucketCollectives())
    for before, after in ((plainly.forward, made.forward), (plainly.backward, made.backward)):
        groups = {str(node.args[-1]) for node in gathers(before)}
        assert len(gathers(after)) == len(groups) < len(gathers(before)) / 2


def test_layers_are_gathered_a_few_at_a_time_within_the_memory() -> None:
    """Gathers of weights become at least three buckets without more peak memory.

    Products run beside each bucket but the first two.
    """
    phased = gathered_blocks()
    made = overlapped(phased)
    verify_phases(made)
    assert peak_bytes(made) <= peak_bytes(phased)
    before, after = gathers(phased.forward), gathers(made.forward)
    assert 3 <= len(after) < len(before)
    places = places_of(after)
    products = [place for place, node in enumerate(made.forward.graph.nodes) if "mm" in str(node.target)]
    hidden = [sum(started < product < waited for product in products) for started, waited in places]
    assert all(hidden[2:]), hidden


def test_where_memory_is_short_gathers_stay() -> None:
    """The peak memory does not fall if more gathers may be in flight."""
    phased = gathered_blocks()
    everything = replace(phased, forward=StartAhead(by=None)(WaitLate()(phased)).forward)
    far = StartAhead(by=9)(everything)
    assert peak_bytes(far) >= peak_bytes(StartAhead(by=1)(everything)) >= peak_bytes(StartAhead(by=0)(everything))


@pytest.mark.parametrize("layout", ["ZeRO-1", "ZeRO-3"])
def test_a_gather_above_the_update_is_refused(layout: str) -> None:
    """A gather of the value that a parameter had before its update is refused."""
    made = WaitLate()(plain("llama", layout))
    assert made.update is not None
    wrong = copy_of(made.update)
    gather = gathers(wrong)[0]
    updated, held = gather.all_input_nodes[0], list(wrong.graph.find_nodes(op="placeholder"))
    like = next(node for node in held if node.meta["val"].shape == updated.meta["val"].shape)
    gather.replace_input_with(updated, like)
    with pytest.raises(VerificationError):
        verify_phases(replace(made, update=wrong))
