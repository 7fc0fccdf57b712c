"""Compiles a training step for a pipeline: cuts it into stages, plans and lowers each on the mesh of the other axes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoshard.arguments import check_has_loss
from autoshard.errors import InvalidSpecError, NotAvailableError, VerificationError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.initialisation import Initialisation
from autoshard.ir.loss import Output, loss_among
from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.staged import CutProgram, StagedProgram, StageProgram
from autoshard.pipelines import Pipeline
from autoshard.planner import Planner
from autoshard.runtime.agreement import make_together
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import CompiledProgram
from autoshard.runtime.sharded_module import Request
from autoshard.runtime.stage_messages import find_slot
from autoshard.tracing.update import append_update

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
    """

    planner: Planner
    pipeline: Pipeline
    rank: int | None = None

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
        _check_stays(program)
        cut = self._cut(program, request, engine)
        _check_constraints(self.planner.constraints, cut)
        plans = engine.share(lambda: [self._plan(stage, request, engine) for stage in cut.stages])
        staged = make_together(
            engine, "lowering", lambda: self._lower(program, cut, plans), lambda made: {"stages": made.digest()}
        )
        weigh = self.planner.micro_batches > 1
        weights = weigh_step(program, replace(self.planner, traced=None).trace, of_gradients) if weigh else None
        own = tuple(number for number, rank in enumerate(staged.order.stage_ranks) if self.rank in (None, rank))
        _LOGGER.info("compiled %s in %d stages for %s", request.signature, len(cut.stages), engine.mesh)
        whole = _whole(program, staged, own)
        return CompiledProgram(
            whole, plans[0], frozenset(), request.update, found, program.python, weights, staged, own
        )  # fmt: skip

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

    def _cut(self, program: Program, request: Request, engine: Engine) -> CutProgram:
        """The programs of the stages, each with its update."""
        from passes.preparation.split_stages import SplitStages
        from passes.strategies.price_nodes import NodePrices

        assert request.update is not None, "a training step updates"
        prices = NodePrices(self.planner.cluster_for(engine.mesh), engine.mesh)
        cut = SplitStages(self.pipeline.ranks * self.pipeline.virtual_stages, prices.computed_s)(program)
        return replace(cut, stages=tuple(append_update(stage, request.update, of_stage=True) for stage in cut.stages))

    def _plan(self, stage: Program, request: Request, engine: Engine) -> Plan:
        share = replace(
            self.planner,
            constraints=_constraints_of(stage, self.planner.constraints),
            time_budget_s=self.planner.time_budget_s / (self.pipeline.ranks * self.pipeline.virtual_stages),
        )
        return share.search(stage, engine.mesh, request.placed)

    def _lower(self, program: Program, cut: CutProgram, plans: Sequence[Plan]) -> StagedProgram:
        from passes.lowering.order_pipeline import order_pipeline
        from passes.verification.verify_schedule import verify_schedule

        order = order_pipeline(
            *(self.pipeline.schedule, self.pipeline.ranks),
            *(self.planner.micro_batches, self.pipeline.virtual_stages),
        )
        if self.planner.verify:
            verify_schedule(order)
        stages = [self.planner._lower(stage, plan)[0] for stage, plan in zip(cut.stages, plans, strict=True)]
        outputs = program.outputs_of(OutputKind.OUTPUT)
        values = {slot.name: program.nodes_by_name()[slot.node].meta["val"] for slot in outputs}
        loss = loss_among(
            [Output(name, tuple(value.shape), value.dtype) for name, value in values.items()],
            {slot.name for slot in program.inputs_of(InputKind.TANGENT)},
        ).name
        at = next(n for n, stage in enumerate(cut.stages) if any(slot.name == loss for slot in stage.outputs))
        made = tuple(StageProgram(phased, plan) for phased, plan in zip(stages, plans, strict=True))
        staged = StagedProgram(made, cut.crossings, order, loss, at)
        _check_crossings(staged)
        return staged


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


def _check_stays(program: Program) -> None:
    """Refuse what stages cannot share yet."""
    buffers = [slot.name for slot in program.outputs_of(OutputKind.BUFFER_UPDATE)]
    if buffers:
        raise NotAvailableError(
            f"A call changes buffer {buffers[0]!r}, and stages of a pipeline do not share buffers that change. Use a "
            "mesh without the axis 'pipeline', or put the module into evaluation mode."
        )
    if program.kept:
        raise NotAvailableError(
            f"A call leaves a tensor in attribute {next(iter(program.kept.values()))!r}; under an axis 'pipeline' only "
            "the loss is handed out. Leave the attribute out, or use a mesh without the axis 'pipeline'."
        )
    if any(slot.kind is InputKind.PARAMETER for slot in program.read_by_guards()):
        raise NotAvailableError(
            "The model branches on the value of a parameter, which only the ranks of its stage hold. Use a mesh "
            "without the axis 'pipeline'."
        )


def _check_constraints(constraints: Mapping[str, PartitionSpec], cut: CutProgram) -> None:
    for pattern in constraints:
        if not any(pattern in _constraints_of(stage, constraints) for stage in cut.stages):
            raise InvalidSpecError(
                f"constraints[{pattern!r}] matches no parameter, buffer, input or state of any stage."
            )


def _constraints_of(stage: Program, constraints: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """The constraints that mean something in a stage."""
    state = {slot.name for slot in stage.inputs_of(InputKind.STATE)}
    names = {name for slot in stage.inputs for name in (slot.name, *slot.aliases)}
    names |= {slot.name for slot in stage.outputs_of(OutputKind.OUTPUT)}
    return {
        pattern: spec
        for pattern, spec in constraints.items()
        if any(fnmatchcase(name, pattern) and (":" in pattern or name not in state) for name in names)
    }


def _check_crossings(staged: StagedProgram) -> None:
    """Each value that crosses stages is made by the stage before its reader, in the shape that the reader takes."""
    for crossing in staged.crossings:
        made = find_slot(staged.stages[crossing.maker].phased.lowered.outputs, crossing.name)
        taken = find_slot(staged.stages[crossing.reader].phased.lowered.inputs, crossing.name)
        if (made.shape, made.dtype) != (taken.shape, taken.dtype):
            raise VerificationError(f"{crossing} is made as {made}, and read as {taken}.")
        if crossing.is_forward != (crossing.maker < crossing.reader):
            raise VerificationError(f"{crossing} goes against the order of the stages.")
