"""Price many recipes of one model on one cluster, and bound what they take; what recipes share is found once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import LayerPrice
from passes.search.layers.price_model import CountedModel
from passes.search.pipeline_stages import Floats, Stage, in_flight, share_out
from passes.search.price_ends import EndLoad, end_times
from passes.search.price_memory import held_bytes, host_bytes, memory_parts, memory_price
from passes.search.price_recipe import Step, send_time
from passes.search.recipe_bounds import (
    ROUNDING,
    LayerTable,
    Places,
    held_by,
    layer_table,
    path_times,
    places_of,
)
from passes.search.recipe_groups import Groups, recipe_groups
from passes.search.recipe_space import Pipe


@dataclass
class RecipePricer:
    """Times and memory of recipes of a model on a cluster. All fields that a search does not choose are alike in them.

    Args:
        counted: the model.
        cluster: the cluster.
    """

    counted: CountedModel
    cluster: Cluster
    _groups: dict[tuple[object, ...], Groups] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], LayerTable] = field(default_factory=dict)
    _layers: dict[tuple[object, ...], Mapping[str, LayerPrice]] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], float] = field(default_factory=dict)
    _counts: dict[tuple[str, ...], Floats] = field(default_factory=dict)

    def groups(self, recipe: Execution) -> Groups:
        """The groups of a recipe."""
        shape = (recipe.pipeline, recipe.data, recipe.context, recipe.tensor)
        key = (*shape, recipe.expert, recipe.expert_tensor, recipe.zero_group)
        if key not in self._groups:
            self._groups[key] = recipe_groups(recipe, self.cluster)
        return self._groups[key]

    def layers(self, recipe: Execution) -> Mapping[str, LayerPrice]:
        """The prices of a recipe's layer classes."""
        key = _layout_of(recipe)
        if key not in self._layers:
            self._layers[key] = self.counted.layer_prices(recipe, self.cluster)
        return self._layers[key]

    def stages(self, recipe: Execution) -> tuple[Stage, ...]:
        """A recipe's stages."""
        return share_out(self.counted.blocks, recipe)

    def time_s(self, recipe: Execution) -> float:
        """The step of a recipe, as `recipe_plan.predict_recipe` has it."""
        parts = (self.layers(recipe), self.stages(recipe), recipe, self.groups(recipe), self.cluster)
        return Step(*parts).time_s

    def memory_bytes(self, recipe: Execution) -> int:
        """The memory of a recipe's fullest rank, likewise."""
        parts = (self.layers(recipe), self.stages(recipe), recipe, self.groups(recipe))
        return memory_price(*parts, in_flight(recipe)).total

    def memory_floors(self, recipe: Execution, pipes: tuple[Pipe, ...]) -> Floats:
        """The memory of a recipe in each of some pipelines of as many ranks, [pipes], but for whole bytes."""
        held = held_bytes(self.layers(recipe), recipe, self.groups(recipe))
        parts = memory_parts(held, self._places(recipe, pipes).counts, held_by(pipes, recipe.micro_batches))
        return np.sum(list(parts.values()), axis=0).max(axis=1) - len(parts)

    def fits(self, recipe: Execution, memory_limit: float) -> bool:
        """Whether a recipe fits in so much memory, and what it offloads in the device's share of its host's."""
        if self.memory_bytes(recipe) > memory_limit:
            return False
        share = self.cluster.host_bytes_per_device
        if recipe.offload != "activations" or share is None:
            return True
        return host_bytes(self.layers(recipe), self.stages(recipe), recipe, in_flight(recipe)) <= share

    def workspace_bytes(self, recipe: Execution) -> int:
        """The largest workspace of a recipe's layout: a rank has it, beside all else."""
        return max(size.workspace_bytes for size in self.layers(recipe).values())

    def least_memory(self, last: Execution) -> float:
        """Bound on the memory of all recipes of a layout and activation policy, bytes: the mean of ranks.

        A rank holds at least one micro-batch, the state of its parameters, and the workspace of one layer class. The
        recipe `last` has the most pipeline ranks that they may have, and the ZeRO stage that shards most.
        """
        layers = self.layers(last)
        held = held_bytes(layers, last, self.groups(last))
        each = held.kept + held.parameters + held.gradients + held.state
        mean = float(self._counts_of(tuple(layers)) @ each) / last.pipeline
        return ROUNDING * (mean + float(held.workspace.min())) - len(held)

    def least_time(self, recipe: Execution) -> float:
        """Bound on the step of a recipe in any pipeline: the mean of ranks, and a micro-batch's latency."""
        table = self._table(recipe)
        counts = self._counts_of(tuple(self.layers(recipe)))
        share = recipe.micro_batches / recipe.pipeline
        forward, backward, first = (float(counts @ values) for values in table[:3])
        return ROUNDING * max(share * (forward + backward), forward + first)

    def least_times(self, recipe: Execution, pipes: tuple[Pipe, ...]) -> Floats:
        """Bounds on the step of a recipe in each of some pipelines of as many ranks: paths of ranks, with ends."""
        table, layers, groups = self._table(recipe), self.layers(recipe), self.groups(recipe)
        places = self._places(recipe, pipes)
        send_s = send_time(layers, recipe, groups)
        seconds = path_times(table, places, send_s, recipe.micro_batches)
        heaviest = (places.counts @ (table.dense + table.expert)).argmax(axis=1)
        counts = places.counts[np.arange(len(pipes)), heaviest]
        seconds = seconds + [self._end_s(tuple(each), table, recipe, groups) for each in counts.tolist()]
        return ROUNDING * seconds

    def _places(self, recipe: Execution, pipes: tuple[Pipe, ...]) -> Places:
        return places_of(tuple(self.layers(recipe)), self.counted.blocks, pipes)

    def _end_s(self, counts: tuple[float, ...], table: LayerTable, recipe: Execution, groups: Groups) -> float:
        """Seconds of the ends of a rank that has layer classes so often."""
        forward, backward, _, dense, expert = (float(np.dot(counts, values)) for values in table)
        load = EndLoad(dense, expert, forward, backward)
        key = (load, recipe.zero, recipe.zero_group, recipe.pipeline, *_layout_of(recipe))
        if key not in self._ends:
            self._ends[key] = sum(end_times(load, recipe, groups, self.cluster).values())
        return self._ends[key]

    def _table(self, recipe: Execution) -> LayerTable:
        """The same whatever the pipeline and, unless each micro-batch exchanges, the sharding."""
        shards = (recipe.zero, recipe.replicas, recipe.zero_group) if recipe.reduces_each else ()
        counts = recipe.runtime.overlap_expert and recipe.expert > 1
        turns = recipe.micro_batches if counts else recipe.micro_batches > 1
        key = (*_layout_of(recipe), recipe.recompute, recipe.offload, turns, shards)
        if key not in self._tables:
            parts = (recipe, self.groups(recipe), self.cluster)
            self._tables[key] = layer_table(self.layers(recipe), *parts)
        return self._tables[key]

    def _counts_of(self, names: tuple[str, ...]) -> Floats:
        """How often the model has each of some layer classes."""
        if names not in self._counts:
            held = [BEFORE, *self.counted.blocks, AFTER]
            self._counts[names] = np.array([float(held.count(name)) for name in names])
        return self._counts[names]


def _layout_of(recipe: Execution) -> tuple[object, ...]:
    """The fields that decide the work of layer classes, but for recomputation; all others are alike in a search."""
    ranks = (recipe.tensor, recipe.sequence_parallel, recipe.context, recipe.expert, recipe.expert_tensor)
    return (*ranks, recipe.micro_batch)
