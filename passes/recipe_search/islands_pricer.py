"""Price and bound recipes whose pipeline passes some islands of a joined cluster in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.joined import JoinedCluster
from cost_models.step import StepModel
from passes.recipe_search.bound_islands import (
    PlacedFloors,
    held_floors,
    least_of_shares,
    placed_path_floors,
    share_floors,
    share_table,
    share_work,
    ways_over,
)
from passes.recipe_search.bound_memory import (
    SectionParameters,
    parameter_bytes,
    passing_bytes,
    rank_floors,
    section_kept,
    section_parameters,
    whole_bytes,
)
from passes.recipe_search.bound_recipes import EndWorkOf, Floats
from passes.recipe_search.known_pipes import Pipe, Share
from passes.recipe_search.pipe_shapes import held_by, pipe_shapes
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipes.pipeline_stages import in_flight, share_out
from passes.recipes.place_islands import Placement, alone, place_islands
from passes.recipes.price_islands import PlacedStep
from passes.recipes.recipe_groups import Groups
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import CountedModel
from passes.sections.price_sections import SectionSizes

_GATHERS = 3
"""The ZeRO stage that gathers parameters for each micro-batch."""


@dataclass
class IslandsPricer:
    """What recipes of a model take on islands of a cluster; what they share is found once.

    Args:
        counted: the model.
        cluster: the cluster.
        pricers: of the islands that the pipelines pass, in order; all recipes' `islands` name these.
        model: of the step.
    """

    counted: CountedModel
    cluster: JoinedCluster
    pricers: Sequence[RecipePricer]
    model: StepModel
    _placements: dict[tuple[object, ...], Placement] = field(default_factory=dict)

    def placement(self, recipe: Recipe) -> Placement:
        """Where a recipe lies."""
        key = (recipe.data, recipe.context, recipe.tensor, recipe.expert, recipe.expert_tensor, recipe.zero_group)
        if key not in self._placements:
            self._placements[key] = place_islands(recipe, self.cluster)
        return self._placements[key]

    def _step(self, recipe: Recipe) -> PlacedStep:
        prices = [pricer.sections(recipe) for pricer in self.pricers]
        return PlacedStep(self.placement(recipe), prices, share_out(self.counted.blocks, recipe), recipe)

    def time_s(self, recipe: Recipe) -> float:
        """The step of a recipe, as `recipe_plan.predict_recipe` has it."""
        return self._step(recipe).price(self.model).time_s

    def memory_bytes(self, recipe: Recipe) -> tuple[int, ...]:
        """The memory of the fullest rank of each island, likewise."""
        return tuple(memory.total for memory in self._step(recipe).memory(in_flight(recipe)))

    def fits(self, recipe: Recipe, limits: Sequence[float]) -> bool:
        """Whether a recipe fits in so much memory of each island, and what it offloads in its hosts' shares."""
        if any(size > limit for size, limit in zip(self.memory_bytes(recipe), limits, strict=True)):
            return False
        if recipe.offload != "activations":
            return True
        shares = [cluster.host_bytes_per_device for cluster in self._clusters]
        sizes = self._step(recipe).host_bytes(in_flight(recipe))
        return all(share is None or size <= share for size, share in zip(sizes, shares, strict=True))

    def workspace_bytes(self, recipe: Recipe) -> int:
        """The largest workspace of a recipe's layout: some rank has it, beside all else."""
        return min(pricer.workspace_bytes(recipe) for pricer in self.pricers)

    def _alone(self, recipe: Recipe) -> list[Recipe]:
        """What a recipe is on each island."""
        return [alone(recipe, island.ranks) for island in self.placement(recipe).islands]

    @property
    def _clusters(self) -> list[Cluster]:
        return [pricer.cluster for pricer in self.pricers]

    def layout_floor(self, first: Recipe, most: int, shares: tuple[Share, ...]) -> float:
        """Bound on the step of all recipes of a layout, see `RecipePricer.layout_floor`, with any of some shares."""
        variants = self.pricers[0].layout_variants(first, most)
        return float(min(self.share_floors(recipe, shares, gathers=False).min() for recipe in variants))

    def ranks_floors(self, recipe: Recipe, shares: tuple[Share, ...]) -> Floats:
        """Those of all recipes with the ranks of one, see `RecipePricer.ranks_floor`, by shares, [shares]."""
        if not shares:
            return np.zeros(0)
        variants = self.pricers[0].gathering_variants(recipe)
        return np.min([self.share_floors(each, shares, gathers=False) for each in variants], axis=0)

    def layout_memory(self, first: Recipe, most: int, shares: tuple[Share, ...], *, zero: int) -> Floats:
        """Bounds on the memory of all recipes of a layout, on each island's mean rank, [shares, islands].

        `zero`: the ZeRO stage that shards most of those that they may have.
        """
        data = first.pipeline * first.data // most
        sharded = replace(first, pipeline=most, data=data, zero=zero, zero_group=None, whole_tensors=False)
        return self.share_memory(sharded, shares)

    def share_floors(self, recipe: Recipe, shares: tuple[Share, ...], *, gathers: bool = True) -> Floats:
        """Bounds on the step of recipes with the ranks of one that gather as it does, by shares, [shares]."""
        parts = self._alone(recipe)
        floors = [
            pricer.section_floors(part, gathers=gathers) for pricer, part in zip(self.pricers, parts, strict=True)
        ]
        work = share_work(floors, tuple(self.pricers[0].sections(recipe)), self.counted.blocks, share_table(shares))
        ranks = np.array([part.pipeline for part in parts], dtype=float)
        return share_floors(work, ranks, recipe.micro_batches, self._clusters, self.model)

    def share_memory(self, recipe: Recipe, shares: tuple[Share, ...]) -> Floats:
        """Bounds on the memory of recipes that shard no more, on each island's mean rank, [shares, islands]."""
        names, parts = tuple(self.pricers[0].sizes(recipe)), self._section_memory(recipe)
        held = least_of_shares([state + kept for state, kept in parts], names, self.counted.blocks, share_table(shares))
        return whole_bytes(held / np.array(self._ranks(recipe)))

    def share_fullness(self, recipe: Recipe, shares: tuple[Share, ...], limits: Sequence[float]) -> Floats:
        """How full the fullest device is at least, of its limit, in recipes that shard no more, by shares, [shares]."""
        if not shares:
            return np.zeros(0)
        mean = (self.share_memory(recipe, shares) / limits).max(axis=1)
        is_block = [name not in (BEFORE, AFTER) for name in self.pricers[0].sizes(recipe)]
        parts = [(state[is_block], kept[is_block]) for state, kept in self._section_memory(recipe)]
        ways = ways_over(self._ranks(recipe), recipe.micro_batches, len(self.counted.blocks))
        return np.maximum(mean, held_floors(ways, share_table(shares), parts, limits))

    def _section_memory(self, recipe: Recipe) -> list[tuple[Floats, Floats]]:
        """By island, bytes of each section's parameters, gradients and state, and of what a micro-batch keeps there."""
        found = []
        for pricer, island in zip(self.pricers, self.placement(recipe).islands, strict=True):
            sizes = pricer.sizes(recipe)
            found.append((_parameters(sizes, recipe, island.groups).states[0], section_kept(sizes, recipe)))
        return found

    def _ranks(self, recipe: Recipe) -> tuple[int, ...]:
        """Pipeline ranks of each island."""
        return tuple(island.ranks for island in self.placement(recipe).islands)

    def path_floors(self, recipes: Sequence[Recipe], pipes: Sequence[Pipe]) -> Floats:
        """Bounds on the step of recipes that differ in sharding, with each pipeline: longest paths and their ends."""
        recipe = recipes[0]
        shapes = pipe_shapes(tuple(self.pricers[0].sections(recipe)), self.counted.blocks, tuple(pipes))
        parts = [self._alone(each) for each in recipes]
        placed = PlacedFloors(
            [pricer.section_floors(part) for pricer, part in zip(self.pricers, parts[0], strict=True)],
            np.array(self.placement(recipe).of_ranks),
            np.array(self._hops_s(recipe)),
        )
        work_of = [_ends_on(pricer, each) for pricer, each in zip(self.pricers, zip(*parts, strict=True), strict=True)]
        return placed_path_floors(placed, shapes, recipe, work_of, self._clusters, self.model)

    def _hops_s(self, recipe: Recipe) -> list[float]:
        """Seconds of handing a micro-batch from each pipeline rank to the next, and from the last to the first."""
        step = PlacedStep(self.placement(recipe), [pricer.sections(recipe) for pricer in self.pricers], (), recipe)
        ranks = range(recipe.pipeline)
        return [step.hand_over(rank, (rank + 1) % recipe.pipeline, self.model) for rank in ranks]

    def fullness(self, recipe: Recipe, pipes: Sequence[Pipe], limits: Sequence[float]) -> Floats:
        """How full the fullest device is at least, with each of some pipelines of its size, of its limit, [pipes]."""
        sizes = [pricer.sizes(recipe) for pricer in self.pricers]
        shapes = pipe_shapes(tuple(sizes[0]), self.counted.blocks, tuple(pipes))
        placement, held = self.placement(recipe), held_by(shapes.pipes, recipe.micro_batches)
        of_ranks, full = np.array(placement.of_ranks), np.zeros(len(pipes))
        for number, island in enumerate(placement.islands):
            mine = of_ranks == number
            counts, parameters = shapes.counts[:, mine], _parameters(sizes[number], recipe, island.groups)
            present = shapes.present.where(np.s_[:, mine])
            passing = passing_bytes(sizes[number], counts, present, held[:, mine], recipe)
            needed = rank_floors(counts, parameters, passing)[..., 0]
            full = np.maximum(full, needed.max(axis=1) / limits[number])
        return full


def _parameters(sizes: Mapping[str, SectionSizes], recipe: Recipe, groups: Groups) -> SectionParameters:
    """What a recipe holds for parameters on each rank of an island."""
    dense, expert = (parameter_bytes(shards.size, recipe) for shards in (groups.zero, groups.expert_replicas))
    return section_parameters(sizes, [(dense, expert)], [recipe.zero == _GATHERS])


def _ends_on(pricer: RecipePricer, recipes: Sequence[Recipe]) -> EndWorkOf:
    """The ends of a rank of an island under each of some recipes."""
    return lambda dense, expert, tensors: [pricer.end_work(dense, expert, tensors, each) for each in recipes]
