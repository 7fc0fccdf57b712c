"""Predict the step time and the peak memory of a plan without pipeline stages, each with its parts.

`cost_models.streams` simulates the step that `walk_program` read off the lowered program. One rank is simulated,
because all ranks run in lockstep. Computation overlaps with collectives that the program starts early and waits for
late, if the cluster allows overlap (`overlap_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.offload import LABEL
from autoshard.ir.plan_parts import Prediction
from autoshard.ir.program import InputKind, may_be_tokens
from autoshard.ir.recompute import PHASE
from autoshard.ir.trace import Trace
from cost_models.intervals import KERNELS, MEASURED, step_time_uncertainty
from cost_models.streams import StreamTimes, overlap_of, simulate_streams
from cost_models.timeline import Timeline
from passes.memory.lowered_memory import StepMemory
from passes.planning.build_assignment import PlanningProblem
from passes.prediction.expert_load import expert_load
from passes.prediction.utilisation import utilisation
from passes.prediction.walk_program import COPIES, WalkedStep

HOST = "waiting for the host"
SLOWED = "slowed by communication"


def predict(
    planning: PlanningProblem,
    choice: Sequence[int],
    walked: WalkedStep,
    memory: StepMemory,
    kernels: Kernels = NO_KERNELS,
    *,
    dispatch: str = "eager",
) -> Prediction:
    """Return the predicted step time and peak memory of a rank, with their parts.

    Args:
        walked: the step as read off the lowered program of `choice`.
        memory: the peak memory of `choice`, in the program without fused kernels.
        kernels: the fused kernels in the step.
        dispatch: how the host issues operators ("eager", "graph"; `cost_models.device.Device.dispatch`).
    """
    cluster, micro_batches = planning.prices.cluster, planning.liveness.micro_batches
    dispatch_s = cluster.device.dispatch(dispatch)
    times = simulate_streams(walked.segments, overlap_of(cluster), dispatch_s=dispatch_s)
    tokens = micro_batches * _tokens(planning)
    mfu, hfu = utilisation(planning, choice).shares(times.total_s / micro_batches)
    uncertainty = step_time_uncertainty(KERNELS if cluster.device.dispatch_s else MEASURED)
    return Prediction(
        step_time_s=times.total_s,
        peak_memory_bytes=memory.peak_bytes,
        breakdown=_breakdown(planning, times),
        memory_breakdown=memory.parts,
        tokens_per_s=tokens / times.total_s if tokens and times.total_s > 0 else None,
        mfu=mfu,
        hfu=hfu,
        overlapped={axis: seconds for axis, seconds in times.overlapped_s.items() if seconds > 0},
        launches=sum(op.launches for segment in walked.segments for op in segment.ops),
        sent_bytes=walked.sent_bytes,
        expert_load=expert_load(planning, choice),
        step_time_interval_s=None if uncertainty is None else uncertainty.interval(times.total_s),
        interval_coverage=None if uncertainty is None else uncertainty.coverage,
        kernels=kernels,
        timeline=trace_of(times.timeline),
    )


def _breakdown(planning: PlanningProblem, times: StreamTimes) -> dict[str, float]:
    """Return the predicted step in seconds by part.

    The parts are computation of each phase, copies of reshards, and exposed communication over each axis. Two more are
    the slowdown by communication and the waits for the host, unless they are zero.
    """
    parts = {name_of_part(label): seconds for label, seconds in times.compute_s.items() if label != COPIES}
    parts[COPIES] = times.compute_s.get(COPIES, 0.0)
    for axis in planning.space.mesh.axis_names:
        parts[f"communication over {axis}"] = times.exposed_s.get(axis, 0.0)
    extra = {SLOWED: times.slowdown_s, HOST: times.host_s}
    return parts | {name: seconds for name, seconds in extra.items() if seconds > 0}


def name_of_part(label: str) -> str:
    """Return the name of the part of a step that has the computation with a label, such as "forward compute"."""
    return label if label in (COPIES, PHASE, LABEL) else f"{label} compute"


def trace_of(line: Timeline) -> Trace:
    """Convert a simulated timeline to the form that a plan stores, with one span for each simulated operation."""
    spans = ((span.process, span.stream, span.name, span.start_s, span.end_s) for span in line.spans)
    return Trace.of(line.processes, spans)


def _tokens(planning: PlanningProblem) -> int:
    """Return the number of elements of the first integer input of one micro-batch, or 0 without such an input."""
    for slot in planning.space.program.inputs_of(InputKind.INPUT):
        (value,) = planning.space.sites[slot.node].results
        if may_be_tokens(value.shape, value.dtype):
            return math.prod(value.shape)
    return 0
