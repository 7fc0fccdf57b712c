"""Where pipelines lie in joined clusters, and what is refused."""

from __future__ import annotations

import pytest

from autoshard import Recipe, RecipeError
from cost_models.hardware import Cluster
from cost_models.joined import JoinedCluster
from passes.recipes.place_islands import place_islands

JOINED = JoinedCluster([Cluster("h100_sxm", 2, 8), Cluster("a100_sxm_80gb", 1, 8)])


def test_islands_have_the_pipeline_ranks_that_their_devices_make() -> None:
    """In the order that the recipe says."""
    placement = place_islands(Recipe(data=4, pipeline=6, islands=(1, 0)), JOINED)
    assert placement.of_ranks == (0, 0, 1, 1, 1, 1)
    assert [island.cluster.name for island in placement.islands] == ["a100_sxm_80gb:1x8", "h100_sxm:2x8"]
    assert all(island.groups.zero.size == 4 for island in placement.islands)


@pytest.mark.parametrize(
    ("recipe", "culprit"),
    [
        (Recipe(data=8, pipeline=3, islands=(0, 2)), "has 2, but .* has the islands 0 to 1"),
        (Recipe(data=8, pipeline=2), r"the islands 0, 1 .* have 2 \+ 1 = 3 pipeline ranks"),
        (Recipe(data=16, pipeline=2), "do not fill island 1 \\(a100_sxm_80gb:1x8\\) of 8"),
        (Recipe(data=24), "do not fill island 0"),
    ],
)
def test_what_does_not_lie_in_islands_is_refused(recipe: Recipe, culprit: str) -> None:
    """The error names the island and the way out."""
    with pytest.raises(RecipeError, match=culprit):
        place_islands(recipe, JOINED)


@pytest.mark.parametrize(("islands", "culprit"), [((0, 0), "passes an island twice"), ((-1,), "places of islands")])
def test_islands_of_a_recipe_are_different_places(islands: tuple[int, ...], culprit: str) -> None:
    """The error shows them."""
    with pytest.raises(RecipeError, match=culprit):
        Recipe(islands=islands)
