"""Price a recipe: compute the time of a training step from the prices of a model's layer classes.

1. The blocks are shared out over the stages of the pipeline (`pipeline_stages`). Blocks of one kind are priced once.
2. The time of a stage for one micro-batch is its computation and its exposed communication. The layout has
   collectives (`price_phases`). ZeRO-3 gathers the parameters of each block while the block before it runs. ZeRO-2 and
   ZeRO-3 reduce the gradients of each micro-batch. Offloaded values go to the host and come back beside computation,
   over links of their own.
3. The pipeline's schedule gives the time of all stages and micro-batches.
4. Once per step, gradients are reduced, and parameters are updated and gathered (`price_ends`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.ir.execution import Execution
from cost_models.collectives import all_gather_time, all_reduce_time, point_to_point_time, reduce_scatter_time
from cost_models.compute import memory_time
from cost_models.hardware import Cluster
from cost_models.order_times import StageTimes
from cost_models.streams import concurrent_time, slowed
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import Busy, LayerPrice, PhasePrice
from passes.search.pipeline_stages import Floats, Stage, cuts_backward, layer_counts, rank_counts, stages_time
from passes.search.price_ends import GRADIENT_BYTES, WEIGHT_BYTES, RankLoad, end_times
from passes.search.price_memory import kept_bytes
from passes.search.price_phases import PhaseTime, phase_time
from passes.search.recipe_groups import Groups, in_pieces

HOST = "the host"
"""Key for the seconds of copies to the host and back, in dicts whose other keys are the names of axes."""


class LayerTimes(NamedTuple):
    """Times of one layer of each class for one micro-batch, as arrays [classes].

    They include only exposed communication.

    Args:
        backward_s: seconds of the backward, without recomputation.
        recompute_s: seconds of the recomputation in the backward.
        input_gradient_s, weight_gradient_s: seconds of the two parts of a cut backward, together at least `backward_s`.
        dense, expert: numbers of trained parameters on a rank before ZeRO, outside of experts and in experts.
        communication: for each layer class, the seconds of exposed communication in forward and backward, by axis.
    """

    forward_s: Floats
    backward_s: Floats
    recompute_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats
    dense: Floats
    expert: Floats
    communication: Sequence[Mapping[str, float]]


def layer_times(layers: Mapping[str, LayerPrice], recipe: Execution, groups: Groups, cluster: Cluster) -> LayerTimes:
    """Return the times of one layer of each class under a recipe, in the order of `layers`."""
    rows, communication = [], []
    for name, price in layers.items():
        row, exposed = _layer_time(price, recipe, groups, cluster, is_block=name not in (BEFORE, AFTER))
        rows.append((*row, price.trained, price.trained_experts))
        communication.append(exposed)
    return LayerTimes(*np.array(rows, dtype=float).T, communication=communication)


def _layer_time(
    price: LayerPrice, recipe: Execution, groups: Groups, cluster: Cluster, *, is_block: bool
) -> tuple[tuple[float, ...], Mapping[str, float]]:
    """Return the times of one layer for one micro-batch, and its exposed communication in seconds by axis.

    The times are forward, backward, recomputation, and both parts of a cut backward, as in `LayerTimes`.
    """
    forward, backward = (phase_time(phase, recipe, groups, cluster) for phase in (price.forward, price.backward))
    gathers, copies = sharded_time(price, recipe, groups), copies_time(price, recipe, cluster, is_block=is_block)
    adding_s = memory_time(accumulation_bytes(price, recipe), cluster.device)
    again = _recomputed(price, recipe, groups, cluster, is_block=is_block)
    there = _passing(forward.total_s, forward.total_s, gathers[0], copies[0], recipe)
    first_s = backward.input_gradient_s + again.total_s
    back = _passing(backward.total_s + again.total_s, first_s, gathers[1], copies[1], recipe)
    communication: dict[str, float] = {}
    for part in (forward.communication, there.exposed, backward.communication, again.communication, back.exposed):
        for name, value in part.items():
            communication[name] = communication.get(name, 0.0) + value
    times_s = (
        there.total_s, back.total_s + adding_s - again.total_s, again.total_s, back.first_s - again.total_s,
        backward.weight_gradient_s + adding_s,
    )  # fmt: skip
    return times_s, communication


def _recomputed(price: LayerPrice, recipe: Execution, groups: Groups, cluster: Cluster, *, is_block: bool) -> PhaseTime:
    """Return the time of the forward kernels of a layer that run again in its backward."""
    if not is_block or recipe.recompute == "none":
        return _NOTHING
    if recipe.recompute == "selective":
        return phase_time(PhasePrice(price.forward.core, Busy(), Busy(), ()), recipe, groups, cluster)
    done = price.forward.tail if recipe.runtime.early_stop else Busy()
    return phase_time(price.forward, recipe, groups, cluster, done=done)


_NOTHING = PhaseTime(0.0, {}, 0.0, 0.0, 0.0, 0.0)


class _PassTimes(NamedTuple):
    """Seconds of one forward or backward.

    Args:
        total_s: the whole pass.
        first_s: the first part of a backward that is cut in two.
        exposed: seconds of exposed transfers: "data" for ZeRO's collectives, `HOST` for copies.
    """

    total_s: float
    first_s: float
    exposed: Mapping[str, float]


def _passing(busy_s: float, first_s: float, gather_s: float, copy_s: float, recipe: Execution) -> _PassTimes:
    """Return the times of a forward or backward beside ZeRO's collectives (`gather_s`) and host copies (`copy_s`).

    `busy_s` is the time of the pass without transfers. `first_s` is the time of the first part of a cut backward,
    beside which all transfers run. The recipe's runtime says which transfers overlap with computation.
    """
    overlaps = recipe.runtime.overlap_parameters if recipe.zero == 3 else recipe.runtime.overlap_gradients
    before_s, beside_s = (0.0, gather_s) if overlaps else (gather_s, 0.0)
    waited_s = 0.0 if recipe.runtime.overlap_offload else copy_s
    longest_s = max(beside_s, copy_s - waited_s)
    total_s, gathered_s = (concurrent_time(before_s + busy_s, seconds) for seconds in (longest_s, beside_s))
    first_s = max(longest_s, before_s + first_s + slowed(before_s + busy_s, longest_s))
    copied = {HOST: total_s + waited_s - gathered_s} if copy_s else {}
    return _PassTimes(total_s + waited_s, first_s + waited_s, {"data": gathered_s - busy_s, **copied})


def copies_time(price: LayerPrice, recipe: Execution, cluster: Cluster, *, is_block: bool) -> tuple[float, float]:
    """Return the seconds of copying a layer's kept values to the host, and the seconds of copying them back.

    Both are 0 if the recipe does not offload activations, and for the embedding and the head (`is_block` is False).
    """
    if recipe.offload != "activations" or not is_block:
        return 0.0, 0.0
    kept = kept_bytes(price, recipe, is_block=True)
    return (cluster.device.to_host_time(kept), cluster.device.from_host_time(kept)) if kept else (0.0, 0.0)


def sharded_time(price: LayerPrice, recipe: Execution, groups: Groups) -> tuple[float, float]:
    """Return the seconds of ZeRO's collectives for one layer and one micro-batch, in the forward and in the backward.

    ZeRO-3 gathers parameters in both passes. ZeRO-2 and ZeRO-3 reduce gradients in the backward of each micro-batch, if
    there are several (`Execution.reduces_each`). Parameters of experts are sharded over the ranks that hold the same
    experts. With `Runtime.listed_collectives`, each matrix is gathered by a collective of its own, and vectors are not
    sharded (DeepSpeed's ZeRO-3).
    """
    if not recipe.reduces_each:
        return 0.0, 0.0
    gradient, weight = GRADIENT_BYTES[recipe.runtime.gradient_dtype], WEIGHT_BYTES[recipe.precision]
    dense, expert = price.parameters, price.expert_parameters

    reduce_s = in_pieces(reduce_scatter_time, price.trained * gradient, groups.zero, recipe)
    reduce_s += in_pieces(all_reduce_time, price.trained * gradient / groups.zero.size, groups.outer, recipe)
    if expert:
        reduce_s += in_pieces(reduce_scatter_time, price.trained_experts * gradient, groups.expert_replicas, recipe)
    if recipe.zero < 3:
        return 0.0, reduce_s
    each = max(1, price.matrices) if recipe.runtime.listed_collectives else None
    gather_s = in_pieces(all_gather_time, dense * weight, groups.zero, recipe, count=each)
    if expert:
        gather_s += in_pieces(all_gather_time, expert * weight, groups.expert_replicas, recipe)
    return gather_s, gather_s + reduce_s


@dataclass(frozen=True)
class Step:
    """A priced step under one recipe; each property is computed when it is first read."""

    layers: Mapping[str, LayerPrice]
    stages: Sequence[Stage]
    recipe: Execution
    groups: Groups
    cluster: Cluster

    @cached_property
    def time_s(self) -> float:
        """Seconds of the whole step, with all micro-batches, exposed communication, the bubble and the update."""
        return self._pipe_s + sum(self.end.values())

    @cached_property
    def breakdown(self) -> Mapping[str, float]:
        """Seconds of the step by part, such as "compute" and "pipeline bubble", which sum to `time_s`."""
        recipe, found = self.recipe, dict[str, float]()
        is_late = recipe.pipeline > 1 and not recipe.runtime.overlap_pipeline
        sends_s = 2 * self.send_s * recipe.virtual_stages * recipe.micro_batches if is_late else 0.0
        busy_s = sum(stage.forward_s + stage.backward_s for stage in self.stage_times)
        busy_s *= recipe.micro_batches / recipe.pipeline
        waited_s = 0.0 if recipe.pipeline == 1 else max(0.0, self._pipe_s - busy_s)
        sends_s = min(sends_s, waited_s)
        shares = self.ranks.sum(axis=0) * recipe.micro_batches / recipe.pipeline
        for exposed, share in zip(self.times.communication, shares.tolist(), strict=True):
            for axis, value in exposed.items():
                key = f"communication over {axis}"
                found[key] = found.get(key, 0.0) + value * share
        if waited_s > sends_s:
            found["pipeline bubble"] = waited_s - sends_s
        if sends_s:
            found["communication over pipeline"] = sends_s
        found |= {name: value for name, value in self.end.items() if value}
        return {"compute": self.time_s - sum(found.values()), **found}

    @cached_property
    def _pipe_s(self) -> float:
        return stages_time(self.stage_times, self.recipe)

    @cached_property
    def times(self) -> LayerTimes:
        """Times of one layer of each class for one micro-batch."""
        return layer_times(self.layers, self.recipe, self.groups, self.cluster)

    @cached_property
    def send_s(self) -> float:
        """Seconds of sending one micro-batch's activations from a stage to the next."""
        return send_time(self.layers, self.recipe, self.groups)

    @cached_property
    def stage_times(self) -> Sequence[StageTimes]:
        """Times of each stage for one micro-batch, in the order of the stages."""
        names, times = tuple(self.layers), self.times
        parts = (times.forward_s, times.backward_s, np.zeros(len(names)), times.recompute_s)
        if cuts_backward(self.recipe):
            parts = (times.forward_s, times.input_gradient_s, times.weight_gradient_s, times.recompute_s)
        known: dict[Stage, StageTimes] = {}
        for stage in dict.fromkeys(self.stages):
            counts = layer_counts(names, stage)
            forward_s, first_s, late_s, again_s = (float(counts @ part) for part in parts)
            known[stage] = StageTimes(forward_s, first_s, late_s, self.send_s, again_s)
        return [known[stage] for stage in self.stages]

    @cached_property
    def ranks(self) -> Floats:
        """Number of layers of each class on each pipeline rank, [ranks, classes]."""
        return rank_counts(tuple(self.layers), self.stages, self.recipe)

    @cached_property
    def end(self) -> Mapping[str, float]:
        """Seconds of each part of the step's end (`price_ends.end_times`) on the pipeline rank that takes longest."""
        kinds = dict.fromkeys(map(tuple, self.ranks.tolist()))
        ends = [end_times(load_of(kind, self.times), self.recipe, self.groups, self.cluster) for kind in kinds]
        return max(ends, key=lambda parts: sum(parts.values()))


def load_of(counts: Sequence[float], times: LayerTimes) -> RankLoad:
    """Return the load of a pipeline rank, given its number of layers of each class."""
    parts = (times.dense, times.expert, times.forward_s, times.backward_s + times.recompute_s)
    return RankLoad(*(float(np.dot(counts, part)) for part in parts))


def send_time(layers: Mapping[str, LayerPrice], recipe: Execution, groups: Groups) -> float:
    """Return the seconds to send a block's input for one micro-batch to the next stage.

    Each tensor rank sends a part of the input (Narayanan et al. 2021).
    """
    if recipe.pipeline == 1:
        return 0.0
    whole = max(price.entering_bytes for name, price in layers.items() if name not in (BEFORE, AFTER))
    part = whole if recipe.sequence_parallel else whole / recipe.tensor
    group = groups.neighbours
    link = group.inter if group.inter is not None else group.intra
    assert link is not None, "two stages have a link"
    sent = point_to_point_time(part, link)
    if recipe.tensor > 1 and not recipe.sequence_parallel:
        sent += all_gather_time(whole, groups.tensor)
    return sent


def accumulation_bytes(price: LayerPrice, recipe: Execution) -> float:
    """Return the bytes of device memory that move when a micro-batch's gradients of one layer are added to sums.

    A local sum reads each gradient, and reads and writes the sum. With `Execution.reduces_each`, gradients are reduced
    instead of added. The bytes are then those of FSDP's copy into a flat buffer, and of its cast to the dtype of the
    reduction. Otherwise the result for a single micro-batch is 0.
    """
    gradient = GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    elements = price.trained + price.trained_experts
    if recipe.reduces_each:
        return elements * (4 + (2 + gradient if gradient > 2 else 0))
    return elements * (2 + 2 * gradient) if recipe.micro_batches > 1 else 0.0


def model_flops(layers: Mapping[str, LayerPrice], blocks: Sequence[str], recipe: Execution) -> float:
    """Return the FLOPs of one device in products and attention per step, without recomputation.

    They are a mean over pipeline ranks.
    """
    names = [BEFORE, *blocks, AFTER]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    per_micro = math.fsum(
        (layers[name].forward.busy.flops + layers[name].backward.busy.flops) * count for name, count in counts.items()
    )
    return per_micro * recipe.micro_batches / recipe.pipeline
