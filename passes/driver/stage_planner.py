"""The runtime's `Compiler` for a mesh with a pipeline: stages run training steps, and calls without gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard.arguments import check_has_loss
from autoshard.errors import NotAvailableError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.initialisation import Initialisation
from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.request import CompiledProgram, Request
from autoshard.ir.staged import StagedProgram
from autoshard.runtime.engine import Engine
from passes.driver.make_together import make_together
from passes.driver.pipelines import Pipeline
from passes.driver.planner import Planner
from passes.driver.stage_plans import StagePlans, check_fits, check_stays
from passes.verification.weigh_step import weigh_step

_LOGGER = logging.getLogger(__name__)

_UPDATES = (OutputKind.PARAMETER_UPDATE, OutputKind.STATE_UPDATE)
_OF_FORWARD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.INPUT, InputKind.SEED)


@dataclass(frozen=True, slots=True)
class StagePlanner:
    """The runtime's protocol `Compiler` for a mesh with the axis "pipeline".

    Args:
        planner: plans and lowers single stages, and calls without stages.
        rank: this process's rank in the pipeline, or None if one process simulates all ranks.
        homes: name of a parameter → its stage. The first compiled program fills the dict.
    """

    planner: Planner
    pipeline: Pipeline
    rank: int | None = None
    homes: dict[str, int] = field(default_factory=dict)

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """Return the compiled program of a call. The first rank plans for all ranks."""
        if request.update is None and request.grad:
            return self._compile_whole(request, engine)
        of_gradients = replace(request, update=None)
        program = make_together(
            engine, "tracing", lambda: self._trace(of_gradients), lambda made: {"traced program": fingerprint(made)}
        )
        found = fingerprint(program)
        known = next((item for item in request.known if item.fingerprint == found), None)
        if known is not None:
            return replace(known, python=program.python)
        check_stays(program)
        plans, lowered = self._plans_for(request), dict[int, PhasedProgram]()
        plan = engine.share(lambda: self._plan_for(plans, program, request, lowered))
        staged = make_together(
            engine,
            "lowering",
            lambda: plans.lower(program, plan, request, lowered)[0],
            lambda made: {"stages": made.digest()},
        )
        self.homes.update(staged.stage_of_parameters())
        weigh = request.update is not None and self.planner.micro_batches > 1
        weights = weigh_step(program, replace(self.planner, traced=None).trace, of_gradients) if weigh else None
        own = tuple(number for number, rank in enumerate(staged.order.stage_ranks) if self.rank in (None, rank))
        _LOGGER.info("compiled %s in %d stages for %s", request.signature, len(plan.stages), plan.mesh)
        whole, sharded = _whole(program, staged, own), plans.sharded_outputs(program)
        return CompiledProgram(whole, plan, sharded, request.update, found, program.python, weights, staged, own)

    def _plans_for(self, request: Request) -> StagePlans:
        """Return the planner of a call's stages. A call without gradients runs in one batch, not in micro-batches."""
        if request.update is not None:
            return StagePlans(self.planner.begun()[0], self.pipeline)
        gather = request.outputs is Outputs.WHOLE or self.planner.gather_outputs
        planner = replace(self.planner.begun()[0], micro_batches=1, gather_outputs=gather)
        return StagePlans(planner, replace(self.pipeline, micro_batches=1))

    def _plan_for(
        self, plans: StagePlans, program: Program, request: Request, lowered: dict[int, PhasedProgram]
    ) -> Plan:
        """Return the plan of a call: the user's plan for training steps, or else a new plan.

        The lowered programs of a new plan's stages are put into `lowered`, by stage number.
        """
        homes, fixed, made = self.homes, self.planner.fixed, self.planner.made
        if fixed is not None and request.update is not None:
            check_fits(fixed, program, self.pipeline)
            return fixed
        if fixed is not None:
            homes = {name: number for number, stage in enumerate(fixed.stages) for name in stage.parameters}
        if made is not None and request.update is not None and made.program_digest == program.digest():
            return made
        plan, stages = plans.plan(program, request, homes)
        lowered |= {number: stage.phased for number, stage in enumerate(stages) if not stage.is_of_equal_stage}
        return plan

    def trace(self, request: Request) -> Program:
        """Return the traced program of a call, see `Planner.trace`."""
        return self.planner.trace(request)

    def record_initialisation(self, model: nn.Module, device: torch.device, init_fn: Any) -> Initialisation:
        """Record how a model initialises its tensors, see `tracing.record_initialisation`."""
        return self.planner.record_initialisation(model, device, init_fn)

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a program, traced for other inputs and state, is also right for `inputs` and `state`."""
        return self.planner.guards_hold(program, inputs, state)

    def _compile_whole(self, request: Request, engine: Engine) -> CompiledProgram:
        """Compile a call whose gradients autograd computes, without stages.

        Raises:
            NotAvailableError: this process does not simulate all ranks.
        """
        if self.rank is not None:
            raise NotAvailableError(
                "A call of step.sharded wants gradients. With a process per rank, each rank holds only the parameters "
                "of its own stages of the axis 'pipeline'. To train, call the step; to evaluate, call step.sharded "
                "under torch.no_grad(); for gradients by loss.backward(), compile for a mesh without that axis."
            )
        return self.planner(request, engine)

    def _trace(self, request: Request) -> Program:
        program = self.planner.trace(request)
        if request.grad:
            check_has_loss(program)
        return program


def _whole(program: Program, staged: StagedProgram, own: Sequence[int]) -> PhasedProgram:
    """Return one program with the inputs and results of all stages, and the updated values of the stages in `own`.

    The stages in `own` are those of this process. The program tells the runtime which values the process takes and
    returns. Its graphs never run.
    """
    found: dict[tuple[str, str], LocalSlot] = {}
    for stage in staged.stages:
        for slot in stage.phased.lowered.inputs:
            if slot.slot.kind in (*_OF_FORWARD, InputKind.STATE) and slot.slot.name not in _crossing_names(staged):
                found.setdefault((slot.slot.kind, slot.slot.name), slot)
    inputs = tuple(found.values())
    results = tuple(staged.sent_slot(name, number, is_forward=True) for name, number in staged.results.items())
    updates = [slot for n in own for slot in staged.stages[n].phased.lowered.outputs if slot.slot.kind in _UPDATES]
    outputs, count = (*results, *updates), len(results)
    mesh, graph_module = staged.stages[0].phased.lowered.mesh, program.graph_module
    lowered = LoweredProgram(program, mesh, graph_module, inputs, outputs)
    takes = tuple(index for index, slot in enumerate(inputs) if slot.slot.kind in _OF_FORWARD)
    updated = {slot.slot.name for slot in updates}
    read = tuple(index for index, slot in enumerate(inputs) if slot.slot.name in updated)
    return PhasedProgram(
        *(lowered, graph_module, graph_module, takes, tuple(range(count)), (), (), ()),
        *(graph_module, read, tuple(range(count, len(outputs)))),
    )


def _crossing_names(staged: StagedProgram) -> frozenset[str]:
    return frozenset(crossing.name for crossing in staged.crossings)
