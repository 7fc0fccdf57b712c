"""Gradients that are reduced in buckets keep all bits without more peak memory, and wrong buckets are refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.collectives import ALL_REDUCE, is_wait
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.overlap import overlapped
from passes.lowering.wait_in_turn import WaitInTurn
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes
from passes.verification.verify_phases import verify_phases
from tests.passes.lowering.overlapped import calls, differ, fully_sharded, plain
from tests.passes.mutations import copy_of

aten = torch.ops.aten
FAMILY, LAYOUT = "gpt", "tensor"
SMALL = BucketCollectives(end_bytes=64, least_bytes=256, most_bytes=1024)
LARGE = BucketCollectives(end_bytes=2**30, least_bytes=2**30, most_bytes=2**30)


@cache
def bucketed(family: str = FAMILY, layout: str = LAYOUT, passed: BucketCollectives = SMALL) -> PhasedProgram:
    return passed(WaitLate()(plain(family, layout)))


def reductions(phased: PhasedProgram) -> list[fx.Node]:
    """Return the all-reduces of the backward."""
    return [node for node in phased.backward.graph.nodes if node.target is ALL_REDUCE]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "layout"), [("gpt", "tensor"), ("llama", "ZeRO-1"), ("mixture", "two axes")])
@pytest.mark.parametrize("passed", [SMALL, BucketCollectives()])
def test_buckets_of_any_size_give_the_same_bits(family: str, layout: str, passed: BucketCollectives) -> None:
    """With buckets of small or default size, a step of two micro-batches keeps all bits."""
    made = bucketed(family, layout, passed)
    verify_phases(made)
    assert differ(family, layout, made) == []


def test_gradients_are_scattered_in_buckets_too() -> None:
    """Buckets more than halve the number of reduce-scatters of gradients.

    The peak memory of the overlapped program is at most that of the plain program.
    """
    phased = fully_sharded()
    late = WaitLate()(phased)
    made = LARGE(late)
    verify_phases(made)
    name = "_c10d_functional.reduce_scatter_tensor.default"
    before, after = (calls(item.backward).count(name) for item in (phased, made))
    assert 0 < after < before / 2
    assert peak_bytes(WaitInTurn(most_held=1)(made)) <= peak_bytes(made)
    assert peak_bytes(overlapped(phased)) <= peak_bytes(phased)


@pytest.mark.parametrize("family", ["llama", "lstm"])
def test_updated_parameters_are_gathered_in_buckets(family: str) -> None:
    """Under ZeRO-1, updated parameters are gathered in buckets with equal bits. Wrong reads of a bucket are refused."""
    phased = plain(family, "ZeRO-1")
    made = LARGE(WaitLate()(phased))
    assert phased.update is not None
    assert made.update is not None
    name = "_c10d_functional.all_gather_into_tensor.default"
    before, after = (calls(item).count(name) for item in (phased.update, made.update))
    assert 0 < after <= before // 2 + 1  # over one axis; what is gathered over two is gathered over the first at once
    verify_phases(made)
    assert differ(family, "ZeRO-1", made) == []
    for change in (exchange_rows, shift_rows, leave_rows_out, exchange_sent):
        wrong = copy_of(made.update)
        change(next(node for node in wrong.graph.nodes if node.target is aten.split_with_sizes_copy.default))
        with pytest.raises(VerificationError):
            verify_phases(replace(made, update=wrong))


def exchange_rows(split: fx.Node) -> None:
    """Exchange the parts of two members of equal size."""
    sizes = split.args[1]
    first, second = next((i, j) for i, a in enumerate(sizes) for j, b in enumerate(sizes) if i < j and a == b)
    parts = {part.args[1]: part for part in split.users}
    parts[first].args, parts[second].args = (split, second), (split, first)


def shift_rows(split: fx.Node) -> None:
    """Shift all parts of a bucket by one element."""
    first, *others, last = split.args[1]
    split.args = (split.args[0], [first + 1, *others, last - 1], 1)


def leave_rows_out(split: fx.Node) -> None:
    """Read the gathered bucket as a single row in place of one row per rank."""
    rows = split.args[0]
    rows.args = (rows.args[0], [1, -1])


def exchange_sent(split: fx.Node) -> None:
    """Pack a bucket in another order than the readers expect."""
    packed = split.args[0].args[0].args[0].args[0]
    first, *others, last = packed.args[0]
    packed.args = ([last, *others, first],)


def test_buckets_keep_to_their_sizes() -> None:
    """A bucket of several gradients has at most `most_bytes`, and all sent bytes together stay the same."""
    before, after = reductions(plain(FAMILY, LAYOUT)), reductions(bucketed())
    assert len(after) < len(before)
    sizes = [node.meta["val"].numel() * node.meta["val"].element_size() for node in after]
    buckets = [size for node, size in zip(after, sizes, strict=True) if node.args[0].target is aten.cat.default]
    assert buckets
    assert max(buckets) <= SMALL.most_bytes
    assert sum(sizes) == sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in before)


def test_a_bucket_is_packed_by_one_copy_and_read_by_views() -> None:
    """One `cat` packs a bucket, and views of the received buffer are its parts."""
    names = calls(bucketed().backward)
    before = calls(plain(FAMILY, LAYOUT).backward)
    assert names.count("aten.cat.default") - before.count("aten.cat.default") == names.count(
        "aten.split_with_sizes.default"
    ) - before.count("aten.split_with_sizes.default")
    assert names.count("aten.clone.default") == before.count("aten.clone.default")


def exchange_parts(graph: fx.Graph) -> None:
    """Exchange the parts of two members of equal size."""
    split = splits(graph)[0]
    sizes = list(split.args[1])
    first, second = next((i, j) for i, a in enumerate(sizes) for j, b in enumerate(sizes) if i < j and a == b)
    parts = {part.args[1]: part for part in split.users}
    parts[first].args, parts[second].args = (split, second), (split, first)


def shift_offsets(graph: fx.Graph) -> None:
    """Shift all parts of a bucket by one element."""
    split = splits(graph)[0]
    first, *others, last = split.args[1]
    split.args = (split.args[0], [first + 1, *others, last - 1])


def exchange_members(graph: fx.Graph) -> None:
    """Pack a bucket in another order than the readers expect."""
    packed = bucket(graph)
    first, *others, last = packed.args[0]
    packed.args = ([last, *others, first],)


def repeat_a_member(graph: fx.Graph) -> None:
    """Send one gradient twice, in the place of another gradient."""
    packed = bucket(graph)
    first, _, *others = packed.args[0]
    packed.args = ([first, first, *others],)


def read_in_flight(graph: fx.Graph) -> None:
    """Read a part of a buffer before the wait."""
    split = splits(graph)[0]
    split.args = (split.args[0].args[0], *split.args[1:])


def read_what_is_sent(graph: fx.Graph) -> None:
    """Read a part of the sent buffer, which a process overwrites."""
    split = splits(graph)[0]
    split.args = (bucket(graph), *split.args[1:])


def wait_behind_a_reader(graph: fx.Graph) -> None:
    """Move the wait for a bucket behind a read of one of its parts."""
    split = splits(graph)[0]
    next(iter(split.users)).append(split.args[0])


def reduce_otherwise(graph: fx.Graph) -> None:
    """Reduce a bucket by the maximum in place of the sum."""
    reduced = next(node for node in graph.nodes if node.target is ALL_REDUCE and node.args[0] is bucket(graph))
    reduced.args = (reduced.args[0], "max", *reduced.args[2:])


def leave_a_part_flat(graph: fx.Graph) -> None:
    """Leave the part of a matrix in the shape of a vector."""
    shaped = next(node for part in splits(graph)[0].users for node in part.users if len(node.args[1]) > 1)
    shaped.replace_all_uses_with(shaped.args[0])
    graph.erase_node(shaped)


def pack_in_another_order(graph: fx.Graph) -> None:
    """Pack the transpose of a member."""
    flat = next(item for item in bucket(graph).args[0] if len(item.args[0].meta["val"].shape) == 2)
    with graph.inserting_before(flat):
        turned = graph.call_function(aten.t.default, (flat.args[0],))
    turned.meta["val"] = flat.args[0].meta["val"].t()
    flat.target, flat.args = aten.reshape.default, (turned, [-1])


def splits(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls that take buckets apart, the bucket with most members first."""
    found = [node for node in graph.nodes if node.target is aten.split_with_sizes.default and is_wait(node.args[0])]
    return sorted(found, key=lambda node: -len(node.args[1]))


