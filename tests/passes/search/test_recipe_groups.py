"""The groups of ranks of a recipe's axes."""

from __future__ import annotations

from autoshard import Cluster
from autoshard.ir.execution import Execution
from autoshard.ir.runtime import OURS
from passes.search.recipe_groups import recipe_groups


def _cluster(recipe: Execution) -> Cluster:
    return Cluster("h100_sxm", max(1, recipe.devices // 8), min(8, recipe.devices))


def test_groups_follow_megatrons_order_of_ranks() -> None:
    """Tensor ranks share a node, four data ranks are in two nodes, and neighbouring stages are in different nodes."""
    recipe = Execution(data=4, tensor=4, pipeline=2)
    groups = recipe_groups(recipe, _cluster(recipe))
    assert (groups.tensor.size, groups.tensor.inter) == (4, None)
    assert (groups.replicas.size, groups.replicas.per_node, groups.replicas.nodes) == (4, 2, 2)
    assert groups.neighbours.inter is not None


def test_gradients_are_reduced_over_data_and_context() -> None:
    """Gradients are reduced over one group of data and context ranks, as over equally many data ranks."""
    both, alone = Execution(data=4, context=4, tensor=2), Execution(data=16, tensor=2)
    found, expected = (recipe_groups(recipe, _cluster(recipe)) for recipe in (both, alone))
    assert found.replicas == expected.replicas
    assert (found.replicas.size, found.zero.size, found.context.size) == (16, 16, 4)
    half = recipe_groups(Execution(data=4, context=4, tensor=2, zero=3, zero_group=8), _cluster(both))
    assert (half.zero.size, half.outer.size) == (8, 2)


def test_our_expert_groups_lie_across_tensor_and_context_ranks() -> None:
    """Eight expert ranks are in one node with Megatron's folding, and in two under `OURS` with two context ranks."""
    folded = Execution(data=16, context=2, expert=8)
    ours = Execution(data=16, context=2, expert=8, runtime=OURS)
    theirs, own = (recipe_groups(recipe, _cluster(recipe)) for recipe in (folded, ours))
    assert [(groups.expert.size, groups.expert.nodes) for groups in (theirs, own)] == [(8, 1), (8, 2)]
    assert theirs.expert_replicas.size == own.expert_replicas.size == 4
    assert (theirs.expert_replicas.per_node, own.expert_replicas.per_node) == (1, 2)
