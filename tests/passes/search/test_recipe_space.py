"""The space has every legal recipe of the model and the cluster exactly once."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from autoshard import Cluster, RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.runtime import OURS, RUNTIMES
from cost_models.schedule_orders import SCHEDULES, admits
from passes.search.layers.price_model import CountedModel
from passes.search.pipeline_stages import even_blocks
from passes.search.recipe_plan import predict_recipe
from passes.search.recipe_space import Pipe, RecipeSpace, divisors, known_pipes
from tests.passes.decoders import priced_dense, priced_sparse

BASE = Execution(global_batch=4)
CLUSTER = Cluster("h100_sxm", 1, 4)


def _dense() -> CountedModel:
    return priced_dense(2).counted


def _sparse() -> CountedModel:
    return priced_sparse().counted


def _all_recipes(blocks: int) -> set[Execution]:
    """Return all recipes that `Execution` and pricing accept, by brute force, each under one of its names."""
    found = set()
    sizes = (1, 2, 4)
    ends = [(None, 1)]
    ends += [(item.name, two) for item in SCHEDULES.values() if item.is_searched for two in item.numbers_of_stages(2)]
    for data, tensor, context, pipeline in itertools.product(sizes, repeat=4):
        if data * tensor * context * pipeline != 4:
            continue
        for parallel, split, micro, zero, group, (schedule, virtual) in itertools.product(
            (False, True), (False, True), (1, 2, 4), range(4), (None, 2), ends
        ):
            one_name = (schedule is None) == (pipeline == 1) and not (split and pipeline == 1)
            one_name = one_name and (group is None or (zero > 0 and data * context == 4))
            one_name = one_name and (zero == 0 or data * context > 1)
            if not one_name or pipeline * virtual > blocks + 2 * split:
                continue
            layers = even_blocks(blocks, pipeline * virtual, split_ends=True) if split else None
            try:
                recipe = Execution(
                    data=data, tensor=tensor, context=context, pipeline=pipeline, sequence_parallel=parallel,
                    stage_layers=layers, micro_batch=micro, zero=zero, zero_group=group, schedule=schedule,
                    virtual_stages=virtual, global_batch=4, recompute="none",
                )  # fmt: skip
                predict_recipe(_dense(), recipe, CLUSTER)
            except RecipeError:
                continue
            found.add(recipe)
    return found


def test_it_has_all_recipes_that_can_be_priced_and_no_other() -> None:
    """The space of a dense model on four devices equals a full enumeration, and has each recipe once."""
    only = {"recompute": ("none",), "zero_group": (None, 2)}
    found = list(RecipeSpace(_dense(), 4, BASE, only=only).recipes())
    assert len(found) == len(set(found))
    assert set(found) == _all_recipes(2)


@pytest.mark.parametrize(("blocks", "ranks"), [(1, 2), (4, 2), (4, 4), (13, 2)])
def test_pipelines_are_listed_once(blocks: int, ranks: int) -> None:
    """Each pipeline is listed once; by default, a rank has 1, 2, 4 or the most possible stages.

    Schedules that cannot run the number of micro-batches are left out.
    """
    found, every = known_pipes(ranks, 2 * ranks, blocks), known_pipes(ranks, 2 * ranks, blocks, every=True)
    assert len(set(every)) == len(every)
    assert set(found) <= set(every)
    assert {"GPipe", "1F1B", "InterleavedZeroBubble"} <= {pipe.schedule for pipe in found}
    for pipe in every:
        most = (blocks + 2 * pipe.split_ends) // ranks
        assert pipe.virtual_stages <= most
        assert (pipe in found) == (pipe.virtual_stages in (1, 2, 4, most))
        counts = even_blocks(blocks, ranks * pipe.virtual_stages, split_ends=pipe.split_ends)
        assert sum(counts) == blocks
        assert all(counts[1:-1])
    assert {pipe for pipe in every if admits(pipe.chosen_schedule, ranks, 3, pipe.virtual_stages)} == set(
        known_pipes(ranks, 3, blocks, every=True)
    ) & set(every)
    assert known_pipes(1, 8, blocks) == (Pipe(),)
    assert not known_pipes(ranks, 8, 0)


def test_every_recipe_of_a_model_with_experts_has_a_price() -> None:
    """The space has recipes that share experts out, that split experts, and that do both; each has a price."""
    space = RecipeSpace(_sparse(), 4, BASE, only={"recompute": ("none",), "pipeline": (1,), "micro_batch": (1,)})
    found = list(space.recipes())
    assert {(recipe.expert, recipe.expert_tensor) for recipe in found} >= {(1, 1), (4, 1), (2, 2), (1, 4)}
    assert all(predict_recipe(_sparse(), recipe, CLUSTER).step_time_s > 0 for recipe in found)


def test_axes_divide_what_they_split() -> None:
    """On 64 devices, tensor ranks divide four heads, context ranks are at most 32 tokens, and no layout has experts."""
    layouts = [
        layout for family in RecipeSpace(_dense(), 64, Execution(global_batch=64)).layouts() for layout in family
    ]
    assert {layout.tensor for layout in layouts} == {1, 2, 4}
    assert max(layout.context for layout in layouts) == 32
    assert all(layout.expert == 1 for layout in layouts)


def test_tensor_and_context_ranks_are_limited() -> None:
    """`most_tensor=2` and `least_tokens=16` limit a layout of 32 tokens to two tensor ranks and two context ranks."""
    space = RecipeSpace(_dense(), 64, Execution(global_batch=64), most_tensor=2, least_tokens=16)
    layouts = [layout for family in space.layouts() for layout in family]
    assert (max(layout.tensor for layout in layouts), max(layout.context for layout in layouts)) == (2, 2)


def test_fields_are_restricted() -> None:
    """`only` and `zero_groups` restrict the ZeRO group; a group of all replicas is listed as None."""
    only = {"zero": (3,), "zero_group": (2,), "tensor": (1,), "context": (1,), "schedule": (None, "1F1B")}
    found = list(RecipeSpace(_dense(), 4, BASE, only=only).recipes())
    assert {(recipe.data, recipe.zero_group) for recipe in found} == {(4, 2)}
    free = {name: values for name, values in only.items() if name != "zero_group"}
    found = list(RecipeSpace(_dense(), 4, BASE, only=free, zero_groups=(2,)).recipes())
    assert {(recipe.data, recipe.zero_group) for recipe in found} == {(4, 2), (2, None)}


def test_selective_recomputation_of_nothing_is_none() -> None:
    """With fused attention, selective recomputation costs as much as none, and is listed only if asked for."""
    names = {recipe.recompute for recipe in RecipeSpace(_dense(), 4, BASE).recipes()}
    assert names == {"none", "full"}
    asked = RecipeSpace(_dense(), 4, BASE, only={"recompute": ("selective", "full")})
    found = [recipe for recipe in asked.recipes() if recipe.recompute == "selective"]
    for recipe in found[::20]:
        kept = dataclasses.replace(recipe, recompute="none")
        assert predict_recipe(_dense(), recipe, CLUSTER) == predict_recipe(_dense(), kept, CLUSTER)


def test_what_is_not_searched_is_refused() -> None:
    """A fixed field that is not searched is refused, and so is a base recipe without a global batch."""
    with pytest.raises(RecipeError, match="'precision' is not searched; the searched fields are data, tensor"):
        RecipeSpace(_dense(), 4, BASE, only={"precision": ("f8",)})
    with pytest.raises(RecipeError, match="needs their global_batch"):
        RecipeSpace(_dense(), 4, Execution())


@pytest.mark.parametrize("number", [1, 2, 12, 49, 97, 360, 1_000_000_007 * 6])
def test_divisors_of_large_numbers_take_no_longer_than_their_root(number: int) -> None:
    """`divisors` lists each divisor once, in ascending order, also of a number of ten digits."""
    found = divisors(number)
    assert list(found) == sorted(set(found))
    assert all(number % size == 0 for size in found)
    assert len(found) == sum(
        1 + (size * size != number) for size in range(1, math.isqrt(number) + 1) if number % size == 0
    )


def test_a_profile_restricts_the_space() -> None:
    """With `runtime="megatron"`, a pipeline has two schedules, ZeRO 0 or 1, and no offload of activations."""
    runtime = RUNTIMES["megatron"]
    found = list(RecipeSpace(_dense(), 8, Execution(global_batch=16, runtime=runtime), offloads=True).recipes())
    staged = [each for each in found if each.pipeline > 1]
    assert {each.schedule for each in staged} == {"1F1B", "Interleaved1F1B"}
    assert {each.zero for each in staged} == {0, 1}
    assert {each.zero for each in found} == {0, 1, 2, 3}
    assert {each.offload for each in staged} == {"none"}


def test_our_experts_are_shared_out_among_data_ranks() -> None:
    """Under `OURS` the expert degree divides the data degree; with Megatron's folding it may be larger."""
    folded, ours = (
        {
            (layout.tensor, layout.expert, space.devices // layout.ranks // ranks)
            for layouts in space.layouts()
            for layout in layouts
            for ranks in space.pipelines(layout)
            if layout.expert > 1
        }
        for space in (RecipeSpace(_sparse(), 4, base) for base in (BASE, dataclasses.replace(BASE, runtime=OURS)))
    )
    assert any(expert > data for _, expert, data in folded)
    assert ours
    assert all(data % expert == 0 for _, expert, data in ours)
