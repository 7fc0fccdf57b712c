"""Eleven kinds of plan that experts write by hand, for any small program on data x model.

A layout places parameters, optimizer state and inputs by their shapes. All other values follow in program order. Each
call takes a strategy that moves the fewest bytes, and among these strategies one with most splits. Some layouts compute
in a narrower type, recompute all allowed nodes, or run fused kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS
from autoshard.ir.program import InputKind, InputSlot, Program
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules.enumeration import Strategy
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.testing.decided_plans import decided_plan
from autoshard.tracing import trace
from cost_models.device import HostLink
from cost_models.hardware import Cluster, node_type
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program, prepare
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.constraints import own_specs
from passes.solver.assignment import Edge
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.price import Prices
from tests.passes.families import FAMILIES

MESH = Mesh({"data": 2, "model": 2})
_MEASURED = node_type("cpu_laptop")
_NODE = replace(_MEASURED, intra=replace(_MEASURED.intra, reduce_scatter_phases=1.8))
"""A fixed type of node, so that layouts do not depend on measured hardware. Reduce-scatters are slow on this node."""
_LAPTOP = Cluster(_NODE, nodes=1, devices_per_node=4)
_WITH_HOST = Cluster(
    _NODE.with_device(replace(_NODE.device, host_link=HostLink(1e10, 1e10))), nodes=1, devices_per_node=4
)
"""The same node with a link to host memory, so that plans can offload."""

Place = Callable[[InputSlot, tuple[int, ...], int], Sequence[PartitionSpec]]
"""Returns wished specs for a slot of some shape, best first. The number counts slots of one kind and number of dims."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A kind of plan.

    Args:
        parameter, batch, state: specs of parameters, inputs and optimizer state; with state the program is a whole
            step.
        dtype: type of the model's parameters and inputs.
        precision: type of the computation; None for the model's own types.
        recomputes: whether all allowed nodes are recomputed, as late as possible.
        offloads: whether all allowed values lie on the host between forward and backward, as long as possible. Other
            values are recomputed.
        kernels: whether fused kernels replace operators; kernels take no float64.
    """

    parameter: Place
    batch: Place
    state: Place | None = None
    dtype: torch.dtype = torch.float64
    precision: str | None = None
    recomputes: bool = False
    offloads: bool = False
    kernels: bool = False

    @property
    def updates(self) -> bool:
        """Whether the program is a whole step, with AdamW and clipping."""
        return self.state is not None

    def wishes(self, slot: InputSlot, shape: tuple[int, ...], number: int) -> Sequence[PartitionSpec]:
        """Return the wished specs for a slot, best first; the caller skips impossible specs."""
        if slot.kind is InputKind.INPUT:
            return self.batch(slot, shape, number)
        if slot.kind is InputKind.STATE and self.state is not None:
            return self.state(slot, shape, number)
        return self.parameter(slot, shape, number) if slot.kind is InputKind.PARAMETER else ()


def _whole(*_: object) -> Sequence[PartitionSpec]:
    return ()


def _rows(*_: object) -> Sequence[PartitionSpec]:
    """Return specs that split dim 0 over all ranks, over the data axis, or over the model axis."""
    return P(("data", "model")), P("data"), P("model")


def _over_data(*_: object) -> Sequence[PartitionSpec]:
    return (P("data"),)


def _sequence(*_: object) -> Sequence[PartitionSpec]:
    return P("data", "model"), P("data")


def _by_turns(_: InputSlot, shape: tuple[int, ...], number: int) -> Sequence[PartitionSpec]:
    """Return specs that split columns and rows of matrices by turns; the last dim of other tensors comes first."""
    columns, rows = P(*[None] * (len(shape) - 1), "model"), P("model")
    return (rows, columns) if len(shape) == 2 and number % 2 else (columns, rows)


def _two_axes(slot: InputSlot, shape: tuple[int, ...], number: int) -> Sequence[PartitionSpec]:
    """Return specs that split two dims over both axes, then the specs of `_by_turns`, then a split over data."""
    last = len(shape) - 1
    both = [P("model", *[None] * (last - 1), "data"), P("data", *[None] * (last - 1), "model")] if last > 0 else []
    return *(both[::-1] if number % 2 else both), *_by_turns(slot, shape, number), P("data")


LAYOUTS: Mapping[str, Layout] = {
    "data": Layout(_whole, _rows),
    "ZeRO-3": Layout(_rows, _rows, _rows),
    "ZeRO-1": Layout(_whole, _over_data, _rows),
    "tensor": Layout(_by_turns, _over_data),
    "tensor and sequence": Layout(_by_turns, _sequence),
    "two axes": Layout(_two_axes, _over_data, _two_axes),
    "recomputed": Layout(_by_turns, _over_data, recomputes=True),
    "offloaded": Layout(_rows, _rows, _rows, offloads=True),
    "mixed precision": Layout(_rows, _rows, _rows, torch.float32, "bf16"),
    "kernels": Layout(_by_turns, _over_data, dtype=torch.float32, kernels=True),
    "all together": Layout(_two_axes, _over_data, _two_axes, torch.float32, "bf16", recomputes=True, kernels=True),
}


def program_of(family: str, layout: str) -> Program:
    """Return the traced program of a family in the form of a layout: forward and backward, or a whole step."""
    return _program_of(family, *_form(layout))


def _form(layout: str) -> tuple[bool, torch.dtype, str | None]:
    """The parts of a layout that the trace depends on."""
    found = LAYOUTS[layout]
    return found.updates, found.dtype, found.precision


@cache
def _program_of(family: str, updates: bool, dtype: torch.dtype, precision: str | None) -> Program:
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    inputs = tuple(item.to(dtype) if item.is_floating_point() else item for item in inputs)
    return traced_of(model.to(dtype), inputs, updates=updates, precision=precision)


def traced_of(model: nn.Module, inputs: tuple[Tensor, ...], *, updates: bool, precision: str | None = None) -> Program:
    """The traced program of a call: forward and backward, or a whole step with AdamW and clipping."""
    update = None
    if updates:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        update = describe_update(optimizer, names_of(model.named_parameters()), max_grad_norm=1.0)
    dtype = None if precision is None else PRECISIONS[precision]
    return trace(model, inputs, {}, update=update, compute_dtype=dtype)


@cache
def plan_of(family: str, layout: str) -> Plan:
    """The plan of a family under a layout, with a memory budget of 1 TB."""
    return _roomy(plan_under(LAYOUTS[layout], _planning_of(family, *_form(layout))))


@cache
def phased_of(family: str, layout: str) -> PhasedProgram:
    """The lowered program of a family under a layout, as `lowered_under` makes it."""
    return _lowered(LAYOUTS[layout], program_of(family, layout), plan_of(family, layout))


def planning_of(family: str, layout: str) -> PlanningProblem:
    """Return the planning problem of a family's program in the form of a layout."""
    return _planning_of(family, *_form(layout))


