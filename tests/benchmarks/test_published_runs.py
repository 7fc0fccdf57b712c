"""Rows of published runs that need facts from their sources."""

from __future__ import annotations

import pytest
import torch

from passes.driver.pricing import priced_model
from passes.search.recipe_plan import predict_recipe
from tests.benchmarks.decoder import Decoder
from tests.benchmarks.published_runs import cluster_of, model_shape, read_rows, recipe_of


def test_embeddings_count_as_a_block_where_the_source_says_so() -> None:
    """All rows of BLOOM's prototype count the embedding and the head as blocks, because 12 stages divide 106 + 2
    and not 106."""
    recipes = [recipe_of(row) for row in read_rows() if row["model"]["name"] == "bloom-proto-12288x106"]
    assert len(recipes) == 6
    assert all(recipe.stage_layers is not None and (106 + 2) % recipe.pipeline == 0 for recipe in recipes)


def test_internevo_waits_for_its_broadcasts() -> None:
    """InternEvo's rows reduce gradients beside the backward, and broadcast parameters after the update."""
    recipes = [recipe_of(row) for row in read_rows() if row["source"]["key"] == "internevo"]
    assert recipes
    assert all(recipe.runtime.overlap_gradients and not recipe.runtime.overlap_parameters for recipe in recipes)


@pytest.mark.parametrize(
    "run",
    ["mosaic-a100_40gb-350m-s2048-g16-mb18-L295", "mbridge-25.09-gb200-qwen3_30b_a3b-pretrain-fp8_cs-n8-gb512-L611"],
)
def test_what_ran_fits(run: str) -> None:
    """Two measured runs have a predicted peak between 60 % and 100 % of their device's memory."""
    row = next(row for row in read_rows() if row["id"] == run)
    cluster = cluster_of(row)
    shape = model_shape(row)
    with torch.device("meta"):
        model, tokens = Decoder(shape).bfloat16(), torch.zeros(1, shape.sequence, dtype=torch.int64)
    counted = priced_model(model, (tokens, tokens), None).counted
    prediction = predict_recipe(counted, recipe_of(row), cluster)
    assert 0.6 < prediction.peak_memory_bytes / cluster.device.memory_bytes < 1.0
