"""Price a recipe: from the prices of a model's sections to the time and memory of a training step.

1. Blocks are shared out over the pipeline's stages (`pipeline_stages`). Blocks of one kind are priced once.
2. What a stage takes for one micro-batch is its computation and the communication that nothing hides: collectives of
   the tensor axis (in the backward, beside the products of weight gradients), of the context axis (beside attention),
   of the expert axis, and, where parameters are sharded (ZeRO-3), their gathering, prefetched one block ahead; where
   gradients are (ZeRO-2 and -3), the reduction of those of each micro-batch. What blocks keep may go to the host and
   come back, beside the same computation, on links of its own.
3. The schedule runs them.
4. Once per step gradients are reduced, parameters are updated and gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir.recipe import Recipe
from cost_models.collectives import all_gather_time, all_reduce_time, point_to_point_time, reduce_scatter_time
from cost_models.compute import memory_time
from cost_models.hardware import Cluster
from cost_models.power import power_limit
from cost_models.stages import StageTimes
from cost_models.step import StepModel
from passes.recipes.pipeline_stages import Stage, rank_sections, run_stages
from passes.recipes.price_ends import GRADIENT_BYTES, RankLoad, end_times
from passes.recipes.price_memory import block_bytes
from passes.recipes.recipe_groups import Groups, in_pieces, slowdown, sorting_time, traffic_time
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_sections import EXPERT, Busy, PhasePrice, SectionPrice

HOST = "the host"
"""What copies to the host and back count as in a step's communication."""


@dataclass(frozen=True, slots=True)
class SectionTime:
    """Seconds of a section, once, under a step model, with what is hidden taken off.

    `communication_s` is the part of both that is exposed communication, by axis.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    weight_gradient_s: float
    communication: Mapping[str, float]


def section_time(
    price: SectionPrice, recipe: Recipe, groups: Groups, cluster: Cluster, model: StepModel, *, is_block: bool
) -> SectionTime:
    """What a section takes for one micro-batch."""
    forward = _phase_time(price.forward, recipe, groups, model, cluster, is_backward=False)
    backward = _phase_time(price.backward, recipe, groups, model, cluster, is_backward=True)
    recompute = 0.0
    again: dict[str, float] = {}
    if is_block and recipe.recompute == "full":
        done = computing_time(price.forward.tail, recipe, cluster, model) if recipe.early_stop else 0.0
        again = {**forward, "compute": max(0.0, forward["compute"] - done)}
        recompute = sum(again.values())
    elif is_block and recipe.recompute == "selective":
        recompute = computing_time(price.forward.core, recipe, cluster, model)
        again = {"compute": recompute}
    gathering = sharded_time(price, recipe, groups, cluster, model)
    overlaps = recipe.overlap_parameters if recipe.zero == 3 else recipe.overlap_gradients
    copying = copies_time(price, recipe, cluster, is_block=is_block)
    parts = {
        "forward": (forward, gathering[0], copying[0]),
        "backward": (_sum(backward, again), gathering[1], copying[1]),
    }
    shown: dict[str, float] = {}
    totals = {}
    for name, (times, gather_s, copy_s) in parts.items():
        alone = sum(times.values())
        busy, beside = (alone, gather_s) if overlaps else (alone + gather_s, 0.0)
        gathered = model.beside(busy, beside)
        totals[name] = model.beside(busy, max(beside, copy_s))
        shown = _sum(shown, {axis: value for axis, value in times.items() if axis != "compute"})
        shown = _sum(shown, {"data": gathered - alone, **({HOST: totals[name] - gathered} if copy_s else {})})
    summing = adding_time(price, recipe, cluster, model)
    totals["backward"] += summing
    late = price.backward.busy.weight_gradient_s * model.matmul_slowdown + summing
    late = min(late, totals["backward"] - recompute)
    return SectionTime(totals["forward"], totals["backward"] - recompute, recompute, late, shown)


def _sum(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + two.get(name, 0.0) for name in {**one, **two}}


def computing_time(busy: Busy, recipe: Recipe, cluster: Cluster, model: StepModel) -> float:
    """Seconds of computation, or of issuing it where that takes longer; both where the host waits for each kernel."""
    device_s = (
        busy.matmul_s * model.matmul_slowdown
        + busy.attention_s * model.attention_slowdown
        + busy.memory_s * model.memory_slowdown
    )
    if recipe.blocking_launches:
        return device_s + busy.kernels * cluster.device.dispatch("blocking")
    issue_s = busy.kernels * cluster.device.dispatch("graph" if recipe.cuda_graph else "eager")
    return max(device_s, issue_s)


def _phase_time(
    phase: PhasePrice, recipe: Recipe, groups: Groups, model: StepModel, cluster: Cluster, *, is_backward: bool
) -> dict[str, float]:
    """Seconds of a phase: "compute", and what of each axis's communication is exposed."""
    times = {"compute": computing_time(phase.busy, recipe, cluster, model)}
    times["compute"] += sum(sorting_time(item, recipe, cluster, model) for item in phase.traffic)
    if recipe.blocking_launches:
        times["compute"] += len(phase.traffic) * cluster.device.dispatch("blocking")
    budgets = {
        "tensor": recipe.overlap_tensor * is_backward * phase.busy.weight_gradient_s * model.matmul_slowdown,
        "context": phase.busy.attention_s * model.attention_slowdown,
        "expert": times["compute"] if recipe.overlap_expert else 0.0,
    }
    for axis, budget in budgets.items():
        sent = sum(traffic_time(item, recipe, groups, model) for item in phase.traffic if item.axis == axis)
        hidden = min(sent, budget)
        if axis == EXPERT:
            hidden *= 1 - 1 / recipe.micro_batches  # one forward and one backward of a step have no other beside them
        if sent:
            times[axis] = sent - hidden + model.interference * hidden
    return times


