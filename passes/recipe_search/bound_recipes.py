"""Lower bounds on what recipes take, from the prices of their sections: what lets a search leave most of them unpriced.

Let a section take f forward and b backward (recomputation and communication that nothing hides included) for one
micro-batch, of which p and q seconds are products and attention; m micro-batches; c(r) how often pipeline rank r has
each section.

1. *Path of a rank.* Rank r begins when a micro-batch has passed all stages before its first one, h(r), handed on each
   time, and works without a break at best; where a schedule does not cut backwards in two, the last micro-batch's
   backward still passes those stages:

       T >= h(r) f + hops s + m c(r) (f + b) + w(r) s [ + h(r) b + hops s ],

   s seconds for each hand-over, w(r) of which the rank waits for: all it makes where nothing overlaps them, and with
   1F1B those between a forward and a backward.
   *Turning.* Where ranks have one stage and run forwards and backwards in turn, rank r has P - r forwards behind it
   when its first backward begins, and as many backwards before it when its last forward ends. The first micro-batch's
   way to the last rank and back, and then the last one's, thus leave no time for more than P - 1 - r of its m:

       T >= h(r) f + 2 (l(r) f + i(r)) + (m - (P - 1 - r)) c(r) (f + b) [ + h(r) b ] + hand-overs,    m > P - r,

   l(r) the stages behind r, i(r) their backwards, without gradients of weights where those are cut off. Where backwards
   are cut, b is what both parts take.
   *First backward.* Where ranks have v stages each, in rounds of R micro-batches, the first backward of rank r, on its
   last stage, waits for a micro-batch's way through all stages and back to there. Before it the rank runs R forwards of
   each stage but the last, and e(r) = k (P - 1 - r) + 1 more, k = 1 if backwards are cut, else 2; with d(r) their time,

       T >= sum f + i(r) + m c(r) (f + b) - d(r) [ + h(r) b ] + hand-overs,    (v - 1) R + e(r) <= v m,

   i(r) of the stages behind the last one of r. Of its hand-overs the rank may have made one for each of these forwards.
2. *Mean.* Over any pipeline of P ranks some rank has at least the mean, so T >= m sum(f + b) / P. As P times the
   replicas is fixed, that depends on the layout alone. Of several ranks each has whole blocks: where the one with the
   model's end, which takes a, has n of N blocks that take u each, another has at least ceil((N - n) / (P - 1)), so

       T >= m min over n of max(a + n u, ceil((N - n) / (P - 1)) u)

   (`bound_ranks`).
3. *Latency.* One micro-batch passes all stages and back: T >= sum(f + b) and all hand-overs; less the gradients of
   weights, which nothing waits for, where backwards are cut in two.
4. *Ends.* Rank r reduces gradients, updates and gathers after its path (`price_ends.end_times`). Overlapped with its
   own work x that is beside(x, e) - x; path + beside(x, e) - x rises with x, so bounds on x and path are enough. For
   several shardings it is the least of theirs.
5. *Clock.* The step is priced twice: at the clock of sustained products, T(1), then with products faster by
   v(X / T(1)), X their seconds (`price_recipe.step_price`, `cost_models.power`). If L(v) bounds the step at speed v,
   the price is at least min(L(v(X / t)), t (1 - g s)), s = 1 - 1 / v(X / t), for every t >= L(1): either T(1) <= t,
   and v is no larger than there, or T(1) > t, and T(v) >= T(1) (1 - g s), which rises with T(1). g is the greatest part
   of any pass that products are; 1 where backwards are cut in two. A section's time at speed v is at least f - s p, as
   communication that a shorter product hides no longer is added, never taken away; where a gather, or a copy to or from
   the host, that may take longer than the section runs beside it, interference shrinks too, and what is taken off is
   (1 + interference) p.

Every bound is taken less one part in 10^9, for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.power import power_limit
from cost_models.step import StepModel
from passes.recipe_search.pipe_shapes import Floats, PipeShapes, missed_turns
from passes.recipes.price_ends import EndWork
from passes.recipes.price_recipe import SectionPasses, copies_time, follows_power, section_products, section_time
from passes.recipes.recipe_groups import Groups
from passes.sections.price_sections import SectionPrice

ROUNDING = 1.0 - 1e-9

_NEVER = 1e-12
"""The least duty: products that take no time."""


@dataclass(frozen=True, slots=True)
class SectionFloors:
    """What sections take for one micro-batch, in the order of their names, [sections].

    Args:
        forward, backward: seconds at the clock of sustained products; backward with what is recomputed.
        forward_gain, backward_gain: what an infinitely fast clock takes off them at most.
        delayed: what of `backward` stages before do not wait for, where it is cut in two.
        cutting: how much longer it is then.
        adding: the part of `backward`, and of `delayed`, that adds gradients up.
        products: seconds of products and attention in both.
        dense, expert, tensors: parameters, see `price_ends.RankLoad`.
        gain_rate: the greatest part of a pass that an infinitely fast clock takes off.
    """

    forward: Floats
    backward: Floats
    forward_gain: Floats
    backward_gain: Floats
    delayed: Floats
    cutting: Floats
    adding: Floats
    products: Floats
    dense: Floats
    expert: Floats
    tensors: Floats
    gain_rate: float

    @property
    def work(self) -> Floats:
        """Seconds of both."""
        return self.forward + self.backward

    @property
    def gain(self) -> Floats:
        """What an infinitely fast clock takes off both."""
        return self.forward_gain + self.backward_gain


class SectionFloor(NamedTuple):
    """One section of `SectionFloors`."""

    forward: float
    backward: float
    forward_gain: float
    backward_gain: float
    delayed: float
    cutting: float
    adding: float
    products: float
    dense: float
    expert: float
    tensors: float


def section_floor(
    price: SectionPrice,
    passes: SectionPasses,
    recipe: Recipe,
    groups: Groups,
    cluster: Cluster,
    model: StepModel,
    *,
    is_block: bool,
) -> SectionFloor:
    """What a section takes under a recipe; `passes`: without what is kept."""
    time = section_time(price, recipe, groups, cluster, model, is_block=is_block, passes=passes)
    products = section_products(price, recipe, model, is_block=is_block)
    copies = copies_time(price, recipe, cluster, is_block=is_block)
    longest = (1.0 + model.interference) * power_limit().headroom
    totals = (time.forward_s, time.backward_s + time.recompute_s)
    gains = [
        seconds if total >= longest * max(beside) else (1.0 + model.interference) * seconds
        for total, seconds, beside in zip(totals, products, zip(passes.gathers, copies, strict=True), strict=True)
    ]
    return SectionFloor(
        forward=totals[0], backward=totals[1], forward_gain=gains[0], backward_gain=gains[1],
        delayed=time.backward_s - time.input_gradient_s,
        cutting=time.input_gradient_s + time.weight_gradient_s - time.backward_s,
        adding=passes.adding_s, products=sum(products),
        dense=price.parameters, expert=price.expert_parameters, tensors=price.tensors,
    )  # fmt: skip


def stack_floors(floors: Sequence[SectionFloor]) -> SectionFloors:
    """Those of all sections."""
    passes = ((each.forward, each.forward_gain) for each in floors)
    backwards = ((each.backward, each.backward_gain) for each in floors)
    rates = [gain / seconds for seconds, gain in chain(passes, backwards) if seconds > 0.0]
    columns = dict(zip(SectionFloor._fields, np.array(floors).T, strict=True))
    return SectionFloors(**columns, gain_rate=min(1.0, max(rates, default=0.0)))


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of ranks, [pipes, ranks]: seconds, and what an infinitely fast clock takes off them."""

    seconds: Floats
    gain: Floats

    def floor(self, shares: Floats) -> Floats:
        """The longest of each pipeline where the clock takes off such shares of that, [pipes]."""
        return (self.seconds - shares[:, None] * self.gain).max(axis=1)


