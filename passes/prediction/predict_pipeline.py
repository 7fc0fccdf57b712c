"""Predict the step time and memory of a pipeline, from its stages' lowered programs and its schedule.

The schedule is simulated (`cost_models.order_times`) with the time of each phase of a stage (`walk_program`), and with
the time of each value that crosses ranks. Parts of the step time are means over ranks. The predicted memory is that of
the fullest rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.pipeline_order import PipelineOrder, Work
from autoshard.ir.plan_parts import Prediction
from autoshard.ir.program import InputKind, may_be_tokens
from autoshard.ir.staged import PIPELINE_AXIS, StagedProgram, StageProgram
from cost_models.collectives import point_to_point_time
from cost_models.hardware import Cluster
from cost_models.intervals import KERNELS, MEASURED, step_time_uncertainty
from cost_models.order_times import RankTimes, Transfer, order_times
from cost_models.schedule_orders import ActionKind, Rows
from cost_models.streams import Op, Segment, StreamTimes, overlap_of, simulate_streams
from passes.memory.pipeline_memory import RankMemory, crossing_bytes, pipeline_memory
from passes.prediction.predict import HOST, SLOWED, name_of_part, trace_of
from passes.prediction.walk_program import ACCUMULATION, ADDING_UP, walk_program
from passes.strategies.price_nodes import NodePrices

BUBBLE = "bubble"

_INPUTS, _WEIGHTS = "backward, inputs", "backward, weights"
WORKS = {
    "forward": Work.FORWARD,
    "backward": Work.BACKWARD,
    _INPUTS: Work.BACKWARD_INPUT,
    _WEIGHTS: Work.BACKWARD_WEIGHT,
}
"""Name of a stage's phase → kind of the task that runs the phase."""


@dataclass(frozen=True, slots=True)
class PipelinePrediction:
    """The prediction of a pipeline's step.

    Args:
        whole: prediction of the whole step.
        stages: each stage's prediction. Its step time is the time in which the stage is busy, and its memory is that of
            its rank.
        memory: peak memory of each pipeline rank.
    """

    whole: Prediction
    stages: tuple[Prediction, ...]
    memory: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True)
class _Walked:
    """The simulated times of one stage's phases.

    Args:
        phases: name of a phase → its simulated times in one run.
        runs: name of a phase → its runs in a step; 1 if absent.
        sent_bytes: mesh axis → the bytes that a rank sends over this axis in a step.
        launches: number of kernel launches in a step.
    """

    phases: Mapping[str, StreamTimes]
    runs: Mapping[str, int]
    sent_bytes: Mapping[str, float]
    launches: int

    def seconds(self, name: str) -> float:
        return self.phases[name].total_s if name in self.phases else 0.0


def predict_pipeline(staged: StagedProgram, mesh: Mesh, cluster: Cluster, *, clips_norm: bool) -> PipelinePrediction:
    """Predict step time and peak memory of a pipeline's step, with their parts.

    Args:
        staged: the lowered stages, and the order of each rank's tasks.
        mesh: the whole mesh, with the pipeline's axis.
        clips_norm: whether gradients are clipped to a norm over all stages.
    """
    order = staged.order
    alike = dict[tuple[fx.GraphModule, int], _Walked]()  # by forward and number of runs
    walked = list[_Walked]()
    for number, stage in enumerate(staged.stages):
        key = stage.phased.forward, runs_of_phases(order, number)["forward"]
        if key not in alike:
            alike[key] = _walk(stage, cluster, order, number)
        walked.append(alike[key])
    times, timeline = order_times(
        order_rows(order),
        order.stage_ranks,
        np.array([[item.seconds(name) for name in WORKS] for item in walked]),
        _transfers(staged, mesh, cluster),
        once_s=np.array([item.seconds("hoisted") for item in walked]),
        update_s=np.array([item.seconds("update") for item in walked]),
        clips_norm=clips_norm,
    )
    memory = pipeline_memory(staged)
    fullest = max(memory, key=lambda item: item.peak_bytes)
    busy = [_busy_s(item) for item in walked]
    uncertainty = step_time_uncertainty(KERNELS if cluster.device.dispatch_s else MEASURED)
    whole = Prediction(
        step_time_s=times.total_s,
        peak_memory_bytes=fullest.peak_bytes,
        breakdown=_breakdown(walked, times.ranks),
        memory_breakdown=fullest.parts,
        tokens_per_s=_tokens_per_s(staged, times.total_s),
        mfu=_share([stage.plan.predicted.mfu for stage in staged.stages], staged, times.total_s, len(memory)),
        hfu=_share([stage.plan.predicted.hfu for stage in staged.stages], staged, times.total_s, len(memory)),
        launches=max(_by_rank(staged, [item.launches for item in walked])),
        sent_bytes=_sent_bytes(staged, walked),
        step_time_interval_s=None if uncertainty is None else uncertainty.interval(times.total_s),
        interval_coverage=None if uncertainty is None else uncertainty.coverage,
        timeline=trace_of(timeline),
    )
    stages = tuple(
        replace(
            stage.plan.predicted,
            step_time_s=seconds_busy,
            peak_memory_bytes=memory[rank].peak_bytes,
            memory_breakdown=memory[rank].parts,
            breakdown=_parts([item]),
        )
        for stage, item, seconds_busy, rank in zip(staged.stages, walked, busy, order.stage_ranks, strict=True)
    )
    return PipelinePrediction(whole, stages, memory)


