"""What fills the memory, by what it is."""

from __future__ import annotations

import pytest

from autoshard.ir.mesh import Mesh
from passes.memory_parts import PARTS, memory_parts
from tests.passes.blocks import blocks_program, problem_of
from tests.passes.test_segment_step import drawn_choice


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_what_is_in_use(seed: int) -> None:
    """At every point of the program, whatever the plan."""
    planning = problem_of(blocks_program(count=3), Mesh({"data": 2, "model": 2}), state_bytes_per_parameter_byte=2.0)
    choice = drawn_choice(planning, seed)
    used = planning.usage(choice)
    for point in range(planning.liveness.points):
        parts = memory_parts(planning).at(planning, choice, point)
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == pytest.approx(used[point])
        assert parts["optimizer state"] == 2 * parts["parameters"]


def test_the_groups_are_fewer_than_the_values() -> None:
    """Alike layers share theirs, so depth costs nothing but counting."""
    mesh = Mesh({"x": 2})
    four, eight = (memory_parts(problem_of(blocks_program(count=count), mesh)) for count in (4, 8))
    assert len(four.groups) == len(eight.groups)
    assert len(four.members) < len(eight.members)


def test_gradients_grow_and_activations_shrink_in_the_backward() -> None:
    """At the end all gradients are there, and nothing that the forward saved."""
    planning = problem_of(blocks_program(count=3), Mesh({"x": 2}))
    choice, last = [0] * len(planning.members), planning.liveness.points - 1
    found = memory_parts(planning)
    start, middle, end = (found.at(planning, choice, point) for point in (0, last // 2, last))
    assert start["gradients"] == 0
    assert end["gradients"] == end["parameters"]
    assert end["activations"] < middle["activations"]
