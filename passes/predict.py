"""What the cost models say of one choice: where the time goes, and what fills the memory at its peak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from autoshard.ir.plan import Prediction
from autoshard.ir.program import InputKind, tensor_values
from autoshard.ir.reshard import plan_reshard
from autoshard.ir.spec import PartitionSpec
from cost_models.operators import work
from cost_models.work import TensorInfo
from passes.build_assignment import PlanningProblem, needs_of
from passes.enumerate_strategies import Link, operands_of
from passes.liveness import Interval
from passes.price import dtype_name, local_bytes, operator_name


def predict(planning: PlanningProblem, choice: Sequence[int]) -> Prediction:
    """Predicted step time, peak memory and their parts, per rank."""
    breakdown = {"compute": _compute_time(planning, choice)}
    for axis, seconds in _communication_times(planning, choice).items():
        breakdown[f"communication over {axis}"] = seconds
    step_time_s = sum(breakdown.values())
    used = planning.usage(choice)
    peak = int(np.argmax(used))
    tokens = _tokens(planning)
    return Prediction(
        step_time_s=step_time_s,
        peak_memory_bytes=int(used[peak]),
        breakdown=breakdown,
        memory_breakdown=_memory_parts(planning, choice, peak),
        tokens_per_s=tokens / step_time_s if tokens and step_time_s > 0 else None,
        mfu=_utilisation(planning, step_time_s),
    )


def _compute_time(planning: PlanningProblem, choice: Sequence[int]) -> float:
    sites = planning.space.sites.items()
    return sum(planning.prices.call_time(site, planning.strategy(name, choice)) for name, site in sites)


def _communication_times(planning: PlanningProblem, choice: Sequence[int]) -> dict[str, float]:
    """Seconds of resharding by mesh axis, local copies included."""
    times = dict.fromkeys(planning.space.mesh.axis_names, 0.0)
    price = planning.prices.step_price
    for link in planning.space.links:
        tail = planning.space.sites[link.tail]
        value = tail.results[link.result]
        source = planning.strategy(link.tail, choice).outputs[link.result]
        target = _need(planning, link, choice)
        if source != target:
            mesh = planning.space.mesh
            for step in plan_reshard(source, target, value.shape, mesh, itemsize=value.itemsize, cost=price):
                times[step.axis] += price(step)
    return times


def _need(planning: PlanningProblem, link: Link, choice: Sequence[int]) -> PartitionSpec:
    head = planning.space.sites[link.head]
    return needs_of(head, link)[choice[planning.classes[link.head]]]


def _memory_parts(planning: PlanningProblem, choice: Sequence[int], point: int) -> dict[str, int]:
    """Bytes in use at a program point by what they are."""
    space = planning.space
    kinds = {slot.node: slot.kind for slot in space.program.inputs}
    parts = dict.fromkeys(("parameters", "optimizer state", "gradients", "inputs", "activations"), 0.0)
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
    return {name: int(size) for name, size in parts.items()}


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


def _utilisation(planning: PlanningProblem, step_time_s: float) -> float | None:
    """Model FLOPs per second over the peak of all ranks, in the dtype that does most of the work."""
    flops: dict[str, float] = {}
    for site in planning.space.sites.values():
        if site.rule is not None and site.node is not None:
            operands = [operand.meta["val"] for operand in operands_of(site.node)]
            results = [value for value in tensor_values(site.node) if value is not None]
            if not operands:
                continue
            arguments = fx.map_arg(site.node.args, lambda argument: None)
            done = work(operator_name(site.node), _infos(operands), _infos(results), tuple(arguments))
            if done.products or done.kind.value == "attention":
                flops[done.dtype] = flops.get(done.dtype, 0.0) + done.flops
    device = planning.prices.cluster.device
    if not flops or step_time_s <= 0:
        return None
    peak_seconds = sum(count / device.peak(dtype) for dtype, count in flops.items())
    return peak_seconds / planning.space.mesh.size / step_time_s


def _infos(tensors: Sequence) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(tuple(t.shape), t.dtype.itemsize, dtype_name(t.dtype)) for t in tensors)
