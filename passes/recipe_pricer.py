"""Price many recipes of one model on one cluster, and bound what they take; what recipes share is found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.schedule_orders import most_in_flight
from cost_models.step import StepModel, fitted
from cost_models.topology import GroupLinks
from passes.bound_recipes import (
    Floats,
    PipeShapes,
    SectionFloors,
    memory_floors,
    path_floors,
    pipe_shapes,
    rank_paths,
    section_floors,
    step_floors,
    whole_bytes,
)
from passes.fold_program import AFTER, BEFORE
from passes.pipeline_stages import Stage, schedule_name, share_out
from passes.price_memory import memory_price, state_bytes
from passes.price_model import CountedModel
from passes.price_recipe import (
    EndWork,
    Groups,
    accumulation_bytes,
    end_work,
    recipe_groups,
    send_time,
    sharded_time,
    step_price,
)
from passes.price_sections import SectionPrice
from passes.recipe_space import Pipe

_GATHERS = 3
"""The ZeRO stage that gathers parameters for each micro-batch."""


@dataclass
class RecipePricer:
    """What recipes of a model take on a cluster; what they share is found once.

    Args:
        counted: the model.
        cluster: the cluster.
        model: of the step; default: the fitted one.
    """

    counted: CountedModel
    cluster: Cluster
    model: StepModel = field(default_factory=fitted)
    _groups: dict[tuple[object, ...], Groups] = field(default_factory=dict)
    _floors: dict[tuple[object, ...], SectionFloors] = field(default_factory=dict)
    _sections: dict[tuple[object, ...], Mapping[str, SectionPrice]] = field(default_factory=dict)
    _sharded: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], EndWork] = field(default_factory=dict)
    _names: dict[tuple[str, ...], Floats] = field(default_factory=dict)

    def groups(self, recipe: Recipe) -> Groups:
        """The groups of a recipe."""
        shape = (recipe.pipeline, recipe.data, recipe.context, recipe.tensor)
        key = (*shape, recipe.expert, recipe.expert_tensor, recipe.zero_group)
        if key not in self._groups:
            self._groups[key] = recipe_groups(recipe, self.cluster)
        return self._groups[key]

    def sections(self, recipe: Recipe) -> Mapping[str, SectionPrice]:
        """The prices of a recipe's sections."""
        key = _layout_of(recipe)
        if key not in self._sections:
            self._sections[key] = self.counted.section_prices(recipe, self.cluster)
        return self._sections[key]

    def stages(self, recipe: Recipe) -> tuple[Stage, ...]:
        """A recipe's stages."""
        return share_out(self.counted.blocks, recipe)

    def time_s(self, recipe: Recipe) -> float:
        """The step of a recipe, as `recipe_plan.predict_recipe` has it."""
        sections, stages = self.sections(recipe), self.stages(recipe)
        return step_price(sections, stages, recipe, self.groups(recipe), self.cluster, self.model).time_s

    def memory_bytes(self, recipe: Recipe) -> int:
        """The memory of a recipe's fullest rank, likewise."""
        held = (1.0,)
        if recipe.pipeline > 1:
            numbers = (recipe.pipeline, recipe.micro_batches, recipe.virtual_stages)
            counts = most_in_flight(schedule_name(recipe), *numbers)
            held = tuple(each / recipe.virtual_stages for each in counts)
        return memory_price(self.sections(recipe), self.stages(recipe), recipe, self.groups(recipe), held).total

    def largest_bytes(self, recipe: Recipe) -> int:
        """The largest value that a recipe's layout makes: a rank has twice that, beside all else."""
        return max(price.largest_bytes for price in self.sections(recipe).values())

    def state_floor(self, recipe: Recipe) -> float:
        """Bound on the memory of a recipe: parameters, gradients and state on the mean of pipeline ranks."""
        groups, counts = self.groups(recipe), self._counts(recipe)
        prices = list(self.sections(recipe).values())
        dense = counts @ np.array([price.parameters for price in prices])
        expert = counts @ np.array([price.expert_parameters for price in prices])
        pairs = ((dense, groups.zero.size), (expert, groups.expert_replicas.size))
        states = sum(elements * sum(state_bytes(1.0, shards, recipe).values()) for elements, shards in pairs)
        return float(whole_bytes(np.array(states / recipe.pipeline)))

    def layout_floor(self, first: Recipe, last: Recipe) -> float:
        """Bound on the step of all recipes of a layout, of which two have the fewest and the most pipeline ranks.

        A micro-batch takes longer if it is not the only one (gradients are added up), and then less the more there are
        (experts' all-to-alls run beside others): the least is at one of the ends. Where parameters are gathered, adding
        up may take less.
        """
        recipes = [first, last]
        gathering = [replace(recipe, zero=_GATHERS, whole_tensors=False) for recipe in recipes]
        for price in self.sections(first).values():
            pairs = zip(gathering, recipes, strict=False)
            if any(accumulation_bytes(price, one) < accumulation_bytes(price, two) for one, two in pairs):
                return min(self.mean_floor(recipe, gathers=False) for recipe in (*recipes, *gathering))
        return min(self.mean_floor(recipe, gathers=False) for recipe in recipes)

    def mean_floor(self, recipe: Recipe, *, gathers: bool = True) -> float:
        """Bound on the step of a recipe under any schedule, before the ends: the mean of ranks, gathers, latency."""
        floors, counts = self._section_floors(recipe, gathers=False), self._counts(recipe)
        gathers_s = self._gathers(recipe) if gathers and recipe.zero == _GATHERS else np.zeros((2, len(counts)))
        turns = recipe.micro_batches / recipe.pipeline
        forward, backward = turns * counts * floors.forward, turns * counts * floors.backward
        forward_gain, backward_gain = turns * counts * floors.forward_gain, turns * counts * floors.backward_gain
        gathered, again = turns * counts * gathers_s

        latency, latency_gain = float(counts @ (floors.work - floors.late)), float(counts @ floors.gain)

        def at(shares: Floats) -> Floats:
            share = shares[0]
            busy = np.maximum(forward - share * forward_gain, gathered)
            busy += np.maximum(backward - share * backward_gain, again)
            return np.array([max(busy.sum(), latency - share * latency_gain) + self.model.step_overhead_s])

        return float(step_floors(at, turns * float(counts @ floors.products), self.cluster)[0])

    def _gathers(self, recipe: Recipe) -> Floats:
        """Seconds of gathering sections' parameters in the forward, and again with reducing after, [2, sections]."""
        key = (recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.replicas, recipe.zero_group)
        if key not in self._sharded:
            groups = self.groups(recipe)
            times = [
                sharded_time(price, recipe, groups, self.cluster, self.model)
                for price in self.sections(recipe).values()
            ]
            self._sharded[key] = np.array(times).T
        return self._sharded[key]

    def path_floors(self, recipes: Sequence[Recipe], pipes: Sequence[Pipe]) -> Floats:
        """Bounds on the step of recipes that differ in sharding, with each pipeline: longest paths and their ends."""
        recipe = recipes[0]
        floors, shapes = self._section_floors(recipe), self._shapes(recipe, tuple(pipes))
        send_s = send_time(self.sections(recipe), recipe, self.groups(recipe), self.model)
        paths = rank_paths(floors, shapes, recipe.micro_batches, send_s, overlaps=recipe.overlap_pipeline)

        def work_of(dense: float, expert: float, tensors: int) -> list[EndWork]:
            return [self._end_work(dense, expert, tensors, each) for each in recipes]

        return path_floors(floors, shapes, paths, send_s, recipe, work_of, self.cluster, self.model)

    def _end_work(self, dense: float, expert: float, tensors: int, recipe: Recipe) -> EndWork:
        shape = (recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.replicas, recipe.zero, recipe.zero_group)
        key = (dense, expert, tensors, *shape)
        if key not in self._ends:
            groups = self.groups(recipe)
            self._ends[key] = end_work(dense, expert, tensors, recipe, groups, self.cluster, self.model)
        return self._ends[key]

    def memory_floors(self, recipe: Recipe, pipes: Sequence[Pipe]) -> Floats:
        """Bounds on the memory of a recipe with each of some pipelines of its size."""
        shapes = self._shapes(recipe, tuple(pipes))
        return memory_floors(self.sections(recipe), shapes, recipe, self.groups(recipe))

    def _section_floors(self, recipe: Recipe, *, gathers: bool = True) -> SectionFloors:
        """What sections take: the same whatever the pipeline and, unless parameters are gathered, the sharding."""
        is_gathered = recipe.zero == _GATHERS
        shards = (recipe.replicas, recipe.zero_group) if is_gathered and gathers else is_gathered
        turns = recipe.micro_batches if recipe.overlap_expert and recipe.expert > 1 else recipe.micro_batches > 1
        key = (_layout_of(recipe), recipe.recompute, turns, shards)
        if key not in self._floors:
            sections, groups = self.sections(recipe), self.groups(recipe)
            if not gathers:
                groups = replace(groups, zero=self._alone, outer=self._alone)
            self._floors[key] = section_floors(sections, recipe, groups, self.cluster, self.model)
        return self._floors[key]

    @cached_property
    def _alone(self) -> GroupLinks:
        """A group of one rank."""
        return recipe_groups(Recipe(data=self.cluster.size), self.cluster).tensor

    def _shapes(self, recipe: Recipe, pipes: tuple[Pipe, ...]) -> PipeShapes:
        """Where sections lie in pipelines."""
        return pipe_shapes(tuple(self.sections(recipe)), self.counted.blocks, pipes)

    def _counts(self, recipe: Recipe) -> Floats:
        """How often the model has each section."""
        names = tuple(self.sections(recipe))
        if names not in self._names:
            held = [BEFORE, *self.counted.blocks, AFTER]
            self._names[names] = np.array([float(held.count(name)) for name in names])
        return self._names[names]


def _layout_of(recipe: Recipe) -> tuple[object, ...]:
    """What of a recipe decides what its sections do, but for recomputation; all else is alike in a search."""
    ranks = (recipe.tensor, recipe.sequence_parallel, recipe.context, recipe.expert, recipe.expert_tensor)
    return (*ranks, recipe.micro_batch)