def copies_time(price: SectionPrice, recipe: Recipe, cluster: Cluster, *, is_block: bool) -> tuple[float, float]:
    """Seconds in which what a section keeps goes to the host, and comes back; the ends' stays on the device."""
    if recipe.offload != "activations" or not is_block:
        return 0.0, 0.0
    kept = block_bytes(price, recipe)
    return (cluster.device.to_host_time(kept), cluster.device.from_host_time(kept)) if kept else (0.0, 0.0)


def sharded_time(
    price: SectionPrice, recipe: Recipe, groups: Groups, cluster: Cluster, model: StepModel
) -> tuple[float, float]:
    """Seconds of gathering a section's parameters in the forward, and again with reducing their gradients after.

    ZeRO-3 gathers; ZeRO-2 reduces too, where there are several micro-batches (`Recipe.reduces_each`). Experts are
    shared out among the ranks that hold the same ones. Where collectives take lists, each matrix is gathered by
    itself, and vectors stay whole (DeepSpeed's ZeRO-3).
    """
    if not recipe.reduces_each:
        return 0.0, 0.0
    gradient = GRADIENT_BYTES[recipe.gradient_dtype]
    dense, expert = price.parameters, price.expert_parameters
    reduce_s = in_pieces(reduce_scatter_time, dense * gradient, groups.zero, recipe, cluster, model)
    reduce_s += in_pieces(all_reduce_time, dense * gradient / groups.zero.size, groups.outer, recipe, cluster, model)
    if expert:
        reduce_s += in_pieces(reduce_scatter_time, expert * gradient, groups.expert_replicas, recipe, cluster, model)
    if recipe.zero < 3:
        return 0.0, reduce_s
    each = max(1, price.matrices) if recipe.listed_collectives else None
    gather_s = in_pieces(all_gather_time, dense * 2, groups.zero, recipe, cluster, model, count=each)
    if expert:
        gather_s += in_pieces(all_gather_time, expert * 2, groups.expert_replicas, recipe, cluster, model)
    return gather_s, gather_s + reduce_s


@dataclass(frozen=True, slots=True)
class StepPrice:
    """The time of a step and where it goes, seconds."""

    time_s: float
    breakdown: Mapping[str, float]
    in_flight: tuple[float, ...]


def step_price(
    sections: Mapping[str, SectionPrice],
    stages: Sequence[Stage],
    recipe: Recipe,
    groups: Groups,
    cluster: Cluster,
    model: StepModel,
) -> StepPrice:
    """The time of a step; on a device with a power limit, at the clock that the step leaves products."""
    first = _step_price(sections, stages, recipe, groups, cluster, model)
    if cluster.device.matmul.units == 1:
        return first
    duty = min(1.0, products_time(sections, stages, recipe, model) / first.time_s)
    return _step_price(sections, stages, recipe, groups, cluster, model.at_speed(power_limit().speed(duty)))


def products_time(
    sections: Mapping[str, SectionPrice], stages: Sequence[Stage], recipe: Recipe, model: StepModel
) -> float:
    """Seconds of matrix products and attention in a step, mean over pipeline ranks, recomputed ones included."""
    total = 0.0
    for name, count in (item for stage in stages for item in stage.sections):
        total += count * sum(section_products(sections[name], recipe, model, is_block=name not in (BEFORE, AFTER)))
    return total * recipe.micro_batches / recipe.pipeline


def section_products(price: SectionPrice, recipe: Recipe, model: StepModel, *, is_block: bool) -> tuple[float, float]:
    """Seconds of matrix products and attention in a section's forward, and in its backward with what is recomputed."""

    def seconds(busy: Busy) -> float:
        return busy.matmul_s * model.matmul_slowdown + busy.attention_s * model.attention_slowdown

    again = {"none": Busy(), "selective": price.forward.core, "full": price.forward.busy}
    recomputed = seconds(again[recipe.recompute]) if is_block else 0.0
    return seconds(price.forward.busy), seconds(price.backward.busy) + recomputed


