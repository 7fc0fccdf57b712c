"""Stages of a pipeline over islands: what lies on the hosts of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard import Cluster, Recipe, RecipeError
from autoshard.cluster import JoinedCluster
from passes.recipes.recipe_plan import predict_recipe, recipe_plan
from tests.passes.decoders import priced_dense

PRICED = priced_dense(4)
RECIPE = Recipe(pipeline=2, islands=(0, 1), stage_blocks=(3, 1), offload="activations", global_batch=4)


def joined(*host_bytes: int) -> JoinedCluster:
    """Two islands of a device each, whose hosts have so much memory."""
    nodes = (Cluster(name, 1, 1).node for name in ("h100_sxm", "a100_sxm_80gb"))
    sized = (replace(node, host_memory_bytes=size) for node, size in zip(nodes, host_bytes, strict=True))
    return JoinedCluster([Cluster(node, 1, 1) for node in sized])


def test_what_is_offloaded_lies_on_the_hosts_of_its_island() -> None:
    """1F1B: three blocks of two micro-batches on the first, one block of one on the second; the plan has the most."""
    sizes = PRICED.counted.section_sizes(RECIPE, joined(10**9, 10**9).islands[0])
    kept = sizes[PRICED.counted.blocks[0]].saved_bytes
    enough = joined(6 * kept, kept)
    found = recipe_plan(PRICED, RECIPE, enough)
    assert found.offload.host_bytes == 6 * kept
    assert found.offload.time_s == found.predicted.breakdown.get("communication over the host", 0.0)
    plain = predict_recipe(PRICED.counted, replace(RECIPE, offload="none"), enough)
    assert found.predicted.peak_memory_bytes < plain.peak_memory_bytes
    assert found.predicted.step_time_s >= plain.step_time_s
    for short, culprit in ((joined(6 * kept - 1, kept), "h100_sxm"), (joined(6 * kept, kept - 1), "a100_sxm_80gb")):
        with pytest.raises(RecipeError, match=f"for each device of {culprit}:1x1, of which it has"):
            predict_recipe(PRICED.counted, RECIPE, short)


@pytest.mark.parametrize("overlaps", [False, True])
def test_sends_of_a_pipeline_that_overlap_are_no_part_of_the_step(overlaps: bool) -> None:
    """The breakdown names them only where they take time of their own."""
    recipe = replace(RECIPE, offload="none", overlap_pipeline=overlaps)
    breakdown = predict_recipe(PRICED.counted, recipe, joined(10**9, 10**9)).breakdown
    assert ("communication over pipeline" in breakdown) == (not overlaps)