def rank_paths(
    floors: SectionFloors, shapes: PipeShapes, micro_batches: int, send_s: float, *, overlaps: bool
) -> Paths:
    """The path of each rank (see the module's docstring); hand-overs take `send_s`, beside computation or not."""

    def along(forward: Floats, backward: Floats) -> Floats:
        entering = shapes.before @ forward + shapes.is_whole * (shapes.before @ backward)
        return entering + micro_batches * (shapes.counts @ (forward + backward))

    sends_s = shapes.hand_overs(micro_batches, overlaps=overlaps) * send_s
    cutting = ~shapes.is_whole * (shapes.counts @ floors.cutting)
    seconds = along(floors.forward, floors.backward) + micro_batches * cutting + sends_s
    gain = along(floors.forward_gain, floors.backward_gain)
    if shapes.in_rounds.any():
        more, more_gain = _until_first_backward(floors, shapes, micro_batches, send_s, overlaps=overlaps)
        is_longer = more > 0.0
        seconds, gain = seconds + np.where(is_longer, more, 0.0), gain + np.where(is_longer, more_gain, 0.0)
    if not shapes.alternates.any():
        return Paths(seconds, gain)
    missed = missed_turns(shapes.counts.shape[1], micro_batches)
    later = shapes.counts[:, ::-1].cumsum(axis=1)[:, ::-1] - shapes.counts

    def turning(forward: Floats, backward: Floats) -> Floats:
        return 2.0 * (later @ (forward + backward)) - missed * (shapes.counts @ (forward + backward))

    more = turning(floors.forward, floors.backward) - missed * cutting
    more -= 2.0 * ~shapes.is_whole * (later @ floors.delayed)
    more += turning_hops(missed, overlaps=overlaps) * send_s
    is_longer = shapes.alternates & (more > 0.0)
    more_gain = turning(floors.forward_gain, floors.backward_gain)
    return Paths(seconds + np.where(is_longer, more, 0.0), gain + np.where(is_longer, more_gain, 0.0))


