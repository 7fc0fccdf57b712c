"""The runtime's compiler for a mesh with a pipeline axis: training steps run in stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoshard.arguments import check_has_loss
from autoshard.errors import NotAvailableError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.initialisation import Initialisation
from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.staged import StagedProgram
from autoshard.pipelines import Pipeline
from autoshard.planner import Planner
from autoshard.runtime.agreement import make_together
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import CompiledProgram
from autoshard.runtime.sharded_module import Request
from autoshard.stage_plans import StagePlans, check_fits, check_stays

if TYPE_CHECKING:
    from autoshard.ir.plan import Plan

_LOGGER = logging.getLogger(__name__)

_UPDATES = (OutputKind.PARAMETER_UPDATE, OutputKind.STATE_UPDATE)
_OF_FORWARD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.INPUT, InputKind.SEED)


@dataclass(frozen=True, slots=True)
class StagePlanner:
    """The runtime's `Compiler` for a mesh with a pipeline axis.

    Args:
        planner: plans and lowers a stage, and any call that is no training step.
        pipeline: what was asked for.
        rank: this process's in the pipeline, or None where one process simulates all.
        homes: the stage that holds each parameter, by name, once a program said so.
    """

    planner: Planner
    pipeline: Pipeline
    rank: int | None = None
    homes: dict[str, int] = field(default_factory=dict)

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """See `Compiler`. The first rank plans for all."""
        from passes.verification.weigh_loss import weigh_step

        if request.update is None:
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
        plans, lowered = StagePlans(self.planner, self.pipeline), list[PhasedProgram]()
        plan = engine.share(lambda: self._plan_for(plans, program, request, lowered))
        staged = make_together(
            engine,
            "lowering",
            lambda: plans.lower(program, plan, request, lowered),
            lambda made: {"stages": made.digest()},
        )
        self.homes.update(staged.stage_of_parameters())
        weigh = self.planner.micro_batches > 1
        weights = weigh_step(program, replace(self.planner, traced=None).trace, of_gradients) if weigh else None
        own = tuple(number for number, rank in enumerate(staged.order.stage_ranks) if self.rank in (None, rank))
        _LOGGER.info("compiled %s in %d stages for %s", request.signature, len(plan.stages), plan.mesh)
        whole = _whole(program, staged, own)
        return CompiledProgram(whole, plan, frozenset(), request.update, found, program.python, weights, staged, own)

    def _plan_for(self, plans: StagePlans, program: Program, request: Request, lowered: list[PhasedProgram]) -> Plan:
        """The plan of a step: the one that is given, or one that is made; `lowered` is then filled with its stages."""
        if self.planner.fixed is not None:
            check_fits(self.planner.fixed, program, self.pipeline)
            return self.planner.fixed
        plan, lowered[:] = plans.plan(program, request, self.homes)
        return plan

    def trace(self, request: Request) -> Program:
        """See `Compiler`."""
        return self.planner.trace(request)

    def record_initialisation(self, model: nn.Module, device: torch.device, init_fn: Any) -> Initialisation:
        """See `Compiler`."""
        return self.planner.record_initialisation(model, device, init_fn)

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """See `Compiler`."""
        return self.planner.guards_hold(program, inputs, state)

    def _compile_whole(self, request: Request, engine: Engine) -> CompiledProgram:
        """A call that is no training step: where one process simulates all ranks, it holds all parameters."""
        if self.rank is not None:
            raise NotAvailableError(
                "With a process per rank, a model on a mesh with an axis 'pipeline' runs training steps only: each "
                "rank holds the parameters of its own stage. Call the step, not step.sharded; to evaluate, compile "
                "for a mesh without the axis 'pipeline'."
            )
        return self.planner(request, engine)

    def _trace(self, request: Request) -> Program:
        program = self.planner.trace(request)
        check_has_loss(program)
        return program


def _whole(program: Program, staged: StagedProgram, own: Sequence[int]) -> PhasedProgram:
    """What the runtime asks of a program, of all stages: inputs, and the updates of its own stages; it runs nothing."""
    found: dict[tuple[str, str], LocalSlot] = {}
    for stage in staged.stages:
        for slot in stage.phased.lowered.inputs:
            if slot.slot.kind in (*_OF_FORWARD, InputKind.STATE) and slot.slot.name not in _crossing_names(staged):
                found.setdefault((slot.slot.kind, slot.slot.name), slot)
    inputs = tuple(found.values())
    outputs = tuple(slot for n in own for slot in staged.stages[n].phased.lowered.outputs if slot.slot.kind in _UPDATES)
    mesh, graph_module = staged.stages[0].phased.lowered.mesh, program.graph_module
    lowered = LoweredProgram(program, mesh, graph_module, inputs, outputs)
    takes = tuple(index for index, slot in enumerate(inputs) if slot.slot.kind in _OF_FORWARD)
    updated = {slot.slot.name for slot in outputs}
    read = tuple(index for index, slot in enumerate(inputs) if slot.slot.name in updated)
    return PhasedProgram(
        *(lowered, graph_module, graph_module, takes, (), (), (), ()), graph_module, read, tuple(range(len(outputs)))
    )


def _crossing_names(staged: StagedProgram) -> frozenset[str]:
    return frozenset(crossing.name for crossing in staged.crossings)
