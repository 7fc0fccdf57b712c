"""A program without inner blocks has the cost and memory of the whole program."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from torch import nn

from autoshard.ir.mesh import Mesh
from passes.driver.expand_plan import match_nodes
from passes.planning.build_assignment import PlanningProblem
from passes.prediction.utilisation import utilisation
from passes.strategies.repeated import NotAlikeError
from tests.passes.blocks import peak_of, problem_of
from tests.passes.deep import adamw, alike, in_turn, short_step, step, summed

ONE, TWO = Mesh({"a": 4}), Mesh({"a": 2, "b": 2})


def _choice_of_whole(whole: PlanningProblem, short: PlanningProblem, choice: Sequence[int]) -> list[int]:
    """Return the choice of the whole program for a choice of the short program."""
    matches = match_nodes(short.space.program, whole.space.program)
    found = []
    for members in whole.members:
        options = {choice[short.classes[matches.get(name, name)]] for name in members}
        assert len(options) == 1, members
        found.append(options.pop())
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "depth", "margin", "mesh", "trains", "limit"),
    [
        (alike, 5, 1, ONE, False, None),
        (alike, 6, 1, TWO, True, None),
        (alike, 8, 2, ONE, True, 1.0),
        (in_turn, 6, 1, ONE, True, 1.0),
    ],
)
def test_the_short_program_costs_what_the_whole_one_does(
    make: Callable[[int], nn.Module], depth: int, margin: int, mesh: Mesh, *, trains: bool, limit: float | None
) -> None:
    """Drawn choices have equal costs, peaks and utilisation in the short and the whole program."""
    model = make(depth)
    update = adamw(model, limit) if trains else None
    programs = step(model, update), short_step(model, update, margin)
    whole, short = (problem_of(program, mesh, micro_batches=1 if limit is None else 3) for program in programs)
    assert len(short.space.sites) < len(whole.space.sites)
    draw = random.Random(depth)
    counts = [len(cost) for cost in short.assignment.costs]
    for choice in ([0] * len(counts), *([draw.randrange(count) for count in counts] for _ in range(4))):
        same = _choice_of_whole(whole, short, choice)
        assert short.assignment.cost_of(choice) == pytest.approx(whole.assignment.cost_of(same), rel=1e-9)
        used, peak = short.usage(choice), whole.usage(same).max()
        assert used.max() == peak == short.memory_row(int(used.argmax())).bytes_of(choice, short.assignment.edges)
        one, two = utilisation(short, choice), utilisation(whole, same)
        assert peak_of(short, choice) == pytest.approx(peak_of(whole, same), rel=0.01)
        assert (one.model_s, one.local_s) == (pytest.approx(two.model_s), pytest.approx(two.local_s))


def test_depth_adds_nothing_to_the_problem() -> None:
    """The short programs of 8 and 40 layers have equally many sites and links, and their counts differ by 32."""
    eight, forty = (problem_of(short_step(alike(depth)), ONE) for depth in (8, 40))
    assert len(eight.space.sites) == len(forty.space.sites)
    assert len(eight.space.links) == len(forty.space.links)
    assert [count + 32 for count in eight.counts().values()] == list(forty.counts().values())


def test_blocks_that_all_end_in_the_loss_are_refused() -> None:
    """A model whose loss sums over all blocks has no short program, because the sum's cost depends on depth."""
    with pytest.raises(NotAlikeError, match=r"outside of the blocks|alike values"):
        problem_of(short_step(summed(10), margin=2), ONE)
