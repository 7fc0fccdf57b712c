"""What the cost models say of one choice: where the time goes, and what fills the memory at its peak.

The time is that of a simulated step of one rank (all ranks do the same at the same time): `segment_step` writes it
down, `cost_models.streams` runs it. A `Runtime` says what the prediction is of:

* TODAY: what `compile` runs. Lowering waits for each collective where it stands, so communication is never hidden.
* FORECAST: a runtime that overlaps, as the frameworks of experts' recipes do on GPUs: parameters are gathered a block
  ahead, gradients are reduced behind the backward; only the pieces that computation waits for are exposed, it is slowed
  meanwhile, and what is held for communication under way takes memory, which is added to the peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autoshard.ir.plan import Prediction
from autoshard.ir.program import InputKind
from autoshard.ir.trace import Trace
from cost_models.intervals import step_time_uncertainty
from cost_models.operators import work
from cost_models.streams import Overlap, StreamTimes, simulate_streams
from cost_models.work import Kind, TensorInfo
from passes.build_assignment import PlanningProblem
from passes.enumerate_strategies import Site, ValueInfo, operands_of
from passes.liveness import Interval
from passes.price import dtype_name, local_bytes, operator_name
from passes.segment_step import COPIES, segment_step

HOST = "waiting for the host"
SLOWED = "slowed by communication"
BUFFERS = "communication under way"


@dataclass(frozen=True, slots=True)
class Runtime:
    """What runs a program.

    Args:
        overlap: how it overlaps communication with computation; None: it does not.
        dispatch: how the host issues operators, see `cost_models.device.Device.dispatch`.
    """

    overlap: Overlap | None = None
    dispatch: str = "eager"


TODAY = Runtime()
FORECAST = Runtime(Overlap(), "compiled")


def predict(
    planning: PlanningProblem, choice: Sequence[int], runtime: Runtime = TODAY, *, record: bool = False
) -> Prediction:
    """Predicted step time, peak memory and their parts, per rank.

    Args:
        planning: the problem.
        choice: one option per variable.
        runtime: what runs the program; decides whether communication overlaps.
        record: keep the timeline, for `Plan.trace`; takes longer.
    """
    device = planning.prices.cluster.device
    times = simulate_streams(
        segment_step(planning, choice, shares=not record),
        runtime.overlap,
        dispatch_s=device.dispatch(runtime.dispatch),
        record=record,
    )
    memory = _memory_parts(planning, choice, times)
    tokens, flops = _tokens(planning), _Flops.of(planning, choice)
    uncertainty = step_time_uncertainty("gpu" if device.dispatch_s else "cpu")
    return Prediction(
        step_time_s=times.total_s,
        peak_memory_bytes=sum(memory.values()),
        breakdown=_breakdown(planning, times),
        memory_breakdown=memory,
        tokens_per_s=tokens / times.total_s if tokens and times.total_s > 0 else None,
        mfu=flops.share(flops.model_s / planning.space.mesh.size, times.total_s),
        hfu=flops.share(flops.local_s, times.total_s),
        overlaps=runtime.overlap is not None,
        overlapped={axis: seconds for axis, seconds in times.overlapped_s.items() if seconds > 0},
        step_time_interval_s=None if uncertainty is None else uncertainty.interval(times.total_s),
        interval_coverage=None if uncertainty is None else uncertainty.coverage,
        timeline=None if times.timeline is None else _trace(times),
    )


def _breakdown(planning: PlanningProblem, times: StreamTimes) -> dict[str, float]:
    """Parts of the step: computation by phase, copies of reshards, communication that is waited for, the host."""
    phases = {name: seconds for name, seconds in times.compute_s.items() if name != COPIES}
    parts = {f"{phase} compute": seconds for phase, seconds in phases.items()}
    parts[COPIES] = times.compute_s.get(COPIES, 0.0)
    for axis in planning.space.mesh.axis_names:
        parts[f"communication over {axis}"] = times.exposed_s.get(axis, 0.0)
    extra = {SLOWED: times.slowdown_s, HOST: times.host_s}
    return parts | {name: seconds for name, seconds in extra.items() if seconds > 0}


def _trace(times: StreamTimes) -> Trace:
    assert times.timeline is not None
    spans = times.timeline.spans
    return Trace.of(("any rank",), ((0, span.stream, span.name, span.start_s, span.end_s) for span in spans))


def _memory_parts(planning: PlanningProblem, choice: Sequence[int], times: StreamTimes) -> dict[str, int]:
    """Bytes in use at the peak by what they are; they sum to it."""
    used = planning.usage(choice)
    point = int(np.argmax(used))
    parts = {name: int(size) for name, size in _parts_at(planning, choice, point).items()}
    parts["activations"] += int(used[point]) - sum(parts.values())  # what truncation left
    return parts | ({BUFFERS: int(times.held_bytes)} if times.held_bytes > 0 else {})


def _parts_at(planning: PlanningProblem, choice: Sequence[int], point: int) -> dict[str, float]:
    """Bytes in use at a program point by what they are."""
    space = planning.space
    kinds = {slot.node: slot.kind for slot in space.program.inputs}
    names = ("parameters", "optimizer state", "gradients", "inputs", "activations")
    parts: dict[str, float] = dict.fromkeys(names, 0.0)
    for (name, result), interval in planning.liveness.values.items():
        if _alive(interval, point):
            site = space.sites[name]
            spec = planning.strategy(name, choice).outputs[result]
            size = local_bytes(site.results[result], spec, space.mesh)
            if kinds.get(name) == InputKind.PARAMETER:
                parts["parameters"] += size
                parts["optimizer state"] += size * planning.liveness.state_bytes_per_parameter_byte
            else:
                parts["inputs" if name in kinds else "activations"] += size
    for index, interval in planning.liveness.copies.items():
        if _alive(interval, point):
            link = space.links[index]
            part = "gradients" if link.operand < 0 else "activations"
            parts[part] += planning.copy_bytes(index, choice)
    return parts


def _alive(interval: Interval, point: int) -> bool:
    return interval.birth <= point <= interval.death


def _tokens(planning: PlanningProblem) -> int:
    """Elements of the first integer input."""
    program = planning.space.program
    for slot in program.inputs_of(InputKind.INPUT):
        value = program.nodes[slot.node].meta["val"]
        if not value.dtype.is_floating_point and value.ndim > 0:
            return value.numel()
    return 0


@dataclass(frozen=True, slots=True)
class _Flops:
    """Products and attention, as seconds at one device's peak: the model's, and what each rank runs of them."""

    model_s: float
    local_s: float

    @classmethod
    def of(cls, planning: PlanningProblem, choice: Sequence[int]) -> _Flops:
        """The FLOPs of a choice; alike calls are counted once."""
        model, local = defaultdict[str, float](float), defaultdict[str, float](float)
        for group in planning.members:
            site = planning.space.sites[group[0]]
            if site.node is None or site.node.op != "call_function" or site.rule is None or not operands_of(site.node):
                continue
            _count(planning, site, choice, model, local, len(group))
        device = planning.prices.cluster.device
        seconds = (sum(count / device.peak(dtype) for dtype, count in found.items()) for found in (model, local))
        return cls(*seconds)

    def share(self, busy_s: float, step_time_s: float) -> float | None:
        """Utilisation: time at peak over the step; None where nothing is counted."""
        return busy_s / step_time_s if self.model_s > 0 and step_time_s > 0 else None


def _count(
    planning: PlanningProblem,
    site: Site,
    choice: Sequence[int],
    model: dict[str, float],
    local: dict[str, float],
    calls: int,
) -> None:
    assert site.node is not None
    strategy, mesh = planning.strategy(site.name, choice), planning.space.mesh
    operands = [ValueInfo(tuple(item.meta["val"].shape), item.meta["val"].dtype) for item in operands_of(site.node)]
    arguments = tuple(fx.map_arg(site.node.args, lambda argument: None))
    name = operator_name(site.node)
    whole = work(name, tuple(map(_info, operands)), tuple(map(_info, site.results)), arguments)
    if not whole.products and whole.kind is not Kind.ATTENTION:
        return
    model[whole.dtype] += whole.flops * calls
    inputs = (_info(v, s.local_shape(v.shape, mesh)) for v, s in zip(operands, strategy.inputs, strict=True))
    outputs = (_info(v, s.local_shape(v.shape, mesh)) for v, s in zip(site.results, strategy.outputs, strict=True))
    local[whole.dtype] += work(name, tuple(inputs), tuple(outputs), arguments).flops * calls


def _info(value: ValueInfo, shape: tuple[int, ...] | None = None) -> TensorInfo:
    return TensorInfo(value.shape if shape is None else shape, value.itemsize, dtype_name(value.dtype))
