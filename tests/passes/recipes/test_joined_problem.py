"""Plans of recipes on joined clusters, through the public calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import autoshard
from autoshard import Cluster, DoesNotFitError, NotAvailableError, Plan, Recipe, RecipeError
from cost_models.hardware import node_type
from tests.passes.decoders import dense, tokens
from tests.passes.islands import JOINED

MODEL = dense(6)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The plan of a decoder of six blocks on a device and one that is half as fast, one sequence after the other."""
    options = {"optimizer": "adamw", "global_batch": 32, "constraints": {"micro_batch": 1}}
    return autoshard.plan(MODEL, JOINED, example_inputs=tokens(), **options)


def test_the_faster_island_has_more_blocks(plan: Plan) -> None:
    """And both are faster than either alone, with a proof."""
    assert plan.recipe is not None
    assert plan.recipe.islands is not None
    assert len(plan.recipe.islands) == 2
    assert plan.recipe.stage_blocks is not None
    by_island = dict(zip(plan.recipe.islands, plan.recipe.stage_blocks, strict=True))
    assert by_island[0] > by_island[1] > 0
    assert plan.gap == 0.0
    assert plan.baselines.keys() == {"island 0 (l4:1x1) alone", "island 1 (slow 2:1x1) alone"}
    assert all(each is not None and plan.objective < each for each in plan.baselines.values())


def test_its_plan_is_printed_saved_and_priced(plan: Plan, tmp_path: Path) -> None:
    """All by the same figures."""
    assert plan.recipe is not None
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.recipe == plan.recipe
    assert "priced for l4:1x1+slow 2:1x1" in str(plan)
    assert "islands " in plan.recipe.words
    priced = autoshard.price(MODEL, JOINED, plan.recipe, example_inputs=tokens())
    assert priced.predicted.step_time_s == plan.objective
    assert plan.memory_budget == node_type("l4").device.memory_bytes


def test_why_not_searches_all_islands(plan: Plan) -> None:
    """Without a pipeline one island does all."""
    found = plan.why_not("pipeline")
    assert [item.name.split(":")[0] for item in found.variants] == ["without pipeline"]
    assert found.variants[0].objective == min(each for each in plan.baselines.values() if each is not None)


def test_a_constraint_names_the_islands() -> None:
    """In their order; the others are idle."""
    options = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 8}
    found = autoshard.plan(MODEL, JOINED, constraints={"islands": (1,)}, **options)
    alone = autoshard.plan(MODEL, JOINED.islands[1], **options)
    assert found.recipe is not None
    assert found.recipe.islands == (1,)
    assert found.objective == alone.objective
    with pytest.raises(RecipeError, match="no joined cluster"):
        autoshard.plan(MODEL, JOINED.islands[0], constraints={"islands": (0,)}, **options)


def test_islands_of_one_name_are_all_searched() -> None:
    """They differ in their networks; the faster one is the second."""
    kind = node_type("h100_sxm")
    slow, fast = (Cluster(kind.with_network(bytes_per_s_per_device=speed), 2, 1) for speed in (1e8, 2e10))
    joined = Cluster.join(slow, fast)
    found = autoshard.plan(MODEL, joined, example_inputs=tokens(), optimizer="adamw", global_batch=4)
    alone = autoshard.plan(MODEL, fast, example_inputs=tokens(), optimizer="adamw", global_batch=4)
    assert len(found.baselines) == 2
    assert found.objective <= alone.objective


def test_what_fits_nowhere_is_an_error() -> None:
    """With the least memory of the fullest device."""
    options = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 2}
    with pytest.raises(DoesNotFitError, match="the smallest needs") as error:
        autoshard.plan(MODEL, JOINED, memory_budget=1000, **options)
    assert error.value.smallest_bytes > 1000


def test_specs_are_planned_on_one_kind_of_device() -> None:
    """`plan` without a batch, and `compile`: the error says what to pass."""
    with pytest.raises(NotAvailableError, match="a mesh lies on devices of one kind"):
        autoshard.plan(MODEL, JOINED, example_inputs=tokens())
    model, cluster = torch.nn.Linear(4, 4), cast("Any", JOINED)
    with pytest.raises(NotAvailableError, match="a mesh lies on devices of one kind"):
        autoshard.compile(model, cluster, example_inputs=(torch.ones(2, 4),))


def test_islands_are_those_of_joined_clusters() -> None:
    """The error names the cluster."""
    recipe = Recipe(islands=(0,))
    with pytest.raises(RecipeError, match="l4:1x1 is no joined cluster"):
        autoshard.price(MODEL, JOINED.islands[0], recipe, example_inputs=tokens())
