"""Price many recipes of one model on one cluster, and bound what they take; what recipes share is found once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from cost_models.topology import GroupLinks
from passes.recipe_search.bound_memory import (
    ParameterBytes,
    Passing,
    SectionParameters,
    layout_memory_floors,
    memory_floors,
    parameter_bytes,
    passing_bytes,
    section_parameters,
)
from passes.recipe_search.bound_recipes import SectionFloors, mean_floors, path_floors, section_floor
from passes.recipe_search.known_pipes import Pipe, PipeSet
from passes.recipe_search.pipe_shapes import Floats, PipeShapes, held_by, pipe_shapes
from passes.recipe_search.recipe_space import Keeping
from passes.recipes.pipeline_stages import Stage, in_flight, share_out
from passes.recipes.price_ends import EndWork, end_work
from passes.recipes.price_memory import host_bytes, memory_price
from passes.recipes.price_recipe import (
    SectionPasses,
    Step,
    section_passes,
    send_time,
    sharded_time,
)
from passes.recipes.recipe_groups import Groups, recipe_groups, shard_ranks
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import CountedModel
from passes.sections.price_sections import EXPERT, SectionPrice, SectionSizes

_GATHERS = 3
"""The ZeRO stage that gathers parameters for each micro-batch."""


@dataclass
class RecipePricer:
    """What recipes of a model take on a cluster; what they share is found once.

    Args:
        counted: the model.
        cluster: the cluster.
    """

    counted: CountedModel
    cluster: Cluster
    _groups: dict[tuple[object, ...], Groups] = field(default_factory=dict)
    _floors: dict[tuple[object, ...], SectionFloors] = field(default_factory=dict)
    _sections: dict[tuple[object, ...], Mapping[str, SectionPrice]] = field(default_factory=dict)
    _sizes: dict[tuple[object, ...], Mapping[str, SectionSizes]] = field(default_factory=dict)
    _single: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], SectionPasses] = field(default_factory=dict)
    _parameters: dict[tuple[object, ...], ParameterBytes] = field(default_factory=dict)
    _sharded: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    _passing: dict[tuple[object, ...], Passing] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], EndWork] = field(default_factory=dict)
    _names: dict[tuple[str, ...], Floats] = field(default_factory=dict)
    _times: dict[Execution, float] = field(default_factory=dict)
    _bytes: dict[Execution, int] = field(default_factory=dict)

    def groups(self, recipe: Execution) -> Groups:
        """The groups of a recipe."""
        shape = (recipe.pipeline, recipe.data, recipe.context, recipe.tensor)
        key = (*shape, recipe.expert, recipe.expert_tensor, recipe.zero_group)
        if key not in self._groups:
            self._groups[key] = recipe_groups(recipe, self.cluster)
        return self._groups[key]

    def sections(self, recipe: Execution) -> Mapping[str, SectionPrice]:
        """The prices of a recipe's sections."""
        key = _layout_of(recipe)
        if key not in self._sections:
            self._sections[key] = self.counted.section_prices(recipe, self.cluster)
        return self._sections[key]

    def stages(self, recipe: Execution) -> tuple[Stage, ...]:
        """A recipe's stages."""
        return share_out(self.counted.blocks, recipe)

    def time_s(self, recipe: Execution) -> float:
        """The step of a recipe, as `recipe_plan.predict_recipe` has it."""
        if recipe not in self._times:
            sections, stages = self.sections(recipe), self.stages(recipe)
            step = Step(sections, stages, recipe, self.groups(recipe), self.cluster)
            self._times[recipe] = step.time_s()
        return self._times[recipe]

    def memory_bytes(self, recipe: Execution) -> int:
        """The memory of a recipe's fullest rank, likewise."""
        if recipe not in self._bytes:
            sections, stages = self.sections(recipe), self.stages(recipe)
            price = memory_price(sections, stages, recipe, self.groups(recipe), in_flight(recipe))
            self._bytes[recipe] = price.total
        return self._bytes[recipe]

    def fits(self, recipe: Execution, memory_limit: float) -> bool:
        """Whether a recipe fits in so much memory, and what it offloads in the device's share of its host's."""
        if self.memory_bytes(recipe) > memory_limit:
            return False
        share = self.cluster.host_bytes_per_device
        if recipe.offload != "activations" or share is None:
            return True
        return host_bytes(self.sizes(recipe), self.stages(recipe), recipe, in_flight(recipe)) <= share

    def sizes(self, recipe: Execution) -> Mapping[str, SectionSizes]:
        """What a recipe's sections keep and hold; found without their prices."""
        key = _layout_of(recipe)
        if key not in self._sizes:
            self._sizes[key] = self.counted.section_sizes(recipe, self.cluster)
        return self._sizes[key]

    def workspace_bytes(self, recipe: Execution) -> int:
        """The largest workspace of a recipe's layout: a rank has it, beside all else."""
        return max(size.workspace_bytes for size in self.sizes(recipe).values())

    def layout_memory_floors(self, first: Execution, most: int, keepings: Sequence[Keeping], *, zero: int) -> Floats:
        """Bounds on the memory of all recipes of a layout, with the pipeline ranks of the first or more, to `most`.

        `zero`: the ZeRO stage that shards most of those that they may have.
        """
        sizes, least = self.sizes(first), replace(first, recompute="full")
        copies, shared = (self._parameter_bytes(zero, shards, least).state for shards in (math.inf, 1))
        shares = np.array([first.tensor, first.expert * first.expert_tensor]) / first.devices
        parameters = copies + (shared - copies) * most * shares
        return layout_memory_floors(sizes, self._counts_of(tuple(sizes)), most, parameters, keepings)

    def _section_parameters(self, recipes: Sequence[Execution]) -> SectionParameters:
        """What recipes that differ in sharding hold for parameters on each rank."""
        shardings = [self._sharded_bytes(recipe) for recipe in recipes]
        return section_parameters(self.sizes(recipes[0]), shardings, [recipe.zero == _GATHERS for recipe in recipes])

    def _sharded_bytes(self, recipe: Execution) -> tuple[ParameterBytes, ParameterBytes]:
        """What a rank holds for each parameter, and for each of experts."""
        dense, expert = (self._parameter_bytes(recipe.zero, shards, recipe) for shards in shard_ranks(recipe))
        return dense, expert

    def _parameter_bytes(self, zero: int, shards: float, recipe: Execution) -> ParameterBytes:
        """The same under a ZeRO stage over so many ranks; all else is alike in a search."""
        key = (zero, shards, recipe.offload, recipe.recompute, recipe.micro_batches > 1)
        if key not in self._parameters:
            self._parameters[key] = parameter_bytes(shards, replace(recipe, zero=zero))
        return self._parameters[key]

    def layout_floor(self, first: Execution, most: int) -> float:
        """Bound on the step of all recipes of a layout that have the pipeline ranks of the first or more, to `most`.

        Experts' all-to-alls that run beside other micro-batches take less the more there are: the least is at one end.
        """
        ends = [first]
        if first.runtime.overlap_expert and first.expert > 1:
            data = first.pipeline * first.data // most
            ends.append(replace(first, pipeline=most, data=data, schedule=None))
        return min(float(self.mean_floors([each])[0]) for each in ends)

    def mean_floors(self, recipes: Sequence[Execution]) -> Floats:
        """Bounds on the step of recipes that differ in sharding, before the ends, with what they gather, [recipes]."""
        by_zero = {recipe.zero: recipe for recipe in recipes}  # all that counts without what is gathered
        alone = {zero: self.section_floors(recipe, gathers=False) for zero, recipe in by_zero.items()}
        floors, exchanges = [alone[recipe.zero] for recipe in recipes], list(map(self.exchanges, recipes))
        return mean_floors(floors, exchanges, self._counts(recipes[0]), recipes[0])

    def exchanges(self, recipe: Execution) -> Floats:
        """Seconds in which a micro-batch gathers parameters, and again with reducing gradients, [2, sections]."""
        sections = self.sections(recipe).values()
        if not recipe.reduces_each:
            return np.zeros((2, len(sections)))
        shape = (recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.replicas)
        key = (*shape, recipe.zero, recipe.zero_group)
        if key not in self._sharded:
            parts = (recipe, self.groups(recipe), self.cluster)
            self._sharded[key] = np.array([sharded_time(price, *parts) for price in sections]).T
        return self._sharded[key]

    def path_floors(
        self, recipes: Sequence[Execution], pipes: PipeSet, mask: NDArray[np.bool_] | None = None
    ) -> Floats:
        """Bounds on the step of recipes that differ in sharding, with each pipeline that a mask leaves.

        They are those of longest paths and their ends.
        """
        shapes = self._shapes(recipes[0], pipes)
        return self._path_floors(recipes, shapes if mask is None else shapes.where(mask))

    def recipe_floors(self, recipes: Sequence[Execution], pipe: Pipe) -> Floats:
        """The same of each of some recipes that differ in sharding, and whose pipeline is `pipe`, [recipes]."""
        return self._path_floors(recipes, self._shapes(recipes[0], PipeSet([pipe])), apart=True)

    def _path_floors(self, recipes: Sequence[Execution], shapes: PipeShapes, *, apart: bool = False) -> Floats:
        recipe = recipes[0]
        floors = self.section_floors(recipe)
        send_s = send_time(self.sections(recipe), recipe, self.groups(recipe))

        def work_of(dense: float, expert: float) -> list[EndWork]:
            return [self.end_work(dense, expert, each) for each in recipes]

        return path_floors(floors, shapes, send_s, recipe, work_of, apart=apart)

    def end_work(self, dense: float, expert: float, recipe: Execution) -> EndWork:
        """What a rank with so many parameters does once per step."""
        shape = (recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.replicas, recipe.zero, recipe.zero_group)
        key = (dense, expert, recipe.reduces_each, recipe.micro_batches > 1, *shape)
        if key not in self._ends:
            groups = self.groups(recipe)
            self._ends[key] = end_work(dense, expert, recipe, groups, self.cluster)
        return self._ends[key]

    def memory_floors(self, recipes: Sequence[Execution], pipes: PipeSet) -> Floats:
        """Bounds on the memory of recipes that differ in sharding, with each of some pipelines, [recipes, pipes]."""
        first = recipes[0]
        if not pipes:
            return np.empty((len(recipes), 0))
        shapes = self._shapes(first, pipes)
        return memory_floors(shapes, self._section_parameters(recipes), self._passing_bytes(first, shapes))

    def _passing_bytes(self, recipe: Execution, shapes: PipeShapes) -> Passing:
        """What ranks hold but for parameters and their state, with each of some pipelines, [pipes, ranks]."""
        key = (_layout_of(recipe), recipe.recompute, recipe.offload, shapes.pipes)
        if key not in self._passing:
            held = held_by(shapes.pipes, recipe.micro_batches)
            self._passing[key] = passing_bytes(self.sizes(recipe), shapes.counts, shapes.present, held, recipe)
        return self._passing[key]

    def section_floors(self, recipe: Execution, *, gathers: bool = True) -> SectionFloors:
        """What sections take: the same whatever the pipeline and, unless each micro-batch exchanges, the sharding."""
        stage = recipe.zero if recipe.reduces_each else 0
        shards = (stage, recipe.replicas, recipe.zero_group) if stage and gathers else stage
        counts = recipe.runtime.overlap_expert and recipe.expert > 1
        turns = recipe.micro_batches if counts else recipe.micro_batches > 1
        keeping = (recipe.recompute, recipe.offload)
        key = (_layout_of(recipe), keeping, turns, shards)
        if key not in self._floors:
            groups = self.groups(recipe)
            if not gathers:
                groups = replace(groups, zero=self._alone, outer=self._alone, expert_replicas=self._alone)
            rest = (recipe.tensor, recipe.context, turns, shards, gathers)
            floors = [
                self._section_floor(price, name, recipe, groups, keeping, rest)
                for name, price in self.sections(recipe).items()
            ]
            self._floors[key] = SectionFloors(*np.array(floors).T)
        return self._floors[key]

    def _section_floor(
        self,
        price: SectionPrice,
        name: str,
        recipe: Execution,
        groups: Groups,
        keeping: tuple[str, str],
        rest: tuple[object, ...],
    ) -> tuple[float, ...]:
        """One of them: the same under all layouts that price the section alike, whose groups it uses."""
        experts = (recipe.expert, recipe.expert_tensor) if price.expert_parameters or _exchanges(price) else ()
        is_block = name not in (BEFORE, AFTER)
        alike = (price, experts, *rest)
        key = (alike, is_block, keeping if is_block else ())
        if key not in self._single:
            if alike not in self._passes:
                self._passes[alike] = section_passes(price, recipe, groups, self.cluster)
            self._single[key] = section_floor(
                price, self._passes[alike], recipe, groups, self.cluster, is_block=is_block
            )
        return self._single[key]

    @cached_property
    def _alone(self) -> GroupLinks:
        """A group of one rank."""
        return recipe_groups(Execution(data=self.cluster.size), self.cluster).tensor

    def _shapes(self, recipe: Execution, pipes: PipeSet) -> PipeShapes:
        """Where sections lie in pipelines."""
        return pipe_shapes(tuple(self.sections(recipe)), self.counted.blocks, pipes)

    def _counts(self, recipe: Execution) -> Floats:
        """How often the model has each section."""
        return self._counts_of(tuple(self.sections(recipe)))

    def _counts_of(self, names: tuple[str, ...]) -> Floats:
        """How often the model has each of some sections."""
        if names not in self._names:
            held = [BEFORE, *self.counted.blocks, AFTER]
            self._names[names] = np.array([float(held.count(name)) for name in names])
        return self._names[names]


def _layout_of(recipe: Execution) -> tuple[object, ...]:
    """What of a recipe decides what its sections do, but for recomputation; all else is alike in a search."""
    ranks = (recipe.tensor, recipe.sequence_parallel, recipe.context, recipe.expert, recipe.expert_tensor)
    return (*ranks, recipe.micro_batch)


def _exchanges(price: SectionPrice) -> bool:
    """Whether a section sends anything to experts."""
    return any(item.axis == EXPERT for phase in (price.forward, price.backward) for item in phase.traffic)