def _step_price(
    sections: Mapping[str, SectionPrice],
    stages: Sequence[Stage],
    recipe: Recipe,
    groups: Groups,
    cluster: Cluster,
    model: StepModel,
) -> StepPrice:
    times = {
        name: section_time(price, recipe, groups, cluster, model, is_block=name not in (BEFORE, AFTER))
        for name, price in sections.items()
    }
    stage_times = [_stage_times(stage, times, sections, recipe, groups, model) for stage in stages]
    pipe_s, bubble_s, in_flight = run_stages(stage_times, recipe)
    ranks = rank_sections(stages, recipe)
    kinds = [dict(kind) for kind in dict.fromkeys(tuple(counts.items()) for counts in ranks)]
    ends = [end_times(load_of(counts, sections, times), recipe, groups, cluster, model) for counts in kinds]
    end = max(ends, key=lambda parts: sum(parts.values()))
    total = pipe_s + sum(end.values()) + model.step_overhead_s
    breakdown: dict[str, float] = {}
    for name, time in times.items():
        count = sum(counts.get(name, 0) for counts in ranks)
        for axis, value in time.communication.items():
            key = f"communication over {axis}"
            breakdown[key] = breakdown.get(key, 0.0) + value * count * recipe.micro_batches / recipe.pipeline
    if bubble_s:
        breakdown["pipeline bubble"] = bubble_s
    sends = 2 * stage_times[0].send_s * recipe.virtual_stages * recipe.micro_batches if recipe.pipeline > 1 else 0.0
    if sends and not recipe.overlap_pipeline:
        breakdown["communication over pipeline"] = min(sends, max(0.0, pipe_s - bubble_s))
    breakdown |= {name: value for name, value in end.items() if value}
    if model.step_overhead_s:
        breakdown["overhead"] = model.step_overhead_s
    compute = total - sum(breakdown.values())
    return StepPrice(total, {"compute": compute, **breakdown}, in_flight)


def _stage_times(
    stage: Stage,
    times: Mapping[str, SectionTime],
    sections: Mapping[str, SectionPrice],
    recipe: Recipe,
    groups: Groups,
    model: StepModel,
) -> StageTimes:
    forward = sum(times[name].forward_s * count for name, count in stage.sections)
    backward = sum(times[name].backward_s * count for name, count in stage.sections)
    late = sum(times[name].weight_gradient_s * count for name, count in stage.sections)
    again = sum(times[name].recompute_s * count for name, count in stage.sections)
    return StageTimes(forward, backward - late, late, send_time(sections, recipe, groups, model), again)


def send_time(sections: Mapping[str, SectionPrice], recipe: Recipe, groups: Groups, model: StepModel) -> float:
    """Seconds of handing a block's input to the next stage; each tensor rank sends its part (Narayanan et al. 2021)."""
    if recipe.pipeline == 1:
        return 0.0
    whole = max(price.entering_bytes for name, price in sections.items() if name not in (BEFORE, AFTER))
    part = whole if recipe.sequence_parallel else whole / recipe.tensor
    group = groups.neighbours
    link = group.inter if group.inter is not None else group.intra
    assert link is not None, "two stages have a link"
    sent = point_to_point_time(part, link) * slowdown(group, model)
    if recipe.tensor > 1 and not recipe.sequence_parallel:
        sent += all_gather_time(whole, groups.tensor) * model.fabric_slowdown
    return sent


def load_of(
    counts: Mapping[str, int], sections: Mapping[str, SectionPrice], times: Mapping[str, SectionTime]
) -> RankLoad:
    """The load of a rank that has each section so often."""
    mine = [(sections[name], times[name], count) for name, count in counts.items()]
    return RankLoad(
        dense=sum(price.parameters * count for price, _, count in mine),
        expert=sum(price.expert_parameters * count for price, _, count in mine),
        tensors=sum(price.tensors * count for price, _, count in mine),
        forward_s=sum(time.forward_s * count for _, time, count in mine),
        backward_s=sum((time.backward_s + time.recompute_s) * count for _, time, count in mine),
    )


def adding_time(price: SectionPrice, recipe: Recipe, cluster: Cluster, model: StepModel) -> float:
    """Seconds of adding a micro-batch's gradients to those before it; nothing runs beside that."""
    return memory_time(accumulation_bytes(price, recipe), cluster.device) * model.memory_slowdown


def accumulation_bytes(price: SectionPrice, recipe: Recipe) -> float:
    """Bytes moved to add a micro-batch's gradients to those before it, or to lay out those that are reduced at once.

    Gradients come in two bytes an element and are added to a sum that is read and written. FSDP copies them into its
    flat buffer, and casts that to the dtype in which it reduces.
    """
    gradient = GRADIENT_BYTES[recipe.gradient_dtype]
    elements = price.parameters + price.expert_parameters
    if recipe.reduces_each:
        return elements * (4 + (2 + gradient if gradient > 2 else 0))
    return elements * (2 + 2 * gradient) if recipe.micro_batches > 1 else 0.0


def model_flops(sections: Mapping[str, SectionPrice], blocks: Sequence[str], recipe: Recipe) -> float:
    """FLOPs of products and attention in a step on one rank, nothing recomputed."""
    names = [BEFORE, *blocks, AFTER]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    per_micro = math.fsum(
        (sections[name].forward.busy.flops + sections[name].backward.busy.flops) * count
        for name, count in counts.items()
    )
    return per_micro * recipe.micro_batches / recipe.pipeline