def bucket(graph: fx.Graph) -> fx.Node:
    """The buffer of the bucket with most members."""
    return splits(graph)[0].args[0].args[0].args[0]


WRONG = [
    exchange_parts, shift_offsets, exchange_members, repeat_a_member, read_in_flight, read_what_is_sent,
    wait_behind_a_reader, reduce_otherwise, leave_a_part_flat, pack_in_another_order,
]  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake.__name__)
def test_wrong_buckets_are_refused(mistake: Callable[[fx.Graph], None]) -> None:
    """Buckets with wrong offsets, members or reductions, or with reads before the wait, are refused."""
    made = bucketed(passed=BucketCollectives())
    graph_module = copy_of(made.backward)
    mistake(graph_module.graph)
    with pytest.raises(VerificationError):
        verify_phases(replace(made, backward=graph_module))


def test_a_part_that_no_bucket_has_is_refused() -> None:
    """A part beyond the last member of a bucket is refused."""
    made = bucketed()
    graph_module = copy_of(made.backward)
    part = next(node for node in graph_module.graph.nodes if node.args and node.args[0] in splits(graph_module.graph))
    assert part.target is operator.getitem
    part.args = (part.args[0], 99)
    with pytest.raises(VerificationError, match="does not have"):
        verify_phases(replace(made, backward=graph_module))
