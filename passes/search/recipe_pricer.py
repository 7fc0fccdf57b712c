"""Price many recipes of one model on one cluster, and bound their step times from below. Recipes share layers' prices.

A layer class takes f seconds forward and b backward for one micro-batch, with exposed communication and recomputation.
A step has m micro-batches. Pipeline rank r has c(r) layers of each class. h(r) layers of each class run before the
first stage of rank r. A product such as c(r) f is the sum over the layer classes.

1. *Mean.* One of the P ranks has at least the mean work, m sum(f + b) / P. A micro-batch takes at least the time of
   its forward, and of its gradients of inputs, through all stages.
2. *Path of a rank.* Rank r begins after the first micro-batch's forward through the layers of h(r). Each stage sends to
   the next in s seconds. Then rank r works without a break. The last micro-batch's backward passes the layers of h(r)
   again, unless the schedule cuts backwards in two:

       T >= h(r) f + r s + m c(r) (f + b) [ + h(r) b + r s ]

   Then the rank with most parameters reduces gradients, updates parameters and gathers them (`price_ends.end_times`).
   With equal stages this bound is the price.

Every bound is lowered by one part in 10^9, because of rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from cost_models.schedule_orders import most_in_flight
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import LayerPrice
from passes.search.layers.price_model import CountedModel
from passes.search.pipeline_stages import (
    Floats,
    Stage,
    cut_into_stages,
    cuts_backward,
    in_flight,
    layer_counts,
    rank_counts,
)
from passes.search.price_ends import end_times
from passes.search.price_memory import held_bytes, host_bytes, memory_parts, memory_price
from passes.search.price_recipe import LayerTimes, Step, layer_times, load_of, send_time
from passes.search.recipe_groups import Groups, recipe_groups
from passes.search.recipe_space import Pipe

ROUNDING = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Places:
    """The layers of each rank in several pipelines that have the same number of ranks.

    Args:
        counts: the number of layers of each class on each rank, [pipes, ranks, classes].
        before: the number of layers of each class before the rank's first stage, [pipes, ranks, classes].
        is_whole: true for a schedule that runs each backward as one task, [pipes, 1].
    """

    counts: Floats
    before: Floats
    is_whole: NDArray[np.bool_]


@lru_cache(maxsize=1024)
def places_of(names: tuple[str, ...], blocks: tuple[str, ...], pipes: tuple[Pipe, ...]) -> Places:
    """Return the layers of each rank in the pipelines `pipes`, which have the same number of ranks.

    `names` are the layer classes, and `blocks` has the class of each block.
    """
    counts, before, is_whole = zip(*(_place(names, blocks, pipe) for pipe in pipes), strict=True)
    return Places(np.array(counts, dtype=float), np.array(before, dtype=float), np.array(is_whole)[:, None])


@lru_cache(maxsize=8192)
def _place(names: tuple[str, ...], blocks: tuple[str, ...], pipe: Pipe) -> tuple[Floats, Floats, bool]:
    """Return the entries of one pipeline in the fields `counts`, `before` and `is_whole` of `Places`."""
    recipe = pipe.recipe(len(blocks))
    stages = cut_into_stages(blocks, recipe)
    passed = np.cumsum([layer_counts(names, stage) for stage in stages], axis=0)
    before = np.concatenate([np.zeros((1, len(names))), passed])[: pipe.pipeline]
    return rank_counts(names, stages, recipe), before, not cuts_backward(recipe)


def path_times(times: LayerTimes, places: Places, send_s: float, micro_batches: int) -> Floats:
    """Return a lower bound of the step time in each pipeline of `places`, in seconds, [pipes].

    This is bound 2 of the module's docstring, without the end of the step (`price_ends`). It is the maximum over the
    pipeline's ranks.
    """
    hops, backward_s = np.arange(float(places.counts.shape[1])) * send_s, times.backward_s + times.recompute_s
    entering = places.before @ times.forward_s + hops
    leaving = places.is_whole * (places.before @ backward_s + hops)
    work = places.counts @ (times.forward_s + backward_s)
    return (entering + micro_batches * work + leaving).max(axis=1)


@lru_cache(maxsize=4096)
def held_by(pipes: tuple[Pipe, ...], micro_batches: int) -> Floats:
    """Return how many micro-batches each rank holds at its peak, divided by its virtual stages, as [pipes, ranks]."""
    held = [most_in_flight(pipe.chosen_schedule, pipe.pipeline, micro_batches, pipe.virtual_stages) for pipe in pipes]
    return np.array(held) / np.array([[pipe.virtual_stages] for pipe in pipes])


@dataclass
class RecipePricer:
    """Times and memory of recipes that differ only in `recipe_space.SEARCHED`, with all prices that recipes share."""

    counted: CountedModel
    cluster: Cluster
    _groups: dict[tuple[object, ...], Groups] = field(default_factory=dict)
    _times: dict[tuple[object, ...], LayerTimes] = field(default_factory=dict)
    _layers: dict[tuple[object, ...], Mapping[str, LayerPrice]] = field(default_factory=dict)

    def groups(self, recipe: Execution) -> Groups:
        """Return the process groups of a recipe on the cluster. Recipes with equal axes share one cached result."""
        shape = (recipe.pipeline, recipe.data, recipe.context, recipe.tensor)
        key = (*shape, recipe.expert, recipe.expert_tensor, recipe.zero_group)
        if key not in self._groups:
            self._groups[key] = recipe_groups(recipe, self.cluster)
        return self._groups[key]

    def layers(self, recipe: Execution) -> Mapping[str, LayerPrice]:
        """Return the price of each layer class under a recipe, by name, for one micro-batch on one rank."""
        key = _layout_of(recipe)
        if key not in self._layers:
            self._layers[key] = self.counted.layer_prices(recipe, self.cluster)
        return self._layers[key]

    def stages(self, recipe: Execution) -> tuple[Stage, ...]:
        """Return the layers of each stage of a recipe's pipeline, in order."""
        return cut_into_stages(self.counted.blocks, recipe)

    def time_s(self, recipe: Execution) -> float:
        """Return the seconds of a step under a recipe, as in `recipe_plan.predict_recipe`."""
        parts = (self.layers(recipe), self.stages(recipe), recipe, self.groups(recipe), self.cluster)
        return Step(*parts).time_s

    def memory_bytes(self, recipe: Execution) -> int:
        """Return the peak bytes of the rank that needs most memory under a recipe."""
        parts = (self.layers(recipe), self.stages(recipe), recipe, self.groups(recipe))
        return memory_price(*parts, in_flight(recipe)).total

    def memory_floors(self, recipe: Execution, pipes: tuple[Pipe, ...]) -> Floats:
        """Return a lower bound of the peak memory in each pipeline, in bytes, [pipes].

        The pipelines have the same number of ranks. The bound differs from `memory_bytes` only by rounding.
        """
        held = held_bytes(self.layers(recipe), recipe, self.groups(recipe))
        parts = memory_parts(held, self._places(recipe, pipes).counts, held_by(pipes, recipe.micro_batches))
        return np.sum(list(parts.values()), axis=0).max(axis=1) - len(parts)

    def fits(self, recipe: Execution, memory_limit: float) -> bool:
        """Whether a recipe needs at most `memory_limit` bytes on each device, and its offloaded values fit the host."""
        if self.memory_bytes(recipe) > memory_limit:
            return False
        share = self.cluster.host_bytes_per_device
        if recipe.offload != "activations" or share is None:
            return True
        return host_bytes(self.layers(recipe), self.stages(recipe), recipe, in_flight(recipe)) <= share

    def workspace_bytes(self, recipe: Execution) -> int:
        """Return the bytes of the largest workspace of any kernel on a rank, under a recipe's layout."""
        return max(size.workspace_bytes for size in self.layers(recipe).values())

    def least_memory(self, last: Execution) -> float:
        """Return a lower bound, in bytes, of the memory of all recipes with one layout and activation policy.

        The fullest rank needs at least the mean of all ranks. A rank holds at least one micro-batch, the state of its
        parameters, and the workspace of one layer class. `last` is a recipe with this layout and policy, with the most
        pipeline ranks and the ZeRO stage that shards most.
        """
        layers = self.layers(last)
        held = held_bytes(layers, last, self.groups(last))
        each = held.kept + held.parameters + held.gradients + held.state
        mean = float(self._counts_of(layers) @ each) / last.pipeline
        return ROUNDING * (mean + float(held.workspace.min())) - len(held)

    def least_time(self, recipe: Execution) -> float:
        """Return a lower bound, in seconds, of a recipe's step in any pipeline (bound 1 of the module's docstring)."""
        times, counts = self._times_of(recipe), self._counts_of(self.layers(recipe))
        backward_s = times.backward_s + times.recompute_s
        first_s = np.minimum(backward_s, times.input_gradient_s + times.recompute_s)
        share = recipe.micro_batches / recipe.pipeline
        each = (share * (times.forward_s + backward_s), times.forward_s + first_s)
        return ROUNDING * max(float(counts @ part) for part in each)

    def least_times(self, recipe: Execution, pipes: tuple[Pipe, ...]) -> Floats:
        """Return bound 2 of the module's docstring for each pipeline, in seconds, [pipes].

        The pipelines have the same number of ranks, and replace the recipe's pipeline.
        """
        times, layers, groups = self._times_of(recipe), self.layers(recipe), self.groups(recipe)
        places = self._places(recipe, pipes)
        send_s = send_time(layers, recipe, groups)
        seconds = path_times(times, places, send_s, recipe.micro_batches)
        heaviest = (places.counts @ (times.dense + times.expert)).argmax(axis=1)
        counts = places.counts[np.arange(len(pipes)), heaviest]
        loads = [load_of(each, times) for each in counts.tolist()]
        ends_s = [sum(end_times(load, recipe, groups, self.cluster).values()) for load in loads]
        return ROUNDING * (seconds + ends_s)

    def _places(self, recipe: Execution, pipes: tuple[Pipe, ...]) -> Places:
        return places_of(tuple(self.layers(recipe)), self.counted.blocks, pipes)

    def _times_of(self, recipe: Execution) -> LayerTimes:
        """Return the times of the layer classes under a recipe.

        Recipes share these times if they differ only in the pipeline, or in a sharding that does not change the times.
        """
        shards = (recipe.zero, recipe.replicas, recipe.zero_group) if recipe.reduces_each else ()
        counts = recipe.runtime.overlap_expert and recipe.expert > 1
        turns = recipe.micro_batches if counts else recipe.micro_batches > 1
        key = (*_layout_of(recipe), recipe.recompute, recipe.offload, turns, shards)
        if key not in self._times:
            self._times[key] = layer_times(self.layers(recipe), recipe, self.groups(recipe), self.cluster)
        return self._times[key]

    def _counts_of(self, names: Iterable[str]) -> Floats:
        """Return the number of layers of each class in `names` in the whole model, [classes]."""
        return np.array([1.0 if name in (BEFORE, AFTER) else self.counted.blocks.count(name) for name in names])


def _layout_of(recipe: Execution) -> tuple[object, ...]:
    """Return the fields of a recipe that decide the kernels of each layer class, as a key for prices.

    Recomputation is not among these fields. All other fields have the same values in a search, or do not change
    kernels.
    """
    ranks = (recipe.tensor, recipe.sequence_parallel, recipe.context, recipe.expert, recipe.expert_tensor)
    return (*ranks, recipe.micro_batch)
