"""Lower bounds on what recipes take, from the prices of their sections: what lets a search leave most of them unpriced.

Let a section take f forward and b backward (recomputation and communication that nothing hides included) for one
micro-batch; m micro-batches; c(r) how often pipeline rank r has each section.

1. *Path of a rank.* Rank r begins when a micro-batch has passed all stages before its first one, h(r), handed on each
   time, and works without a break at best; where a schedule does not cut backwards in two, the last micro-batch's
   backward still passes those stages:

       T >= h(r) f + r s + m c(r) (f + b) [ + h(r) b + r s ],        s seconds for each hand-over.
2. *Mean.* Over any pipeline of P ranks some rank has at least the mean, so T >= m sum(f + b) / P. As P times the
   replicas is fixed, that depends on the layout alone. Where a section exchanges parameters or gradients for g seconds
   beside its work, each pass takes `streams.beside` of the two. Without g, and what adds gradients up, work is alike
   in many recipes: one table bounds all of a layout.
3. *Latency.* One micro-batch passes all stages and back: T >= sum(f + b), less the gradients of weights, which nothing
   waits for, where backwards are cut in two.
4. *Ends.* Rank r reduces gradients, updates and gathers after its path (`price_ends.end_times`). Overlapped with its
   own work x that is beside(x, e) - x; path + beside(x, e) - x rises with x, so bounds on x and path are enough. For
   several shardings it is the least of theirs.

Every bound is taken less one part in 10^9, for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from cost_models.streams import measured_slowdown
from passes.recipe_search.pipe_shapes import Floats, PipeShapes
from passes.recipes.price_ends import EndWork
from passes.recipes.price_recipe import SectionPasses, section_time
from passes.recipes.recipe_groups import Groups
from passes.sections.price_sections import SectionPrice

ROUNDING = 1.0 - 1e-9


class SectionFloors(NamedTuple):
    """Times and parameters of sections for one micro-batch, in the order of their names, [sections].

    Args:
        forward, backward: seconds; backward with what is recomputed.
        delayed: what of `backward` stages before do not wait for, where it is cut in two.
        adding: the part of `backward`, and of `delayed`, that adds gradients up.
        dense, expert: parameters, see `price_ends.RankLoad`.
    """

    forward: Floats
    backward: Floats
    delayed: Floats
    adding: Floats
    dense: Floats
    expert: Floats

    @property
    def work(self) -> Floats:
        """Seconds of both."""
        return self.forward + self.backward


def section_floor(
    price: SectionPrice,
    passes: SectionPasses,
    recipe: Execution,
    groups: Groups,
    cluster: Cluster,
    *,
    is_block: bool,
) -> tuple[float, ...]:
    """A section's entries of `SectionFloors` under a recipe, in their order; `passes`: without what is kept."""
    time = section_time(price, recipe, groups, cluster, is_block=is_block, passes=passes)
    return (
        time.forward_s, time.backward_s + time.recompute_s, time.backward_s - time.input_gradient_s, passes.adding_s,
        price.parameters, price.expert_parameters,
    )  # fmt: skip


def mean_floors(
    floors: Sequence[SectionFloors],
    exchanges: Sequence[Floats],
    counts: Floats,
    recipe: Execution,
) -> Floats:
    """Bounds on the price of a step, before its ends: the mean of ranks, and latency, [recipes].

    Args:
        floors: what their sections take without what is exchanged.
        exchanges: seconds of exchanges beside each pass, [2, sections] each.
        counts: how often the model has each section, [sections].
        recipe: one of the recipes.

    Work beside copies to the host is slowed already, once for both.
    """
    interference = measured_slowdown() if recipe.offload == "none" else 0.0

    def beside(work: Floats, exchange: Floats) -> Floats:
        return np.maximum(exchange, work + interference * np.minimum(work, exchange))

    gathering, reducing = np.array(exchanges).swapaxes(0, 1)
    forward, backward, latency = np.array(
        [(each.forward, each.backward - each.adding, each.work - each.delayed) for each in floors]
    ).swapaxes(0, 1)
    mean = recipe.micro_batches / recipe.pipeline
    busy_s = mean * ((beside(forward, gathering) + beside(backward, reducing)) @ counts)
    seconds = np.maximum(busy_s, latency @ counts)
    return ROUNDING * seconds


