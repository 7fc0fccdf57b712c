"""Predict the step of a compiled program operator by operator, with the names of its ranges in profiles.

Without a pipeline, the spans are those of the simulated step. With a pipeline, each task of the simulated order (the
forward or backward of a micro-batch) has the spans of its phase. A pipeline rank waits between its tasks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import fx
from torch._ops import OpOverload

from autoshard.graphs.name_ranges import range_name
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import group_axes
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.profile import PredictedSteps, RangeCost, RangeSpan, StepSpans
from autoshard.ir.range_names import RECEIVING
from autoshard.ir.request import CompiledProgram
from autoshard.ir.staged import StagedProgram
from autoshard.ir.trace import TraceSpan
from autoshard.kernels.native import SEMANTIC
from autoshard.kernels.offload import TRANSFERS
from cost_models.hardware import Cluster
from cost_models.operators import work
from cost_models.refit import constant_of_link, constant_of_memory, constant_of_work
from cost_models.streams import Segment, overlap_of, simulate_streams
from cost_models.timeline import COMPUTE
from passes.prediction.predict_pipeline import WORKS, predict_pipeline, runs_of_phases, segments_of_stage
from passes.prediction.walk_program import ACCUMULATION, ADDING_UP, walk_program
from passes.strategies.collective_nodes import collective_of, exchanges
from passes.strategies.local_tracer import IS_RESHARD
from passes.strategies.price_nodes import STRIDED_COPY, NodePrices
from passes.strategies.tensor_infos import tensor_infos

_BACKWARD = "backward"
_TASK = re.compile(r"(?P<stage>\d+)(?P<work>[A-Z])\d+")
_PHASES = {work.value: phase for phase, work in WORKS.items()}
"""Letter of a task in a simulated order → the phase that the task runs."""


def predict_steps(compiled: CompiledProgram, cluster: Cluster) -> PredictedSteps:
    """Return the predicted step of a compiled training program, with the predicted seconds of each operator.

    Raises:
        UnknownOperatorError: an operator has no cost formula.
    """
    plan = compiled.plan
    assert plan is not None, "it was planned"
    if compiled.staged is not None:
        has_norm = compiled.update is not None and compiled.update.has_norm
        return _of_stages(compiled.staged, plan.mesh, cluster, clips_norm=has_norm)
    prices = NodePrices(cluster, plan.mesh)
    walked = walk_program(compiled.phased, prices, plan.micro_batches)
    names = _names_of(compiled.phased)
    step = _step(walked.segments, names, cluster)
    runs = {"forward": plan.micro_batches, _BACKWARD: plan.micro_batches}
    return PredictedSteps((step,), (tuple(_costs(compiled.phased.phases, prices, runs)),), cluster)


def _of_stages(staged: StagedProgram, mesh: Mesh, cluster: Cluster, *, clips_norm: bool) -> PredictedSteps:
    order = staged.order
    predicted = predict_pipeline(staged, mesh, cluster, clips_norm=clips_norm).whole
    assert predicted.timeline is not None, "a pipeline has a timeline"
    total_ns = round(predicted.step_time_s * 1e9)
    steps, costs = list[StepSpans](), list[tuple[RangeCost, ...]]()
    phases: dict[tuple[int, str], StepSpans] = {}
    for number, stage in enumerate(staged.stages):
        names = _names_of(stage.phased)
        for phase, segment in segments_of_stage(stage, cluster, order)[0].items():
            phases[number, phase] = _step((segment,), names, cluster)
    for rank in range(len(order.ranks)):
        own = [number for number, at in enumerate(order.stage_ranks) if at == rank]
        tasks = [span for span in predicted.timeline.spans if span.process == rank and span.stream == COMPUTE]
        steps.append(StepSpans(total_ns, tuple(_filled(tasks, own, phases, total_ns))))
        stages = ((staged.stages[number], runs_of_phases(order, number)) for number in own)
        costs.append(
            tuple(
                cost
                for stage, runs in stages
                for cost in _costs(stage.phased.phases, NodePrices(cluster, stage.plan.mesh), runs)
            )
        )
    return PredictedSteps(tuple(steps), tuple(costs), cluster)


def _filled(
    tasks: Iterable[TraceSpan], own: list[int], phases: Mapping[tuple[int, str], StepSpans], total_ns: int
) -> Iterator[RangeSpan]:
    """Yield the spans of a pipeline rank's tasks, and its waits between tasks. `own` has the rank's stages."""
    free_ns, begun = 0, set[int]()
    for task in sorted(tasks, key=lambda span: span.start_ns):
        if task.start_ns > free_ns:
            yield RangeSpan(RECEIVING, free_ns, task.start_ns)
        free_ns = task.start_ns
        for step in _steps_of(task, own, phases, begun):
            yield from (_moved(span, free_ns) for span in step.spans)
            free_ns += step.duration_ns
        free_ns = max(free_ns, task.start_ns + task.duration_ns)
    if free_ns < total_ns:
        yield RangeSpan(RECEIVING, free_ns, total_ns)


def _steps_of(
    task: TraceSpan, own: list[int], phases: Mapping[tuple[int, str], StepSpans], begun: set[int]
) -> Iterator[StepSpans]:
    """Yield the spans of the phases that a task runs.

    The first task of a stage also runs the hoisted phase, which is computed once for all micro-batches. The task of the
    update runs the updates of the stages `own`.
    """
    found = _TASK.fullmatch(task.name)
    if found is None:
        yield from (phases[number, "update"] for number in own if (number, "update") in phases)
        return
    number = int(found["stage"])
    if number not in begun and (number, "hoisted") in phases:
        yield phases[number, "hoisted"]
    begun.add(number)
    if (number, _PHASES[found["work"]]) in phases:
        yield phases[number, _PHASES[found["work"]]]


def _moved(span: RangeSpan, by_ns: int) -> RangeSpan:
    return RangeSpan(span.name, span.start_ns + by_ns, span.end_ns + by_ns)


def _names_of(phased: PhasedProgram) -> dict[str, dict[str, str]]:
    """Return the range of each node of a program, by the names of its phase and of the node.

    Nodes of different phases may have the same name.
    """
    halves = (phased.halves.inputs, phased.halves.weights) if phased.halves else ()
    adding = {ADDING_UP: f"{_BACKWARD}: {ADDING_UP}"}
    found: dict[str, dict[str, str]] = {ACCUMULATION: adding, _BACKWARD: dict(adding)}
    for phase, module in (*phased.phases.items(), *((_BACKWARD, half) for half in halves)):
        calls = (node for node in module.graph.nodes if node.op == "call_function")
        found.setdefault(phase, {}).update({node.name: range_name(node) for node in calls})
    return found


def _step(segments: Iterable[Segment], names: Mapping[str, Mapping[str, str]], cluster: Cluster) -> StepSpans:
    named = [_named(segment, names[segment.name]) for segment in segments]
    times = simulate_streams(named, overlap_of(cluster), dispatch_s=cluster.device.dispatch("eager"))
    spans = (span for span in times.timeline.spans if span.end_s > span.start_s and span.name)
    made = (RangeSpan(span.name, round(span.start_s * 1e9), round(span.end_s * 1e9)) for span in spans)
    return StepSpans(round(times.total_s * 1e9), tuple(made))


def _named(segment: Segment, names: Mapping[str, str]) -> Segment:
    """Return a segment whose operations have the names of their ranges."""
    return replace(segment, ops=tuple(op._replace(name=names[op.name.partition(" over ")[0]]) for op in segment.ops))


class _Priced(NamedTuple):
    """The price of one call: the hardware constant that it depends on, its number of launches, and its seconds."""

    constant: str
    launches: int
    seconds: float


def _costs(phases: Mapping[str, fx.GraphModule], prices: NodePrices, runs: Mapping[str, int]) -> Iterator[RangeCost]:
    """Yield the cost of each range of a program. `runs` has the number of runs of a phase in a step, by default 1."""
    found = defaultdict[tuple[str, str], list[float]](lambda: [0, 0.0])
    for phase, module in phases.items():
        times = runs.get(phase) or max(runs.get(f"{phase}, inputs", 0), 1)
        for node in module.graph.nodes:
            name = range_name(node)
            if name and node.op == "call_function" and not is_wait(node):
                for each in _priced(node, prices):
                    total = found[name, each.constant]
                    total[0] += times * each.launches
                    total[1] += times * each.seconds
    for (name, constant), (launches, seconds) in found.items():
        yield RangeCost(name, constant, int(launches), seconds)


def _priced(node: fx.Node, prices: NodePrices) -> Iterator[_Priced]:
    """Yield the prices of a node. The copies of a reshard's collective are no part of the collective's range."""
    device = prices.cluster.device
    if is_collective(node):
        sent = collective_of(node, prices.mesh)
        links = prices.cluster.group_links(dict(prices.mesh.axes), group_axes(str(node.args[-1])))
        kind = sent.kind.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
        yield _Priced(constant_of_link(kind, links), 0, prices.sent_s(node))
        return
    seconds = prices.computed_s(node)
    if not isinstance(node.target, OpOverload) or not seconds:
        return
    if IS_RESHARD in node.meta:
        yield _Priced(constant_of_memory(device, STRIDED_COPY), 0, seconds)
    elif node.target in TRANSFERS or exchanges(node):
        yield _Priced("", 1, seconds + prices.sent_s(node))
    else:
        target = str(SEMANTIC.get(node.target, node.target))
        inputs, outputs = map(tuple, tensor_infos(node))
        done = work(target, inputs, outputs, tuple(fx.map_arg(node.args, lambda argument: None)))
        yield _Priced(constant_of_work(done, device, target), done.steps, seconds)
