"""Run one architecture on a simulated mesh, under a memory limit that forces parameters to be split.

1. Trace the model.
2. Find the smallest peak memory of a known plan, and the peak of a plan without splits. Set the limit in between, near
   the smallest.
3. Search for the fastest plan within the limit.
4. Lower the plan, and prove preparation, lowered program and phases, as `autoshard.compile` does.
5. Train three steps through `ShardedModule`, each on a batch of its own, and evaluate one more batch.
6. Compare losses, gradients, final parameters and buffers, and the evaluation with one device.

One device draws the call's random numbers by `autoshard.tracing`'s operators. A model without random numbers trains as
plain PyTorch. Evaluation is always plain PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import Mesh
from autoshard.cluster import local_cluster
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, Program
from autoshard.ir.request import CompiledProgram, Request
from autoshard.runtime.engine import Engine, SimulatorEngine
from autoshard.runtime.seeds import SeedSequence
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.testing.training import drawing_alike
from autoshard.tracing import check_guards, trace
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.solver.assignment import Solution
from passes.solver.search_control import SearchControl
from passes.solver.smallest_peak import choice_of_smallest_peak
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from tests.zoo.architecture import Architecture

MESH = Mesh({"data": 2, "model": 2})

STEPS = 3
"""Steps of training."""

SLACKS = (0.15, 0.05, 0.0)
"""How far the memory limit is from the smallest peak towards that of an unsplit plan: the first that forces a split."""

TOLERANCE, ROUNDING, LOOSEST = 1e-5, 4.0, 1e-3
"""A relative error is at most 1e-5. If one device's own rounding (float32 against float64) exceeds a quarter of 1e-5,
the limit is four times the rounding, at most 1e-3. Rounding grows from step to step.
"""

SCALE_FLOOR = 1e-2
"""Gradients below this share of the largest gradient are compared on that scale, because rounding dominates."""


@dataclass(slots=True)
class Result:
    """The outcome of one architecture.

    Args:
        stage: the present or last stage: "build", "trace", "plan", "lower", "verify", "run", "compare", "done".
        replicated: operators without a rule that run whole on every rank, with their calls.
        seconds: wall time of each finished stage.
        parameters, split: number of the model's tensors, and of tensors that the plan splits.
        error: largest relative error of the loss and gradients, and `worst`, its tensor.
        rounding: the same error of one device in float32 against float64.
        memory: the limit of the plan, as a share of the peak without splits.
        gap: distance of the plan's predicted time from the proven bound, as a share of it; 0 without a search.
        programs: number of compiled programs, two unless the model reads values.
        date, revision: date and commit of the run.
        library: library of the model, with its version.
        reason: why the architecture failed, or empty. `traceback`: traceback of the exception.
    """

    name: str
    family: str
    stage: str = "build"
    nodes: int = 0
    replicated: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    split: int = 0
    error: float = 0.0
    rounding: float = 0.0
    worst: str = ""
    memory: float = 0.0
    gap: float = 0.0
    programs: int = 0
    date: str = ""
    revision: str = ""
    library: str = ""
    reason: str = ""
    traceback: str = ""

    @property
    def passed(self) -> bool:
        """Whether loss and gradients equal one device, with parameters split."""
        return self.stage == "done" and not self.reason


Report = Callable[[Result], None]


def check(architecture: Architecture, time_budget_s: float = 20.0, report: Report = lambda result: None) -> Result:
    """Run an architecture and return its outcome.

    Args:
        architecture: the architecture.
        time_budget_s: seconds for the search of a plan; 0: the plan of the smallest peak.
        report: receives the result so far at the start of each stage.

    Raises:
        Exception: any exception of a stage; the last reported result names the stage.
    """
    result = start(architecture)
    compiler = TightCompiler(time_budget_s, result, report)
    compiler.enter("build")
    model, first = architecture.build()
    batches = [first, *(architecture.batch(model, number) for number in range(1, STEPS + 1))]
    reference, _ = architecture.build()  # not a copy: weight norms of torch cannot be copied
    sharded = ShardedModule(model, SimulatorEngine(MESH), compiler)
    found = train_and_evaluate(sharded, batches, architecture.rate)
    compiler.enter("compare")
    result.programs = len(sharded.programs)
    step = drawing_alike if _draws(sharded) else contextlib.nullcontext
    doubled = architecture.build()[0].double()
    expected = train_and_evaluate(reference, batches, architecture.rate, step)
    result.rounding = largest_error(expected, _in_double(doubled, batches, architecture.rate, step, expected))[1]
    result.worst, result.error = largest_error(found, expected)
    result.stage, result.reason = "done", _failing(result)
    return result


Step = Callable[[torch.Tensor], AbstractContextManager[None]]
"""The context of a training step on one device, given the seed of its random numbers."""


def train_and_evaluate(
    network: nn.Module, batches: Sequence[Mapping[str, Any]], rate: float, step: Step = contextlib.nullcontext
) -> dict[str, torch.Tensor]:
    """Train on all batches but the last, and evaluate the last batch. Return all results and the final state.

    `rate` is the rate of `Architecture`.
    """
    network.train()
    seeds, seen = SeedSequence(), dict[str, torch.Tensor]()
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    for number, batch in enumerate(batches[:-1]):
        with step(seeds.draw()):
            observed = observe(network, batch)
        optimizer.step()
        optimizer.zero_grad()
        seen |= {f"step {number}: {name}": value for name, value in observed.items()}
    seen |= {f"{name} behind the last step": value.clone() for name, value in _floating(network.state_dict()).items()}
    network.eval()
    with torch.no_grad():
        leaves = [leaf for leaf in pytree.tree_leaves(network(**batches[-1])) if isinstance(leaf, torch.Tensor)]
    outputs = _floating({f"evaluation, output {index}": leaf for index, leaf in enumerate(leaves)})
    return {**seen, **outputs}


def _draws(sharded: ShardedModule) -> bool:
    """Whether a program draws random numbers."""
    slots = (slot for program in sharded.programs for slot in program.phased.lowered.traced.inputs)
    return any(slot.kind is InputKind.SEED for slot in slots)


def _floating(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in values.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


def start(architecture: Architecture) -> Result:
    """Return the empty result of an architecture."""
    date, library = time.strftime("%Y-%m-%d"), architecture.library.version
    return Result(architecture.name, str(architecture.family), date=date, library=library)


def observe(network: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The loss, or the outputs if there is no loss, and the gradients of all parameters."""
    outputs = [leaf for leaf in pytree.tree_leaves(network(**inputs)) if isinstance(leaf, torch.Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    scalars = [output for output in differentiable if output.ndim == 0]
    if scalars:
        seen = {"loss": scalars[0]}
        scalars[0].backward()
    else:
        seen = {f"output:{index}": output for index, output in enumerate(differentiable)}
        torch.stack([_weighted_sum(output) for output in differentiable]).sum().backward()
    found = {name: value.detach().clone() for name, value in seen.items()}
    gradients = {name: item.grad for name, item in network.named_parameters() if item.grad is not None}
    return found | {f"gradient of {name}": gradient.clone() for name, gradient in gradients.items()}


def _weighted_sum(output: torch.Tensor) -> torch.Tensor:
    """A weighted sum of an output, in which each element has another weight."""
    return (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum()


def largest_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The name and the relative difference of the value that differs most. A difference is relative to the
    tensor's largest element, or to `SCALE_FLOOR`."""
    if found.keys() != expected.keys():
        return f"only one of the two has {sorted(found.keys() ^ expected.keys())[:3]}", float("inf")
    scales = {name: float(value.abs().max()) for name, value in expected.items() if value.numel()}
    floor = SCALE_FLOOR * max((scale for name, scale in scales.items() if "gradient" in name), default=0.0)
    errors = {name: _difference(found[name], expected[name]) / max(scale, floor) for name, scale in scales.items()}
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found.double() - expected.double()).abs().max().nan_to_num(float("inf")))


def _in_double(
    doubled: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    rate: float,
    step: Step,
    otherwise: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Train on one device in float64. Returns `otherwise` if the model does not run in float64, or has infinities
    or NaN there."""
    wide = [
        pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, dict(batch))
        for batch in batches
    ]
    try:
        found = train_and_evaluate(doubled, wide, rate, step)
    except RuntimeError:
        return otherwise
    is_number = all(bool(found[name].isfinite().all()) for name, x in otherwise.items() if bool(x.isfinite().all()))
    return found if is_number else otherwise


def _failing(result: Result) -> str:
    if not result.error <= max(TOLERANCE, min(ROUNDING * result.rounding, LOOSEST)):
        return f"{result.worst} is off by {result.error:.2g} of its scale (rounding: {result.rounding:.2g})"
    if not result.split:
        return "no parameter is split"
    return ""


@dataclass(slots=True)
class TightCompiler:
    """The runtime's `Compiler` with plans for little memory; see the module's docstring.

    The first program, of training, is planned as the docstring describes, and is reported in `result`. Later programs,
    for evaluation or for other values, get the plan of the smallest peak.
    """

    time_budget_s: float
    result: Result
    report: Report
    _since: float = field(default_factory=time.perf_counter)
    _is_first: bool = True

    def enter(self, stage: str) -> None:
        """Begin a stage: record the seconds of the previous stage, and report the result."""
        start, self._since = self._since, time.perf_counter()
        before = self.result.seconds.get(self.result.stage, 0.0)
        self.result.seconds[self.result.stage] = round(before + self._since - start, 2)
        self.result.stage = stage
        self.report(self.result)

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """Compile a request as a `Compiler` does."""
        self.enter("trace")
        program = trace(
            *(request.model, request.args, dict(request.kwargs)),
            all_tangents=request.all_tangents,
            seed=request.seed,
            device=request.device,
            values=request.values,
        )
        self.enter("plan")
        if self._is_first:
            chosen = plan_tightly(program, self.time_budget_s, self.result)
            self._note(program, chosen)
        else:
            chosen = plan_tightly(program, 0.0, copy.copy(self.result))
        self._is_first = False
        self.enter("lower")
        phased = lower_program(program, chosen, local_cluster(MESH))
        self.enter("verify")
        verify_preparation(program, phased.lowered.traced)
        verify_program(phased.lowered.traced, phased.lowered)
        verify_phases(phased)
        self.enter("run")
        return CompiledProgram(phased, chosen)

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Check the guards as a `Compiler` does."""
        return check_guards(program, inputs, state)

    def _note(self, program: Program, chosen: Plan) -> None:
        self.result.nodes = len(program.graph.nodes)
        self.result.parameters = len(chosen.parameters)
        self.result.split = _count_split(chosen)
        names = {name for name, _ in chosen.replicated_operators}
        calls = [str(node.target) for node in program.graph.nodes if str(node.target) in names]
        self.result.replicated = {name: calls.count(name) for name in sorted(names)}


def plan_tightly(program: Program, time_budget_s: float, result: Result) -> Plan:
    """A plan within a limit near the smallest peak of any plan. Its memory and gap are written into `result`."""
    cluster = local_cluster(MESH)
    options = PlanOptions(time_budget_s=time_budget_s, with_baselines=False)
    planning = planning_problem(program, MESH, cluster, options)
    choice = choice_of_smallest_peak(planning.assignment, planning.usage, planning.memory_row)
    smallest, unsplit = (float(planning.usage(found).max()) for found in (choice, _unsplit(planning)))
    frugal = Solution(choice, planning.assignment.cost_of(choice), 0.0)
    chosen = _plan_of(planning, frugal, options)
    for slack in SLACKS if time_budget_s > 0 else ():
        limit = smallest + slack * max(0.0, unsplit - smallest)
        solution = Search(limit, control=SearchControl.within(time_budget_s))(planning, start=[frugal])
        chosen = _plan_of(planning, solution, replace(options, memory_budget=limit))
        result.gap = 1.0 - solution.lower_bound / solution.cost if solution.cost else 0.0
        result.memory = limit / unsplit if unsplit else 0.0
        if _count_split(chosen):
            break
    return chosen


def _plan_of(planning: PlanningProblem, solution: Solution, options: PlanOptions) -> Plan:
    return lowered_plan(
        planning, solution.choice, solution.cost, solution.lower_bound, local_cluster(MESH), options
    ).plan


def _count_split(plan: Plan) -> int:
    """How many parameters a plan splits."""
    return sum(not item.spec.is_fully_replicated for item in plan.parameters.values())


def _unsplit(planning: PlanningProblem) -> tuple[int, ...]:
    """For each node, the strategy that splits the fewest tensors."""
    return tuple(_whole(planning, members[0]) for members in planning.members)


def _whole(planning: PlanningProblem, name: str) -> int:
    strategies = planning.space.sites[name].strategies
    splits = [
        sum(not spec.is_fully_replicated for spec in (*strategy.inputs, *strategy.outputs)) for strategy in strategies
    ]
    return int(np.argmin(splits))
