"""Price many recipes of one model on one cluster, and bound what they take; what recipes share is found once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.schedule_orders import most_in_flight
from cost_models.step import StepModel, fitted
from cost_models.topology import GroupLinks
from passes.recipe_search.bound_boundaries import (
    Boundaries,
    StageLoads,
    fastest_boundaries,
    smallest_boundaries,
    stage_loads,
    uneven_floor,
)
from passes.recipe_search.bound_memory import (
    ParameterBytes,
    Passing,
    PipeRanks,
    SectionParameters,
    layout_memory_floors,
    memory_floors,
    parameter_bytes,
    passing_bytes,
    pipe_ranks,
    rank_floors,
    section_parameters,
    uneven_memory_floors,
)
from passes.recipe_search.bound_ranks import Turns, WholeBlocks, mean_floors, turns_within, whole_blocks
from passes.recipe_search.bound_recipes import (
    Floats,
    SectionFloor,
    SectionFloors,
    path_floors,
    rank_paths,
    section_floor,
    stack_floors,
)
from passes.recipe_search.known_pipes import Pipe, PipeSet, schedule_of
from passes.recipe_search.pipe_shapes import PipeShapes, held_by, pipe_shapes
from passes.recipe_search.recipe_space import Keeping, divisors
from passes.recipes.pipeline_stages import Stage, in_flight, share_out
from passes.recipes.price_ends import EndWork, end_work
from passes.recipes.price_memory import host_bytes, memory_price
from passes.recipes.price_recipe import (
    SectionPasses,
    Step,
    accumulation_bytes,
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

Kind = tuple[Recipe, tuple[int | None, ...]]
"""Recipes that differ in what ZeRO shards over: that which shards most, and all sizes of groups (`zero_group`)."""


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
    _sizes: dict[tuple[object, ...], Mapping[str, SectionSizes]] = field(default_factory=dict)
    _single: dict[tuple[object, ...], SectionFloor] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], SectionPasses] = field(default_factory=dict)
    _adds_faster: dict[tuple[int, bool], bool] = field(default_factory=dict)
    _parameters: dict[tuple[object, ...], ParameterBytes] = field(default_factory=dict)
    _sharded: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    _passing: dict[tuple[object, ...], Passing] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], EndWork] = field(default_factory=dict)
    _names: dict[tuple[str, ...], Floats] = field(default_factory=dict)
    _times: dict[Recipe, float] = field(default_factory=dict)
    _bytes: dict[Recipe, int] = field(default_factory=dict)

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
        if recipe not in self._times:
            sections, stages = self.sections(recipe), self.stages(recipe)
            step = Step(sections, stages, recipe, self.groups(recipe), self.cluster, self.model)
            self._times[recipe] = step.at_its_clock().time_s()
        return self._times[recipe]

    def memory_bytes(self, recipe: Recipe) -> int:
        """The memory of a recipe's fullest rank, likewise."""
        if recipe not in self._bytes:
            sections, stages = self.sections(recipe), self.stages(recipe)
            price = memory_price(sections, stages, recipe, self.groups(recipe), in_flight(recipe))
            self._bytes[recipe] = price.total
        return self._bytes[recipe]

    def fits(self, recipe: Recipe, memory_limit: float) -> bool:
        """Whether a recipe fits in so much memory, and what it offloads in the device's share of its host's."""
        if self.memory_bytes(recipe) > memory_limit:
            return False
        share = self.cluster.host_bytes_per_device
        if recipe.offload != "activations" or share is None:
            return True
        return host_bytes(self.sizes(recipe), self.stages(recipe), recipe, in_flight(recipe)) <= share

    def sizes(self, recipe: Recipe) -> Mapping[str, SectionSizes]:
        """What a recipe's sections keep and hold; found without their prices."""
        key = _layout_of(recipe)
        if key not in self._sizes:
            self._sizes[key] = self.counted.section_sizes(recipe, self.cluster)
        return self._sizes[key]

    def workspace_bytes(self, recipe: Recipe) -> int:
        """The largest workspace of a recipe's layout: a rank has it, beside all else."""
        return max(size.workspace_bytes for size in self.sizes(recipe).values())

    def layout_memory_floors(
        self, first: Recipe, most: int, keepings: Sequence[Keeping], *, zero: int, uneven: bool
    ) -> Floats:
        """Bounds on the memory of all recipes of a layout, with the pipeline ranks of the first or more, to `most`.

        `zero`: the ZeRO stage that shards most of those that they may have; `uneven`: whether blocks may be shared out
        unevenly.
        """
        ranks, sizes = self._pipe_ranks(first, most), self.sizes(first)
        least = replace(first, recompute="full")
        copies, shared = (np.array(self._parameter_bytes(zero, shards, least)) for shards in (math.inf, 1))
        shares = np.array([first.tensor, first.expert * first.expert_tensor]) / first.devices
        parameters = copies + (shared - copies) * (ranks.sizes[:, None] * shares)[..., None]
        whole = self._counts_of(tuple(sizes)) if uneven else None
        return layout_memory_floors(sizes, ranks, first, parameters, keepings, whole=whole)

    def _pipe_ranks(self, first: Recipe, most: int) -> PipeRanks:
        """The ranks of the pipelines of a layout, with those of the first or more, to `most`."""
        pipes = tuple(
            size
            for size in divisors(first.pipeline * first.data)
            if first.pipeline <= size <= most and size <= len(self.counted.blocks) + 2
        )
        return pipe_ranks(tuple(self.sizes(first)), self.counted.blocks, pipes)

    def _section_parameters(self, recipes: Sequence[Recipe]) -> SectionParameters:
        """What recipes that differ in sharding hold for parameters on each rank."""
        shardings = [self._sharded_bytes(recipe) for recipe in recipes]
        return section_parameters(self.sizes(recipes[0]), shardings, [recipe.zero == _GATHERS for recipe in recipes])

    def _sharded_bytes(self, recipe: Recipe) -> tuple[ParameterBytes, ParameterBytes]:
        """What a rank holds for each parameter, and for each of experts."""
        dense, expert = (self._parameter_bytes(recipe.zero, shards, recipe) for shards in shard_ranks(recipe))
        return dense, expert

    def _parameter_bytes(self, zero: int, shards: float, recipe: Recipe) -> ParameterBytes:
        """The same under a ZeRO stage over so many ranks; all else is alike in a search."""
        key = (zero, shards, recipe.offload, recipe.recompute, recipe.micro_batches > 1)
        if key not in self._parameters:
            self._parameters[key] = parameter_bytes(shards, replace(recipe, zero=zero, whole_tensors=False))
        return self._parameters[key]

    def layout_floor(self, first: Recipe, most: int) -> float:
        """Bound on the step of all recipes of a layout that have the pipeline ranks of the first or more, to `most`."""
        variants = self.layout_variants(first, most)
        return min(self._mean_floor(recipe, shares_blocks=False) for recipe in variants)

    def ranks_floor(self, recipe: Recipe) -> float:
        """Bound on all recipes with the pipeline ranks of one, which exchanges nothing for each micro-batch."""
        variants = self.gathering_variants(recipe)
        return min(self._mean_floor(each, shares_blocks=True) for each in variants)

    def layout_variants(self, first: Recipe, most: int) -> list[Recipe]:
        """Recipes of a layout one of which has sections that take least.

        A micro-batch takes longer if it is not the only one (gradients are added up), and then less the more there are
        (experts' all-to-alls run beside others): the least is at one of the ends. Where parameters are gathered, adding
        up may take less.
        """
        recipes = [first]
        if first.micro_batches == 1 or first.compiled or (first.overlap_expert and first.expert > 1):
            data = first.pipeline * first.data // most
            recipes.append(replace(first, pipeline=most, data=data, schedule="1f1b" if most > 1 else None))
        if any(self._adds_faster_gathered(recipe) for recipe in recipes):
            recipes += [replace(recipe, zero=_GATHERS, whole_tensors=False) for recipe in recipes]
        return recipes

    def gathering_variants(self, recipe: Recipe) -> list[Recipe]:
        """A recipe that exchanges nothing for each micro-batch, and, if adding up may take less so, one that does."""
        gathering = replace(recipe, zero=_GATHERS, whole_tensors=False)
        return [recipe, gathering] if self._adds_faster_gathered(recipe) else [recipe]

    def _adds_faster_gathered(self, recipe: Recipe) -> bool:
        """Whether adding up gradients takes less where each micro-batch's are reduced; alike for all of a search."""
        key = (recipe.micro_batches if recipe.compiled else recipe.micro_batches > 1, recipe.gathers_once)
        if key not in self._adds_faster:
            gathering = replace(recipe, zero=_GATHERS, whole_tensors=False)
            self._adds_faster[key] = any(
                accumulation_bytes(price, gathering) < accumulation_bytes(price, recipe)
                for price in self.sections(recipe).values()
            )
        return self._adds_faster[key]

    def mean_floors(self, kinds: Sequence[Kind], pipes: PipeSet, fits: NDArray[np.bool_]) -> Floats:
        """Bounds on the step of recipes under any schedule that fits, before the ends, see `bound_ranks`, [kinds].

        With what they gather, over their pipeline ranks. `fits`: whether each kind may have one pipeline or another of
        that size, [kinds, pipes]; it may have one at least.
        """
        recipes = [recipe for recipe, _ in kinds]
        first = recipes[0]
        by_zero = {recipe.zero: recipe for recipe in recipes}  # all that counts without what is gathered
        alone = {zero: self.section_floors(recipe, gathers=False) for zero, recipe in by_zero.items()}
        floors = [alone[recipe.zero] for recipe in recipes]
        exchanges = [self.exchanges(*kind) for kind in kinds]
        turns, whole = turns_within(pipes, first.micro_batches, fits), self._whole_blocks(first)
        return mean_floors(floors, exchanges, self._counts(first), whole, turns, first, self.cluster, self.model)

    def _mean_floor(self, recipe: Recipe, *, shares_blocks: bool) -> float:
        """The same without what is gathered, whatever fits.

        `shares_blocks`: over its pipeline ranks, of which each has whole blocks; without, it is that of all recipes of
        as many devices whose micro-batches take as long.
        """
        floors, counts = self.section_floors(recipe, gathers=False), self._counts(recipe)
        whole = self._whole_blocks(recipe) if shares_blocks else None
        nothing = np.zeros((2, len(counts)))
        turns = Turns(recipe.micro_batches / recipe.pipeline, shares_blocks and recipe.pipeline == 1)
        return float(mean_floors([floors], [nothing], counts, whole, turns, recipe, self.cluster, self.model)[0])

    def _whole_blocks(self, recipe: Recipe) -> WholeBlocks | None:
        """How many blocks the fullest of its pipeline ranks have; None where there is one rank, or no block."""
        if recipe.pipeline == 1 or not self.counted.blocks:
            return None
        return whole_blocks(tuple(self.sections(recipe)), self.counted.blocks, recipe.pipeline)

    def exchanges(self, recipe: Recipe, zero_groups: tuple[int | None, ...]) -> Floats:
        """Least seconds in which a micro-batch gathers parameters, and again with reducing gradients, [2, sections].

        `zero_groups`: the sizes of groups that the recipe may shard over.
        """
        if not recipe.reduces_each:
            return np.zeros((2, len(self.sections(recipe))))
        shape = (recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.replicas)
        key = (*shape, recipe.zero, zero_groups, recipe.gathers_once)
        if key not in self._sharded:
            of_groups = [self._gathers(replace(recipe, zero_group=group)) for group in zero_groups]
            self._sharded[key] = np.minimum.reduce(of_groups)
        return self._sharded[key]

    def _gathers(self, recipe: Recipe) -> Floats:
        groups, sections = self.groups(recipe), self.sections(recipe).values()
        return np.array([sharded_time(price, recipe, groups, self.cluster, self.model) for price in sections]).T

    def path_floors(self, recipes: Sequence[Recipe], pipes: PipeSet, mask: NDArray[np.bool_] | None = None) -> Floats:
        """Bounds on the step of recipes that differ in sharding, with each pipeline that a mask leaves.

        They are those of longest paths and their ends.
        """
        shapes = self._shapes(recipes[0], pipes)
        return self._path_floors(recipes, shapes if mask is None else shapes.where(mask))

    def recipe_floors(self, recipes: Sequence[Recipe], pipe: Pipe) -> Floats:
        """The same of each of some recipes that differ in sharding, and whose pipeline is `pipe`, [recipes]."""
        return self._path_floors(recipes, self._shapes(recipes[0], PipeSet([pipe])), apart=True)

    def _path_floors(self, recipes: Sequence[Recipe], shapes: PipeShapes, *, apart: bool = False) -> Floats:
        recipe = recipes[0]
        floors = self.section_floors(recipe)
        send_s = send_time(self.sections(recipe), recipe, self.groups(recipe), self.model)
        paths = rank_paths(floors, shapes, recipe.micro_batches, send_s, overlaps=recipe.overlap_pipeline)

        def work_of(dense: float, expert: float, tensors: int) -> list[EndWork]:
            return [self.end_work(dense, expert, tensors, each) for each in recipes]

        return path_floors(floors, shapes, paths, send_s, recipe, work_of, self.cluster, self.model, apart=apart)

    def uneven_floor(self, recipe: Recipe, pipe: Pipe) -> float:
        """Bound on the step of all recipes that gather as one does, with each pipeline of an open one."""
        shapes = self._shapes(recipe, PipeSet([_any_boundaries(pipe, len(self.counted.blocks))]))
        return uneven_floor(self.section_floors(recipe), shapes, recipe, self.cluster, self.model)

    def fastest_boundaries(
        self, recipe: Recipe, shardings: Sequence[Recipe], pipe: Pipe, memory_limit: float, *, enough: float
    ) -> Boundaries:
        """Bounds on the step of recipes that differ in sharding, with each pipeline of an open one that fits.

        `recipe` shards most of them. Of what surely takes more than `enough`, they may be before the ends.
        """
        loads, memory = self._stage_memory(recipe, pipe)

        def work_of(dense: float, expert: float, tensors: int) -> list[EndWork]:
            return [self.end_work(dense, expert, tensors, each) for each in shardings]

        send_s = send_time(self.sections(recipe), recipe, self.groups(recipe), self.model)
        shapes = self._shapes(recipe, PipeSet([_any_boundaries(pipe, len(self.counted.blocks))]))
        return fastest_boundaries(
            self.section_floors(recipe), loads, memory <= memory_limit, shapes, send_s, recipe,
            work_of, self.cluster, self.model, enough=enough,
        )  # fmt: skip

    def smallest_boundaries(self, recipe: Recipe, pipe: Pipe) -> Boundaries:
        """Bounds on the memory of a recipe with each pipeline of an open one."""
        return smallest_boundaries(*self._stage_memory(recipe, pipe))

    def _stage_memory(self, recipe: Recipe, pipe: Pipe) -> tuple[StageLoads, Floats]:
        """What the stages of an open pipeline may have, and bounds on the memory that takes, [ranks, loads]."""
        sizes = self.sizes(recipe)
        loads = stage_loads(tuple(sizes), self.counted.blocks, has_middle=pipe.pipeline > 2)
        passing = passing_bytes(sizes, loads.counts, loads.present, self._held(recipe, pipe)[:, None], recipe)
        return loads, rank_floors(loads.counts, self._section_parameters([recipe]), passing)[..., 0]

    def end_work(self, dense: float, expert: float, tensors: int, recipe: Recipe) -> EndWork:
        """What a rank with so many parameters does once per step."""
        shape = (recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.replicas, recipe.zero, recipe.zero_group)
        key = (dense, expert, tensors, recipe.reduces_each, recipe.micro_batches > 1, *shape)
        if key not in self._ends:
            groups = self.groups(recipe)
            self._ends[key] = end_work(dense, expert, tensors, recipe, groups, self.cluster, self.model)
        return self._ends[key]

    def memory_floors(self, recipes: Sequence[Recipe], pipes: PipeSet) -> Floats:
        """Bounds on the memory of recipes that differ in sharding, with each of some pipelines of their size.

        Of open pipelines, on that of all of the set. [recipes, pipes].
        """
        first = recipes[0]
        sizes, parameters = self.sizes(first), self._section_parameters(recipes)
        floors = np.empty((len(recipes), len(pipes)))
        if pipes.closed:
            closed = self._shapes(first, pipes.closed)
            floors[:, ~pipes.is_open] = memory_floors(closed, parameters, self._passing_bytes(first, closed))
        if pipes.open:
            held, whole = [self._held(first, pipe) for pipe in pipes.open], self._counts_of(tuple(sizes))
            floors[:, pipes.is_open] = uneven_memory_floors(sizes, whole, np.array(held), parameters, first)
        return floors

    def _passing_bytes(self, recipe: Recipe, shapes: PipeShapes) -> Passing:
        """What ranks hold but for parameters and their state, with each of some pipelines, [pipes, ranks]."""
        key = (_layout_of(recipe), recipe.recompute, recipe.offload, shapes.pipes)
        if key not in self._passing:
            held = held_by(shapes.pipes, recipe.micro_batches)
            self._passing[key] = passing_bytes(self.sizes(recipe), shapes.counts, shapes.present, held, recipe)
        return self._passing[key]

    @staticmethod
    def _held(recipe: Recipe, pipe: Pipe) -> Floats:
        """Micro-batches that ranks with one stage each hold at their peak, [ranks]."""
        return np.array(most_in_flight(schedule_of(pipe), pipe.pipeline, recipe.micro_batches), dtype=float)

    def section_floors(self, recipe: Recipe, *, gathers: bool = True) -> SectionFloors:
        """What sections take: the same whatever the pipeline and, unless each micro-batch exchanges, the sharding."""
        stage = recipe.zero if recipe.reduces_each else 0
        shards = (stage, recipe.replicas, recipe.zero_group) if stage and gathers else stage
        counts = recipe.compiled or (recipe.overlap_expert and recipe.expert > 1)
        turns = recipe.micro_batches if counts else recipe.micro_batches > 1
        keeping = (recipe.recompute, recipe.offload)
        key = (_layout_of(recipe), keeping, turns, shards)
        if key not in self._floors:
            groups = self.groups(recipe)
            if not gathers:
                groups = replace(groups, zero=self._alone, outer=self._alone, expert_replicas=self._alone)
            rest = (recipe.tensor, recipe.context, turns, shards, gathers, recipe.gathers_once)
            floors = [
                self._section_floor(price, name, recipe, groups, keeping, rest)
                for name, price in self.sections(recipe).items()
            ]
            self._floors[key] = stack_floors(floors)
        return self._floors[key]

    def _section_floor(
        self,
        price: SectionPrice,
        name: str,
        recipe: Recipe,
        groups: Groups,
        keeping: tuple[str, str],
        rest: tuple[object, ...],
    ) -> SectionFloor:
        """One of them: the same under all layouts that price the section alike, whose groups it uses."""
        experts = (recipe.expert, recipe.expert_tensor) if price.expert_parameters or _exchanges(price) else ()
        is_block = name not in (BEFORE, AFTER)
        alike = (price, experts, *rest)
        key = (alike, is_block, keeping if is_block else ())
        if key not in self._single:
            model = (self.cluster, self.model)
            if alike not in self._passes:
                self._passes[alike] = section_passes(price, recipe, groups, *model)
            self._single[key] = section_floor(price, self._passes[alike], recipe, groups, *model, is_block=is_block)
        return self._single[key]

    @cached_property
    def _alone(self) -> GroupLinks:
        """A group of one rank."""
        return recipe_groups(Recipe(data=self.cluster.size), self.cluster).tensor

    def _shapes(self, recipe: Recipe, pipes: PipeSet) -> PipeShapes:
        """Where sections lie in pipelines."""
        return pipe_shapes(tuple(self.sections(recipe)), self.counted.blocks, pipes)

    def _counts(self, recipe: Recipe) -> Floats:
        """How often the model has each section."""
        return self._counts_of(tuple(self.sections(recipe)))

    def _counts_of(self, names: tuple[str, ...]) -> Floats:
        """How often the model has each of some sections."""
        if names not in self._names:
            held = [BEFORE, *self.counted.blocks, AFTER]
            self._names[names] = np.array([float(held.count(name)) for name in names])
        return self._names[names]


def _layout_of(recipe: Recipe) -> tuple[object, ...]:
    """What of a recipe decides what its sections do, but for recomputation; all else is alike in a search."""
    ranks = (recipe.tensor, recipe.sequence_parallel, recipe.context, recipe.expert, recipe.expert_tensor)
    return (*ranks, recipe.micro_batch)


def _any_boundaries(pipe: Pipe, blocks: int) -> Pipe:
    """One of the pipelines of an open one."""
    return pipe._replace(stage_blocks=(blocks, *[0] * (pipe.pipeline - 1)))


def _exchanges(price: SectionPrice) -> bool:
    """Whether a section sends anything to experts."""
    return any(item.axis == EXPERT for phase in (price.forward, price.backward) for item in phase.traffic)
