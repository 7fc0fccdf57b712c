"""Price a recipe whose pipeline passes several islands: `price_recipe` and `price_memory`, each rank by its own island.

A section takes what it does on the devices, and with the groups, of the island that it lies in; stages are handed on
inside an island as there, and between two over the link that joins them. Each island runs products at the clock that
the step leaves it: the mean of its pipeline ranks. What ranks do once per step is that of the one that takes longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from autoshard.ir.recipe import Recipe
from cost_models.power import power_limit
from cost_models.schedule_orders import stage_ranks
from cost_models.stages import StageTimes
from cost_models.step import StepModel
from passes.recipes.pipeline_stages import Stage, rank_sections, run_stages, schedule_name
from passes.recipes.place_islands import Placement, crossing_time
from passes.recipes.price_ends import end_times
from passes.recipes.price_memory import MemoryPrice, rank_host_bytes, rank_memory
from passes.recipes.price_recipe import (
    SectionTime,
    StepPrice,
    load_of,
    section_products,
    section_time,
    send_time,
    stage_times,
)
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_sections import SectionPrice

Prices = Sequence[Mapping[str, SectionPrice]]
"""By island, the price of each section there."""


@dataclass(frozen=True)
class PlacedStep:
    """A step that is priced.

    Args:
        placement: where the pipeline lies.
        prices: of the sections, by island.
        stages: how often each has each section.
        recipe: the recipe.
    """

    placement: Placement
    prices: Prices
    stages: Sequence[Stage]
    recipe: Recipe

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """By stage, its pipeline rank."""
        return tuple(stage_ranks(schedule_name(self.recipe), self.recipe.pipeline, self.recipe.virtual_stages))

    @cached_property
    def ranks(self) -> list[tuple[int, dict[str, int]]]:
        """By pipeline rank, its island, and how often it has each section."""
        return list(zip(self.placement.of_ranks, rank_sections(self.stages, self.recipe), strict=True))

    def price(self, model: StepModel) -> StepPrice:
        """The time of the step, at the clock that it leaves each island's products."""
        first = self._price([model] * len(self.prices))
        if all(island.cluster.device.matmul.units == 1 for island in self.placement.islands):
            return first
        return self._price([self._at_clock(number, first.time_s, model) for number in range(len(self.prices))])

    def _at_clock(self, number: int, step_s: float, model: StepModel) -> StepModel:
        """The step model of an island's devices in a step of so many seconds."""
        island = self.placement.islands[number]
        if island.cluster.device.matmul.units == 1:
            return model
        duty = min(1.0, self.products_time(number, model) / step_s)
        return model.at_speed(power_limit().speed(duty))

    def products_time(self, number: int, model: StepModel) -> float:
        """Seconds of products and attention in a step, mean over an island's ranks; as `price_recipe.products_time`."""
        prices, total = self.prices[number], 0.0
        for stage, owner in zip(self.stages, self.owners, strict=True):
            if self.placement.of_ranks[owner] == number:
                for name, count in stage.sections:
                    is_block = name not in (BEFORE, AFTER)
                    total += count * sum(section_products(prices[name], self.recipe, model, is_block=is_block))
        return total * self.recipe.micro_batches / self.placement.islands[number].ranks

    def _price(self, models: Sequence[StepModel]) -> StepPrice:
        recipe, islands = self.recipe, self.placement.islands
        times = [
            {
                name: section_time(
                    price, recipe, island.groups, island.cluster, model, is_block=name not in (BEFORE, AFTER)
                )
                for name, price in prices.items()
            }
            for island, prices, model in zip(islands, self.prices, models, strict=True)
        ]
        handed = self._stage_times(times, models)
        pipe_s, bubble_s, in_flight = run_stages(handed, recipe)
        end = max(self._ends(times, models), key=lambda parts: sum(parts.values()))
        total = pipe_s + sum(end.values()) + models[0].step_overhead_s
        breakdown = self._communication(times)
        if bubble_s:
            breakdown["pipeline bubble"] = bubble_s
        sends = 0.0
        if recipe.pipeline > 1:
            each = fmean(stage.send_s for stage in handed[:-1])
            sends = 2 * each * recipe.virtual_stages * recipe.micro_batches
        if sends and not recipe.overlap_pipeline:
            breakdown["communication over pipeline"] = min(sends, max(0.0, pipe_s - bubble_s))
        breakdown |= {name: value for name, value in end.items() if value}
        if models[0].step_overhead_s:
            breakdown["overhead"] = models[0].step_overhead_s
        return StepPrice(total, {"compute": total - sum(breakdown.values()), **breakdown}, in_flight)

    def _stage_times(self, times: Sequence[Mapping[str, SectionTime]], models: Sequence[StepModel]) -> list[StageTimes]:
        after = (*self.owners[1:], self.owners[-1])
        found = []
        for stage, owner, following in zip(self.stages, self.owners, after, strict=True):
            here = times[self.placement.of_ranks[owner]]
            found.append(stage_times(stage, here, self.recipe, self.hand_over(owner, following, models[0])))
        return found

    def hand_over(self, owner: int, following: int, model: StepModel) -> float:
        """Seconds of handing a micro-batch from one pipeline rank to another; nothing to itself."""
        if owner == following:
            return 0.0
        one, two = (self.placement.of_ranks[rank] for rank in (owner, following))
        first, second = self.placement.islands[one], self.placement.islands[two]
        if one == two:
            return send_time(self.prices[one], self.recipe, first.groups, model)
        whole = max(price.entering_bytes for name, price in self.prices[one].items() if name not in (BEFORE, AFTER))
        return crossing_time(first, second, whole, self.placement.links[one, two], self.recipe, model)

    def _ends(self, times: Sequence[Mapping[str, SectionTime]], models: Sequence[StepModel]) -> list[dict[str, float]]:
        """What ranks do once per step, those that are alike once."""
        found = []
        for number, counts in {(number, tuple(counts.items())): None for number, counts in self.ranks}:
            island = self.placement.islands[number]
            load = load_of(dict(counts), self.prices[number], times[number])
            found.append(end_times(load, self.recipe, island.groups, island.cluster, models[number]))
        return found

    def _communication(self, times: Sequence[Mapping[str, SectionTime]]) -> dict[str, float]:
        """Seconds of communication that nothing hides, by axis, mean over pipeline ranks."""
        found: dict[str, float] = {}
        for number, counts in self.ranks:
            for name, count in counts.items():
                for axis, value in times[number][name].communication.items():
                    key = f"communication over {axis}"
                    share = value * count * self.recipe.micro_batches / self.recipe.pipeline
                    found[key] = found.get(key, 0.0) + share
        return found

    def memory(self, in_flight: Sequence[float]) -> list[MemoryPrice]:
        """The memory of the fullest rank of each island; `in_flight` as in `price_memory.memory_price`."""
        fullest: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}
        for (number, counts), held in zip(self.ranks, in_flight, strict=True):
            kind = (number, tuple(counts.items()))
            fullest[kind] = max(held, fullest.get(kind, held))
        found: list[list[MemoryPrice]] = [[] for _ in self.prices]
        for (number, counts), held in fullest.items():
            groups = self.placement.islands[number].groups
            found[number].append(rank_memory(self.prices[number], dict(counts), self.recipe, groups, held))
        return [max(each, key=lambda memory: memory.total) for each in found]

    def host_bytes(self, in_flight: Sequence[float]) -> list[int]:
        """What lies on the host for the device of each island that has most there; see `memory`."""
        most = [0] * len(self.prices)
        for (number, counts), held in zip(self.ranks, in_flight, strict=True):
            most[number] = max(most[number], rank_host_bytes(self.prices[number], counts, self.recipe, held))
        return most
