"""Six kinds of plan that experts write by hand, for any small program on data x model.

A layout says where parameters, optimizer state and inputs lie, by their shapes; all other values follow in program
order: each call takes, of the strategies that move the least, one that splits the most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, InputSlot, Program
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules.enumeration import Strategy
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.tracing import trace
from cost_models.hardware import Cluster
from passes.assignment import Edge
from passes.build_assignment import PlanningProblem, build_problem
from passes.constraints import own_specs
from passes.enumerate_strategies import EnumerateStrategies
from passes.liveness import find_lifetimes
from passes.pipeline import PlanOptions, lower_program, plan_of_choice, prepare
from passes.price import Prices
from tests.passes.families import FAMILIES

MESH = Mesh({"data": 2, "model": 2})
_LAPTOP = Cluster("cpu_laptop", nodes=1, devices_per_node=4)

Place = Callable[[InputSlot, tuple[int, ...], int], Sequence[PartitionSpec]]
"""Where a slot of some shape should lie, the wish first; the number tells slots of one kind apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A kind of plan.

    Args:
        parameter, batch, state: where parameters, inputs and optimizer state lie; with state it is of a whole step.
    """

    parameter: Place
    batch: Place
    state: Place | None = None

    @property
    def updates(self) -> bool:
        """Whether the program is a whole step, with AdamW and clipping."""
        return self.state is not None

    def wishes(self, slot: InputSlot, shape: tuple[int, ...], number: int) -> Sequence[PartitionSpec]:
        """Specs for a slot, the best first; one that it cannot have is passed over."""
        if slot.kind is InputKind.INPUT:
            return self.batch(slot, shape, number)
        if slot.kind is InputKind.STATE and self.state is not None:
            return self.state(slot, shape, number)
        return self.parameter(slot, shape, number) if slot.kind is InputKind.PARAMETER else ()


def _whole(*_: object) -> Sequence[PartitionSpec]:
    return ()


def _rows(*_: object) -> Sequence[PartitionSpec]:
    """Dim 0 over all ranks, or over some."""
    return P(("data", "model")), P("data"), P("model")


def _over_data(*_: object) -> Sequence[PartitionSpec]:
    return (P("data"),)


def _sequence(*_: object) -> Sequence[PartitionSpec]:
    return P("data", "model"), P("data")


def _by_turns(_: InputSlot, shape: tuple[int, ...], number: int) -> Sequence[PartitionSpec]:
    """Of matrices the rows and the columns by turns, as in tensor parallelism; of others the last dim."""
    columns, rows = P(*[None] * (len(shape) - 1), "model"), P("model")
    return (rows, columns) if len(shape) == 2 and number % 2 else (columns, rows)


def _two_axes(slot: InputSlot, shape: tuple[int, ...], number: int) -> Sequence[PartitionSpec]:
    """Tensor parallelism whose other dim, or the only one, is split over the data axis."""
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
}


@cache
def program_of(family: str, updates: bool) -> Program:
    """The traced program of a family: forward and backward, or a whole step."""
    torch.manual_seed(0)
    return traced_of(*FAMILIES[family](), updates=updates)


def traced_of(model: nn.Module, inputs: tuple[Tensor, ...], *, updates: bool) -> Program:
    """The traced program of a call: forward and backward, or a whole step with AdamW and clipping."""
    update = None
    if updates:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        update = describe_update(optimizer, names_of(model.named_parameters()), max_grad_norm=1.0)
    return trace(model, inputs, {}, update=update)


@cache
def phased_of(family: str, layout: str) -> PhasedProgram:
    """The lowered program of a family under a layout."""
    updates = LAYOUTS[layout].updates
    return lowered_under(LAYOUTS[layout], program_of(family, updates), _planning_of(family, updates))


def lowered_under(layout: Layout, program: Program, planning: PlanningProblem | None = None) -> PhasedProgram:
    """The lowered program of any trace under a layout; `planning` is its problem, if it is known."""
    return lower_program(program, plan_under(layout, planning or _planning(program)))


def plan_under(layout: Layout, planning: PlanningProblem) -> Plan:
    """The plan of a program on any mesh of data and model, under a layout."""
    choice = _follow(planning, _placed(planning, layout))
    return plan_of_choice(planning, choice, 0.0, None, planning.prices.cluster, PlanOptions())


@cache
def _planning_of(family: str, updates: bool) -> PlanningProblem:
    return _planning(program_of(family, updates))


def _planning(program: Program) -> PlanningProblem:
    """The planning problem of a program, with a variable of its own for every site."""
    space = EnumerateStrategies(MESH)(prepare(program))
    alone = {name: name for name in space.sites}
    return build_problem(space, Prices(_LAPTOP, MESH), find_lifetimes(space, 0.0), alone)


def _placed(planning: PlanningProblem, layout: Layout) -> dict[int, np.ndarray]:
    """For each slot's variable the options that have the spec that the layout wishes."""
    program, allowed = planning.space.program, {}
    counts: defaultdict[tuple[InputKind, int], int] = defaultdict(int)
    for slot in program.inputs:
        site = planning.space.sites.get(slot.node)
        if site is None:
            continue
        shape = tuple(program.nodes[slot.node].meta["val"].shape)
        kind = slot.kind, len(shape)
        wishes = (*layout.wishes(slot, shape, counts[kind]), P())
        counts[kind] += 1
        masks = (np.array([own == wish for own in own_specs(site)]) for wish in wishes)
        allowed[planning.classes[slot.node]] = next((mask for mask in masks if mask.any()), None)
    return {variable: mask for variable, mask in allowed.items() if mask is not None}


def _follow(planning: PlanningProblem, placed: Mapping[int, np.ndarray]) -> list[int]:
    """One option for each variable in program order: what moves least beside those before it, then splits most."""
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
    """How many dims of operands and results axes split."""
    return sum(len(axes) for spec in (*strategy.inputs, *strategy.outputs) for axes in spec.dims)
