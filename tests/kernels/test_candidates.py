"""Candidates of tuning are neighbours of the heuristic's block sizes, and each gives the heuristic's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.kernels.candidates import TUNABLE, Choice, choice_of, neighbours
from autoshard.kernels.generated.define import NamedGroup, define_kernels
from autoshard.kernels.generated.group import Group, GroupStep, Ref, ValueShape
from autoshard.kernels.generated.source import ElementLayout
from autoshard.kernels.launch import row_tile
from autoshard.kernels.tuning import Launch
from autoshard.kernels.tuning_switch import Tuning, tune_kernels
from tests.kernels.calls import CALLS, run
from tests.kernels.compiled_kernels import compiled
from tests.kernels.fused import draw

_aten = torch.ops.aten

# Of a program on an H100, in bytes.
MAX_SHARED_BYTES = 232_448
NAMES = st.sampled_from(sorted(CALLS))


@contextmanager
def _handing_out(pick: Sequence[int]) -> Iterator[list[str]]:
    """Within this context, launches use the candidates with these numbers in turn. Yields the names of the
    launched kernels."""
    launched: list[str] = []

    def choose(tuning: Tuning, launch: Launch, heuristic: Choice) -> Choice:
        found = neighbours(heuristic, launch.constants)
        launched.append(launch.kernel.fn.__name__)
        return found[pick[(len(launched) - 1) % len(pick)] % len(found)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoshard.kernels.launch.choose", choose)
        tune_kernels()
        try:
            yield launched
        finally:
            tune_kernels(False)


@settings(max_examples=30)
@given(NAMES, st.integers(1, 9), st.sampled_from([1, 3, 64, 200]), st.lists(st.integers(0, 15), min_size=1, max_size=4))
def test_any_candidate_gives_the_same_result(name: str, rows: int, columns: int, pick: list[int]) -> None:
    """Any block sizes give the heuristic's results to a few roundings, because sums over other blocks are added in
    another order."""
    expected = run(name, rows, columns)
    with _handing_out(pick):
        found = run(name, rows, columns)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_every_kernel_is_called() -> None:
    """The calls reach every kernel that has block sizes to tune, and the table of tunable kernels names no other."""
    with _handing_out([0]) as launched:
        for name in CALLS:
            run(name, 3, 20)
    assert set(launched) == set(TUNABLE)


GROUPS = {"sum over columns": ((9, 40), [1]), "no sum": ((9, 333), None)}


@settings(max_examples=20)
@given(st.sampled_from(sorted(GROUPS)), st.integers(0, 15))
def test_any_candidate_of_a_generated_kernel_gives_the_same_result(name: str, pick: int) -> None:
    """A generated kernel with any candidate's block sizes gives the values of its operators."""
    shape, dims = GROUPS[name]
    torch.manual_seed(0)
    x = draw(*shape)
    form = ValueShape.of(x)
    steps = [GroupStep(_aten.mul.Tensor, (Ref(0), 3.0), (), form), GroupStep(_aten.tanh.default, (Ref(1),), (), form)]
    if dims is not None:
        total = ValueShape.of(x.sum(dims))
        steps.append(GroupStep(_aten.sum.dim_IntList, (Ref(2), dims), (), total))
    group = Group((form,), tuple(steps), (len(steps),))
    names = ("x", "tripled", "out", "total")[: len(steps) + 1]
    kernel = define_kernels([NamedGroup(group, names, "A test.")], "A test.")[group]
    with _handing_out([pick]) as launched:
        found = kernel.operator(x)
    assert launched == [group.name]
    torch.testing.assert_close(found, group.run([x])[0], rtol=1e-4, atol=1e-4)


def test_other_blocks_have_other_grids() -> None:
    """The grid of a launch grows as the blocks of rows shrink, so that all elements are covered."""
    layout = ElementLayout({"BLOCK_R": 4, "BLOCK_C": 64}, 25, 4)
    assert [layout.grid({"BLOCK_R": rows, "BLOCK_C": 64}) for rows in (2, 4, 8)] == [(50,), (25,), (13,)]


@pytest.mark.parametrize("columns", [1, 100, 4096, 16384])
def test_neighbours_are_one_step_away(columns: int) -> None:
    """The heuristic's choice comes first. Each other choice has block sizes and warps that are half, equal or twice."""
    tile = row_tile(columns)
    constants = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns, "CENTRED": True}
    choice, fixed = choice_of(constants, ("BLOCK_R",), tile.num_warps)
    assert fixed == {"BLOCK_C": tile.columns, "CENTRED": True}
    found = neighbours(choice, fixed)
    assert found[0] == choice == Choice((("BLOCK_R", tile.rows),), tile.num_warps)
    assert len(set(found)) == len(found) >= 3
    for item in found:
        assert item.blocks[0][1] / tile.rows in (0.5, 1, 2)
        assert item.num_warps / tile.num_warps in (0.5, 1, 2)
        assert 1 <= item.num_warps <= 16


def test_a_choice_is_readable() -> None:
    """The text names blocks, if there are any, and warps."""
    assert str(Choice((("BLOCK_R", 2), ("BLOCK_C", 64)), 8)) == "BLOCK_R 2, BLOCK_C 64, 8 warps"
    assert str(Choice((), 4)) == "4 warps"


@pytest.mark.slow
def test_candidates_compile() -> None:
    """One candidate of every third kernel compiles for an H100, within its shared memory."""
    rows = compiled("sm_90", "sample")
    assert len({row["kernel"] for row in rows}) == len(rows) > 4
    assert all(row["shared_bytes"] <= MAX_SHARED_BYTES for row in rows)


@pytest.mark.slow
def test_every_candidate_compiles() -> None:
    """At the usual sizes, all candidates compile for an H100 within its shared memory, also of generated kernels."""
    rows = compiled("sm_90", "candidates", "mixture")
    assert set(TUNABLE) <= {row["kernel"] for row in rows}
    assert all(row["shared_bytes"] <= MAX_SHARED_BYTES for row in rows)