@dataclass(frozen=True, slots=True)
class Ends:
    """What the ranks with the longest paths do once per step, one sharding or another, [pipes, shardings]: seconds.

    `forward`, `backward`: the rank's own work, [pipes, 1].
    """

    reduce_s: Floats
    gather_s: Floats
    update_s: Floats
    forward: Floats
    backward: Floats

    def apart(self) -> Ends:
        """Of one pipeline, each sharding for itself, as if they were pipelines."""
        return replace(self, reduce_s=self.reduce_s.T, gather_s=self.gather_s.T, update_s=self.update_s.T)

    def least(self, recipe: Execution) -> Floats:
        """What the sharding that waits least waits, [pipes]; see `price_ends.end_times`."""
        reduce_s, gather_s = self.reduce_s, self.gather_s
        if recipe.runtime.overlap_gradients:
            reduce_s = _exposed(self.backward, reduce_s)
        if recipe.runtime.overlap_parameters:
            gather_s = _exposed(self.forward, gather_s)
        return (reduce_s + gather_s + self.update_s).min(axis=1)


def _exposed(computation_s: Floats, communication_s: Floats) -> Floats:
    """`streams.beside` less the computation."""
    shared = measured_slowdown() * np.minimum(computation_s, communication_s)
    return np.maximum(communication_s - computation_s, shared)


EndWorkOf = Callable[[float, float], Sequence[EndWork]]
"""The ends of a rank with so many dense and expert parameters, by sharding."""


def ends_of(floors: SectionFloors, counts: Floats, work_of: EndWorkOf) -> Ends:
    """The ends of ranks that have sections so often, [pipes, sections]."""
    loads = np.stack([counts @ values for values in (floors.dense, floors.expert)], axis=1)
    numbers: dict[tuple[float, ...], int] = {}
    which = [numbers.setdefault(tuple(load), len(numbers)) for load in loads.tolist()]
    works = [work_of(dense, expert) for dense, expert in numbers]

    def by_sharding(part: Callable[[EndWork], float]) -> Floats:
        return np.array([[part(work) for work in each] for each in works])[which]

    own = ((counts @ seconds)[:, None] for seconds in (floors.forward, floors.backward))
    return Ends(
        by_sharding(lambda work: work.reduce_s), by_sharding(lambda work: work.gather_s),
        by_sharding(lambda work: work.update_s), *own,
    )  # fmt: skip


def path_floors(
    floors: SectionFloors,
    shapes: PipeShapes,
    send_s: float,
    recipe: Execution,
    work_of: EndWorkOf,
    *,
    apart: bool = False,
) -> Floats:
    """Bounds on the price of a step with its ends, those of the rank with the longest path, and latency, [pipes].

    Args:
        floors, shapes: of the pipelines.
        send_s: of a hand-over.
        recipe: one of those that are bounded; they differ in sharding and pipeline.
        work_of: the ends under each sharding.
        apart: of one pipeline, those of each sharding instead, [shardings].
    """
    hops = np.arange(float(recipe.pipeline))
    entering = shapes.before @ floors.forward + hops * send_s
    leaving = shapes.is_whole * (shapes.before @ floors.backward + hops * send_s)
    paths = entering + recipe.micro_batches * (shapes.counts @ floors.work) + leaving
    pipes, ranks = np.arange(len(paths)), paths.argmax(axis=1)
    ends = ends_of(floors, shapes.counts[pipes, ranks], work_of)
    ends = ends.apart() if apart else ends
    counts = shapes.counts[0].sum(axis=0)
    delayed = ~shapes.is_whole[:, 0] * (counts @ floors.delayed)
    latency = counts @ floors.work - delayed
    seconds = np.maximum(paths[pipes, ranks] + ends.least(recipe), latency)
    return ROUNDING * seconds