def lowered_under(
    layout: Layout,
    program: Program,
    planning: PlanningProblem | None = None,
    *,
    with_overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
) -> PhasedProgram:
    """Return the lowered program of a trace under a layout; `planning` is the program's problem if already built.

    A whole step has two micro-batches, which share all values that depend on parameters alone.
    """
    plan = _roomy(plan_under(layout, planning or _planning(program)))
    return _lowered(layout, program, plan, with_overlap=with_overlap, reduce_dtype=reduce_dtype)


def _lowered(layout: Layout, program: Program, plan: Plan, **options: Any) -> PhasedProgram:
    parts = 2 if layout.updates else 1
    return lower_program(
        program, plan, options=LoweringOptions(with_kernels=layout.kernels, micro_batches=parts, **options)
    )


def _roomy(plan: Plan) -> Plan:
    return replace(plan, memory_budget=10**12)


def plan_under(layout: Layout, planning: PlanningProblem) -> Plan:
    """The plan of a program under a layout, on any mesh with the axes data and model."""
    choice = _follow(planning, _placed(planning, layout))
    if layout.recomputes or layout.offloads:
        return _bringing_back(planning, choice, _WITH_HOST if layout.offloads else _LAPTOP)
    return lowered_plan(planning, choice, 0.0, None, planning.prices.cluster, PlanOptions()).plan