def order_rows(order: PipelineOrder) -> list[Rows]:
    """Return the tasks of each rank as rows of `cost_models.order_times`: (stage, kind, micro-batch, 0).

    Sends and receives are left out.
    """
    return [
        np.array(
            [
                (task.stage, ActionKind[task.work.name], task.micro_batch, 0)
                for task in (task for slot in slots for task in slot)
                if not task.work.is_transfer
            ]
        )
        for slots in order.ranks
    ]


def _walk(stage: StageProgram, cluster: Cluster, order: PipelineOrder, number: int) -> _Walked:
    phases, sent_bytes = segments_of_stage(stage, cluster, order)
    slowdown, dispatch_s = overlap_of(cluster), cluster.device.dispatch("eager")
    runs = runs_of_phases(order, number)
    times = {name: simulate_streams((segment,), slowdown, dispatch_s=dispatch_s) for name, segment in phases.items()}
    launches = sum(runs.get(name, 1) * op.launches for name, segment in phases.items() for op in segment.ops)
    return _Walked(times, runs, sent_bytes, launches)


def segments_of_stage(
    stage: StageProgram, cluster: Cluster, order: PipelineOrder
) -> tuple[dict[str, Segment], Mapping[str, float]]:
    """Return the segment of each phase of a stage by the phase's name, and the bytes that it sends over each axis."""
    prices = NodePrices(cluster, stage.plan.mesh)
    step = walk_program(stage.phased, prices, micro_batches=order.micro_batches)
    phases: dict[str, Segment] = {segment.name: segment for segment in step.segments if segment.name != ACCUMULATION}
    halves = stage.phased.halves
    if halves is not None:
        for name, half in ((_INPUTS, halves.inputs), (_WEIGHTS, halves.weights)):
            walked = walk_program(replace(stage.phased, backward=half), prices).segments
            phases[name] = next(segment for segment in walked if segment.name == "backward")
    for name in ("backward", _WEIGHTS):
        if name in phases:
            phases[name] = _with_adding(phases[name], step.adding_s * (1 - 1 / order.micro_batches))
    return phases, step.sent_bytes


def _with_adding(backward: Segment, seconds: float) -> Segment:
    """Return a backward that also adds its gradients to sums over micro-batches, in `seconds`.

    The first micro-batch adds nothing, so `seconds` is the mean over all micro-batches.
    """
    return replace(backward, ops=(*backward.ops, Op(ADDING_UP, ACCUMULATION, seconds))) if seconds else backward


def runs_of_phases(order: PipelineOrder, stage: int) -> dict[str, int]:
    """Return the number of runs of each phase of a stage in a step, by the phase's name."""
    tasks = Counter(task.work for slots in order.ranks for slot in slots for task in slot if task.stage == stage)
    return {name: tasks[work] for name, work in WORKS.items()}


def _busy_s(walked: _Walked) -> float:
    return sum(times.total_s * walked.runs.get(name, 1) for name, times in walked.phases.items())


def _transfers(staged: StagedProgram, mesh: Mesh, cluster: Cluster) -> dict[Transfer, float]:
    """Return the seconds that each value takes between two stages.

    A value crosses the network if, in one of the parallel pipelines, the ranks of the two stages are in different
    nodes.
    """
    found: dict[Transfer, float] = {}
    is_near = cache(lambda *places: _share_a_node(mesh, places, cluster))
    for item in staged.crossings:
        ends = (staged.order.stage_ranks[item.maker], staged.order.stage_ranks[item.reader])
        link = cluster.intra if is_near(*ends) else cluster.inter
        assert link is not None, "two stages have a link"
        size = crossing_bytes(staged, item.name, item.maker, is_forward=item.is_forward)
        found[Transfer(item.name, item.maker, item.reader, item.is_forward)] = point_to_point_time(size, link)
    return found