def _until_first_backward(
    floors: SectionFloors, shapes: PipeShapes, micro_batches: int, send_s: float, *, overlaps: bool
) -> tuple[Floats, Floats]:
    """By how much "First backward" is longer than the path of a rank, and what a clock takes off that, [pipes, ranks].

    -infinity where that is no bound.
    """
    ranks = shapes.counts.shape[1]
    behind = np.arange(ranks - 1.0, -1.0, -1.0)
    round_size = micro_batches // max(1, micro_batches // ranks)
    extra = (1 + shapes.is_whole) * behind + 1
    later = shapes.last[:, ::-1].cumsum(axis=1)[:, ::-1] - shapes.last
    whole = shapes.counts.sum(axis=1, keepdims=True) - shapes.before

    def way(forward: Floats, backward: Floats) -> Floats:
        done = round_size * ((shapes.counts - shapes.last) @ forward)
        done += np.minimum(extra, round_size) * (shapes.last @ forward)
        done += np.maximum(extra - round_size, 0.0) * (shapes.first @ forward)
        return whole @ forward + later @ backward - done

    more = way(floors.forward, floors.backward) - ~shapes.is_whole * (later @ floors.delayed)
    forwards = (shapes.virtual - 1) * round_size + extra
    hops = shapes.virtual * ranks - 1 + behind - (ranks - 1 - behind)
    more += send_s * (hops if overlaps else hops - np.minimum(forwards, shapes.waits(micro_batches)))
    is_bound = shapes.in_rounds & (forwards <= shapes.virtual * micro_batches)
    return np.where(is_bound, more, -np.inf), way(floors.forward_gain, floors.backward_gain)


def turning_hops(missed: Floats, *, overlaps: bool) -> Floats:
    """Hand-overs on the way of others, less those that a rank waits for meanwhile, see `missed_turns`."""
    return 4.0 * missed if overlaps else 4.0 * missed - 2.0 * (missed + 1)


def step_floors(
    at: Callable[[Floats], Floats],
    products_s: float,
    cluster: Cluster,
    model: StepModel,
    gain_rate: Floats | float = 1.0,
) -> Floats:
    """Bounds on the prices of steps.

    Args:
        at: bounds on their times where a faster clock takes off such shares of what it can, one for each step.
        products_s: seconds of products in each of them, as `price_recipe.products_time`.
        cluster, model: whose devices may have a power limit, which steps may follow.
        gain_rate: the greatest part of them that an infinitely fast clock takes off.
    """
    turn = at(np.zeros(1))
    if not follows_power(cluster, model):
        return ROUNDING * turn

    def taken_off() -> Floats:
        return 1.0 - 1.0 / power_limit().speeds(np.clip(products_s / turn, _NEVER, 1.0))

    shares = taken_off()
    turn = np.maximum(turn, at(shares) / (1.0 - gain_rate * shares))
    shares = taken_off()
    return ROUNDING * np.minimum(at(shares), turn * (1.0 - gain_rate * shares))


_LONGER = 1.05
"""Steps that are longer than a bound by more than this are not told apart: the clock of longer steps is faster."""


def longer_step(
    products_s: float, step_s: float, cluster: Cluster, model: StepModel, gain_rate: float
) -> tuple[float, float]:
    """For steps somewhat longer than a bound at the clock of sustained products.

    Returns:
        The share of what an infinitely fast clock takes off that the clock of such a step does, and the step at that
        clock, seconds: a bound on all longer ones. (0, infinite) without a power limit.
    """
    if not follows_power(cluster, model) or math.isinf(step_s):
        return 0.0, math.inf
    share = 1.0 - 1.0 / power_limit().speed(min(1.0, products_s / (_LONGER * step_s)))
    return share, _LONGER * step_s * (1.0 - gain_rate * share)


