"""A `SeedSequence` follows torch's generator, as random numbers do on one device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from autoshard.runtime.seeds import SeedSequence


def draw(seeds: SeedSequence, count: int = 1) -> list[int]:
    """Return the seeds that `count` calls of a module draw."""
    found = []
    for _ in range(count):
        if seeds.is_outdated:
            seeds.renew()
        found.append(int(seeds.draw()))
    return found


@pytest.fixture
def seeds() -> SeedSequence:
    """Return a sequence made after 500 numbers were drawn from a set seed, as for a model's weights."""
    torch.manual_seed(3)
    torch.randn(500)
    return SeedSequence()


@pytest.mark.parametrize("others", [0, 1, 3, 700])
def test_the_seed_that_is_set_begins_again(seeds: SeedSequence, others: int) -> None:
    """Setting a seed starts the sequence again, whatever is drawn between the seed and the call."""
    torch.manual_seed(3)
    first = draw(seeds, 3)
    torch.rand(2000)
    assert not {*first} & {*draw(seeds, 3)}
    torch.manual_seed(3)
    torch.rand(others)
    assert draw(seeds, 3) == first


def test_a_state_repeats_its_numbers_however_far_it_is(seeds: SeedSequence) -> None:
    """After the same seed and a million other draws, the sequence repeats its seeds."""
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        torch.rand(1_000_000)
        found.append(draw(seeds, 2))
    assert found[0] == found[1]


@pytest.mark.parametrize("others", [0, 1, 1000, 1_000_000])
def test_numbers_that_others_draw_make_no_difference(seeds: SeedSequence, others: int) -> None:
    """Random numbers that other code draws between calls do not change the seeds."""
    found = draw(seeds, 1)
    for _ in range(4):
        torch.randn(others)
        found += draw(seeds, 1)
    seeds.restart()
    assert draw(seeds, 5) == found


@pytest.mark.parametrize("far", [0, 1_000_000])
@pytest.mark.parametrize(
    ("inside", "before", "within"),
    [
        (lambda: None, 0, 5),
        (lambda: None, 5, 0),
        (lambda: torch.manual_seed(3), 0, 0),
        (lambda: torch.manual_seed(3), 0, 5),
        (lambda: torch.manual_seed(9), 0, 5),
        (lambda: torch.manual_seed(9), 5, 0),
    ],
)
def test_what_a_fork_draws_is_forgotten(
    seeds: SeedSequence, inside: Callable[[], object], before: int, within: int, far: int
) -> None:
    """After `fork_rng`, the sequence goes on as if there had been no fork."""
    torch.rand(far)
    expected = draw(copy.deepcopy(seeds), 6)
    found = draw(seeds, 3)
    torch.rand(before)
    with torch.random.fork_rng(devices=[]):
        inside()
        torch.rand(within)
        draw(seeds, 2)
    assert found + draw(seeds, 3) == expected


def test_a_fork_goes_on_where_it_begins(seeds: SeedSequence) -> None:
    """Inside `fork_rng` without a seed, calls draw the same seeds as after it."""
    with torch.random.fork_rng(devices=[]):
        inside = draw(seeds, 2)
    assert draw(seeds, 2) == inside


def test_forks_nest(seeds: SeedSequence) -> None:
    """After each of two nested forks, the sequence goes on as before the fork."""
    expected = draw(copy.deepcopy(seeds), 4)
    found = draw(seeds)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        one = draw(seeds)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            draw(seeds, 2)
        two = draw(seeds)
        torch.manual_seed(1)
        assert draw(seeds, 2) == one + two
    assert found + draw(seeds, 3) == expected


def test_a_state_that_is_set_brings_its_place_back(seeds: SeedSequence) -> None:
    """After `set_rng_state`, the sequence draws the seeds that followed `get_rng_state`."""
    draw(seeds, 2)
    state = torch.get_rng_state()
    expected = draw(seeds, 3)
    torch.manual_seed(8)
    draw(seeds, 1)
    torch.set_rng_state(state)
    assert draw(seeds, 3) == expected


def test_an_evaluation_that_sets_the_seed_repeats_while_training_goes_on(seeds: SeedSequence) -> None:
    """Evaluations in a fork with a fixed seed repeat their seeds, and training never does."""
    training, evaluation = [], []
    for _ in range(3):
        training += draw(seeds, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            torch.randn(33)
            evaluation.append(draw(seeds, 2))
    assert evaluation[0] == evaluation[1] == evaluation[2]
    assert len({*training}) == 12


@pytest.mark.parametrize("set_generator_first", [True, False])
@pytest.mark.parametrize("seed", [3, 11])
def test_a_state_that_is_loaded_goes_on(seeds: SeedSequence, set_generator_first: bool, seed: int) -> None:
    """A loaded sequence goes on after another seed, whether torch's state is set before or after loading."""
    draw(seeds, 2)
    torch.rand(7)
    saved, generator = seeds.state(), torch.get_rng_state()
    expected = draw(seeds, 3)
    torch.manual_seed(seed)
    torch.rand(5000)
    loaded = SeedSequence()
    if set_generator_first:
        torch.set_rng_state(generator)
    loaded.load(saved)
    if not set_generator_first:
        torch.set_rng_state(generator)
    assert draw(loaded, 3) == expected
    torch.manual_seed(seed)
    loaded.load(saved)
    assert draw(loaded, 3) == expected


def test_a_seed_that_is_set_behind_a_loaded_state_counts(seeds: SeedSequence) -> None:
    """A seed that is set after a state is loaded starts its own sequence, also if it is the same seed."""
    draw(seeds, 2)
    for seed in (3, 4):
        seeds.load(seeds.state())
        torch.manual_seed(seed)
        found = draw(seeds)
        torch.manual_seed(seed)
        assert draw(SeedSequence()) == found


def test_a_pickled_sequence_goes_on(seeds: SeedSequence) -> None:
    """A sequence that was pickled and loaded draws the next seeds of the original."""
    draw(seeds, 2)
    other = pickle.loads(pickle.dumps(seeds))
    assert draw(other, 2) == draw(seeds, 2)


def test_what_is_saved_behind_a_seed_is_its_sequence(seeds: SeedSequence) -> None:
    """The state after setting a seed has this seed at position 0."""
    draw(seeds, 2)
    torch.manual_seed(3)
    assert seeds.state().tolist() == [3, 0]
    assert seeds.describe() == "3"


def test_few_places_are_remembered(seeds: SeedSequence) -> None:
    """After 5000 draws, the sequence remembers 4096 positions."""
    draw(seeds, 5000)
    assert len(seeds._known) == 4096