def _bringing_back(planning: PlanningProblem, choice: Sequence[int], cluster: Cluster) -> Plan:
    """Return the plan of the strategies `choice` with all allowed values offloaded, or recomputed without a host link.

    Values come back as late as possible.
    """

    def latest(variable: int, options: np.ndarray) -> int:
        count = len(planning.assignment.costs[variable])
        return int(max(option for option in options if option % count == choice[variable]))

    return decided_plan(planning, cluster, latest, recompute=True)


@cache
def _planning_of(family: str, updates: bool, dtype: torch.dtype, precision: str | None) -> PlanningProblem:
    return _planning(_program_of(family, updates, dtype, precision))


def _planning(program: Program) -> PlanningProblem:
    return planning_on(MESH, program)


def planning_on(mesh: Mesh, program: Program) -> PlanningProblem:
    """The planning problem of a program on a mesh, with a variable of its own for every site."""
    space = EnumerateStrategies(mesh)(prepare(program))
    alone = {name: name for name in space.sites}
    return build_problem(space, Prices(_WITH_HOST, mesh), find_lifetimes(space, 0.0), alone)


def _placed(planning: PlanningProblem, layout: Layout) -> dict[int, np.ndarray]:
    """Map the variable of each slot to a mask of the options with the first wished spec that is possible."""
    program, allowed = planning.space.program, {}
    counts: defaultdict[tuple[InputKind, int], int] = defaultdict(int)
    nodes = program.nodes_by_name()
    for slot in program.inputs:
        site = planning.space.sites.get(slot.node)
        if site is None:
            continue
        shape = tuple(nodes[slot.node].meta["val"].shape)
        kind = slot.kind, len(shape)
        wishes = (*layout.wishes(slot, shape, counts[kind]), P())
        counts[kind] += 1
        masks = (np.array([own == wish for own in own_specs(site)]) for wish in wishes)
        allowed[planning.classes[slot.node]] = next((mask for mask in masks if mask.any()), None)
    return {variable: mask for variable, mask in allowed.items() if mask is not None}


def _follow(planning: PlanningProblem, placed: Mapping[int, np.ndarray]) -> list[int]:
    """Choose one option for each variable in program order: fewest bytes moved first, then most splits."""
    edges: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in planning.assignment.edges:
        edges[edge.tail].append(edge)
        edges[edge.head].append(edge)
    choice: dict[int, int] = {}
    for variable, own in enumerate(planning.assignment.costs):
        moved = np.where(np.isfinite(own), 0.0, np.inf)
        if variable in placed:
            moved = np.where(placed[variable], moved, np.inf)
        for edge in edges[variable]:
            if edge.head == variable and edge.tail in choice:
                moved = moved + edge.cost[choice[edge.tail], :]
            elif edge.tail == variable and edge.head in choice:
                moved = moved + edge.cost[:, choice[edge.head]]
        strategies = planning.space.sites[planning.members[variable][0]].strategies
        least = np.flatnonzero(moved <= moved.min() * (1 + 1e-9))
        choice[variable] = int(max(least, key=lambda option: _splits(strategies[int(option)])))
    return [choice[variable] for variable in range(len(choice))]


def _splits(strategy: Strategy) -> int:
    """Count the axes that split dims of operands and results under a strategy."""
    return sum(len(axes) for spec in (*strategy.inputs, *strategy.outputs) for axes in spec.dims)