@dataclass(frozen=True, slots=True)
class Ends:
    """What the ranks with the longest paths do once per step, one sharding or another, [pipes, shardings]: seconds.

    `forward`, `backward` (and what a clock takes off them): the rank's own work, [pipes, 1].
    """

    reduce_s: Floats
    gather_s: Floats
    update_s: Floats
    forward: Floats
    backward: Floats
    forward_gain: Floats
    backward_gain: Floats

    def apart(self) -> Ends:
        """Of one pipeline, each sharding for itself, as if they were pipelines."""
        return replace(self, reduce_s=self.reduce_s.T, gather_s=self.gather_s.T, update_s=self.update_s.T)

    def least(self, shares: Floats, recipe: Recipe, model: StepModel) -> Floats:
        """What the sharding that waits least waits, [pipes]; see `price_ends.end_times`."""
        reduce_s, gather_s = self.reduce_s, self.gather_s
        if recipe.reduces_late:
            sent_s = reduce_s + gather_s
            waited_s = exposed(self.update_s, sent_s, model) if recipe.overlap_gradients else sent_s
            return (waited_s + self.update_s).min(axis=1)
        if recipe.overlap_gradients:
            reduce_s = exposed(self.backward - shares[:, None] * self.backward_gain, reduce_s, model)
        if recipe.overlap_parameters:
            beside_s = self.update_s if recipe.compiled else self.forward - shares[:, None] * self.forward_gain
            gather_s = exposed(beside_s, gather_s, model)
        return (reduce_s + gather_s + self.update_s).min(axis=1)


def exposed(computation_s: Floats, communication_s: Floats, model: StepModel) -> Floats:
    """`StepModel.beside` less the computation."""
    shared = model.interference * np.minimum(computation_s, communication_s)
    return np.maximum(communication_s - computation_s, shared)


EndWorkOf = Callable[[float, float, int], Sequence[EndWork]]
"""The ends of a rank with so many dense and expert parameters in so many tensors, by sharding."""


def ends_of(floors: SectionFloors, counts: Floats, work_of: EndWorkOf) -> Ends:
    """The ends of ranks that have sections so often, [pipes, sections]."""
    loads = np.stack([counts @ values for values in (floors.dense, floors.expert, floors.tensors)], axis=1)
    numbers: dict[tuple[float, ...], int] = {}
    which = [numbers.setdefault(tuple(load), len(numbers)) for load in loads.tolist()]
    works = [work_of(dense, expert, int(tensors)) for dense, expert, tensors in numbers]

    def by_sharding(part: Callable[[EndWork], float]) -> Floats:
        return np.array([[part(work) for work in each] for each in works])[which]

    own = (floors.forward, floors.backward, floors.forward_gain, floors.backward_gain)
    return Ends(
        by_sharding(lambda work: work.reduce_s), by_sharding(lambda work: work.gather_s),
        by_sharding(lambda work: work.update_s), *((counts @ values)[:, None] for values in own),
    )  # fmt: skip


def path_floors(
    floors: SectionFloors,
    shapes: PipeShapes,
    paths: Paths,
    send_s: float,
    recipe: Recipe,
    work_of: EndWorkOf,
    cluster: Cluster,
    model: StepModel,
    *,
    apart: bool = False,
) -> Floats:
    """Bounds on the price of a step with its ends, those of the rank with the longest path, [pipes].

    Args:
        floors, shapes, paths: of the pipelines.
        send_s: of a hand-over.
        recipe: one of those that are bounded; they differ in sharding and pipeline.
        work_of: the ends under each sharding.
        cluster, model: what it is priced for.
        apart: of one pipeline, those of each sharding instead, [shardings].
    """
    ranks = paths.seconds.argmax(axis=1)
    pipes = np.arange(len(ranks))
    ends = ends_of(floors, shapes.counts[pipes, ranks], work_of)
    ends = ends.apart() if apart else ends
    seconds, gain = paths.seconds[pipes, ranks], paths.gain[pipes, ranks]
    latency, latency_gain = latencies(floors, shapes, send_s)

    def at(shares: Floats) -> Floats:
        shares = np.broadcast_to(shares, len(ends.reduce_s))
        path = seconds - shares * gain + ends.least(shares, recipe, model)
        return np.maximum(path, latency - shares * latency_gain) + model.step_overhead_s

    rates = np.where(shapes.is_whole[:, 0], floors.gain_rate, 1.0)
    return step_floors(at, mean_products(floors, shapes, recipe), cluster, model, rates)


def latencies(floors: SectionFloors, shapes: PipeShapes, send_s: float) -> tuple[Floats, float]:
    """Bounds on a micro-batch's way through each pipeline and back, [pipes], and what a clock takes off them."""
    counts = shapes.counts[0].sum(axis=0)
    delayed = ~shapes.is_whole[:, 0] * (counts @ floors.delayed)
    return counts @ floors.work - delayed + shapes.sends.sum(axis=1) * send_s, float(counts @ floors.gain)


def mean_products(floors: SectionFloors, shapes: PipeShapes, recipe: Recipe) -> float:
    """Seconds of products in a step, mean over pipeline ranks: as `price_recipe.products_time`."""
    return float((shapes.counts[0] @ floors.products).sum()) * recipe.micro_batches / recipe.pipeline