def _share_a_node(mesh: Mesh, places: tuple[int, int], cluster: Cluster) -> bool:
    """Whether two pipeline ranks are in the same node, in each of the parallel pipelines.

    `places` has the two indices along the axis "pipeline".
    """
    axes = mesh.axis_names
    stride = math.prod(mesh.shape[axes.index(PIPELINE_AXIS) + 1 :])
    span = stride * mesh.axis_size(PIPELINE_AXIS)
    firsts = (outer + inner for outer in range(0, mesh.size, span) for inner in range(stride))
    maker, reader = (place * stride for place in places)
    return all(
        (rank + maker) // cluster.devices_per_node == (rank + reader) // cluster.devices_per_node for rank in firsts
    )


def _parts(walked: Sequence[_Walked]) -> dict[str, float]:
    """Return the busy seconds of a step by part, summed over stages.

    The parts are those of `predict._breakdown`.
    """
    found = defaultdict[str, float](float)
    for stage in walked:
        for name, times in stage.phases.items():
            runs = stage.runs.get(name, 1)
            for label, seconds in times.compute_s.items():
                found[name_of_part(label)] += runs * seconds
            for axis, seconds in times.exposed_s.items():
                found[f"communication over {axis}"] += runs * seconds
            found[SLOWED] += runs * times.slowdown_s
            found[HOST] += runs * times.host_s
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _breakdown(walked: Sequence[_Walked], ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return the seconds of a step by part, averaged over pipeline ranks. The parts add up to the step time."""
    parts = {name: seconds / len(ranks) for name, seconds in _parts(walked).items()}
    parts[f"communication over {PIPELINE_AXIS}"] = sum(rank.exposed_send_s for rank in ranks) / len(ranks)
    parts[BUBBLE] = sum(rank.bubble_s for rank in ranks) / len(ranks)
    return parts


def _by_rank(staged: StagedProgram, values: Sequence[int]) -> list[int]:
    found = [0] * (max(staged.order.stage_ranks) + 1)
    for rank, value in zip(staged.order.stage_ranks, values, strict=True):
        found[rank] += value
    return found


def _sent_bytes(staged: StagedProgram, walked: Sequence[_Walked]) -> dict[str, float]:
    """Return for each mesh axis the bytes that a rank sends over it in a step, of the rank that sends most."""
    order = staged.order
    found = defaultdict[str, list[float]](lambda: [0.0] * (max(order.stage_ranks) + 1))
    for rank, item in zip(order.stage_ranks, walked, strict=True):
        for axis, size in item.sent_bytes.items():
            found[axis][rank] += size
    for item in staged.crossings:
        rank = order.stage_ranks[item.maker]
        if rank != order.stage_ranks[item.reader]:
            size = crossing_bytes(staged, item.name, item.maker, is_forward=item.is_forward)
            found[PIPELINE_AXIS][rank] += size * order.micro_batches
    return {axis: max(sizes) for axis, sizes in found.items()}


def _tokens_per_s(staged: StagedProgram, total_s: float) -> float | None:
    """Return the tokens of a step per second of step time, or None without an integer input.

    Tokens are the elements of the first integer input in all micro-batches.
    """
    crossing = {item.name for item in staged.crossings}
    slots = (slot for stage in staged.stages for slot in stage.phased.lowered.inputs)
    for slot in slots:
        is_of_model = slot.slot.kind is InputKind.INPUT and slot.slot.name not in crossing
        if is_of_model and may_be_tokens(slot.shape, slot.dtype) and total_s > 0:
            return math.prod(slot.shape) * staged.order.micro_batches / total_s
    return None


def _share(shares: Sequence[float | None], staged: StagedProgram, total_s: float, ranks: int) -> float | None:
    """Return the utilisation (MFU or HFU) of all ranks in a step of `total_s` seconds.

    `shares` has the utilisation of each stage during the step of its own plan; None for a stage without matrix
    products. The result is None if all stages have None.
    """
    if total_s <= 0 or all(share is None for share in shares):
        return None
    plans = [stage.plan.predicted.step_time_s for stage in staged.stages]
    return sum((share or 0.0) * seconds for share, seconds in zip(shares, plans, strict=True)) / (ranks * total_s)
