"""FLOPs of the model and FLOPs of the ranks, measured as seconds at the peak rate."""

from __future__ import annotations

import pytest

from autoshard.ir.mesh import Mesh
from passes.prediction.utilisation import Utilisation, utilisation
from tests.passes.blocks import blocks_program, problem_of
from tests.passes.drawn_choices import drawn_choice


@pytest.mark.parametrize("seed", range(4))
def test_ranks_run_at_least_their_share_of_the_model(seed: int) -> None:
    """A rank runs at least its equal share of the FLOPs of the model, and at most all these FLOPs."""
    mesh = Mesh({"data": 2, "model": 2})
    planning = problem_of(blocks_program(count=3), mesh)
    found = utilisation(planning, drawn_choice(planning, seed))
    assert found.model_s * (1 - 1e-9) <= found.local_s <= mesh.size * found.model_s * (1 + 1e-9)


def test_depth_multiplies_the_flops() -> None:
    """A model of twice as many blocks has twice the FLOPs."""
    mesh = Mesh({"x": 2})
    three, six = (problem_of(blocks_program(count=count), mesh) for count in (3, 6))
    whole = [utilisation(planning, [0] * len(planning.members)) for planning in (three, six)]
    assert whole[1].model_s == pytest.approx(2 * whole[0].model_s)


def test_nothing_counted_is_no_utilisation() -> None:
    """The utilisation is None without counted FLOPs, and else the share of the step that these FLOPs take."""
    assert Utilisation(0.0, 0.0).shares(1.0) == (None, None)
    assert Utilisation(1.0, 2.0).shares(4.0) == (0.25, 0.5)
