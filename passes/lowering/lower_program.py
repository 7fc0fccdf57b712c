"""The order of the passes that make of a traced program and a plan what each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.reshard import StepCost
from cost_models.hardware import Cluster
from passes.lowering.hoist import Hoist
from passes.lowering.join_biases import JoinBiases
from passes.lowering.lower import Lower
from passes.lowering.name_communicators import NameCommunicators
from passes.lowering.narrow_reductions import NarrowReductions
from passes.lowering.node_time import NodeTime
from passes.lowering.overlap import overlapped, room_of
from passes.lowering.phases import OnPass, phases_of, run_passes
from passes.lowering.select_kernels import SelectKernels
from passes.lowering.split_phases import SplitPhases
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_hubs import InsertHubs
from passes.preparation.join_gelu import JoinGelu
from passes.recomputation.recompute import InsertRecompute
from passes.strategies.price import StepPrice

PREPARATION: Sequence[Callable[[Program], Program]] = (Canonicalize(), JoinGelu(), InsertHubs())
"""The passes that bring a traced program into the form that is planned and lowered, in order."""


_PREPARED = "autoshard: as traced, and prepared"


def prepare(program: Program) -> Program:
    """The program in the form that is planned and lowered; made once, and kept with the traced graph."""
    traced, prepared = program.graph_module.meta.get(_PREPARED, (None, None))
    if traced is not program:
        prepared = run_passes(PREPARATION, program)
        program.graph_module.meta[_PREPARED] = (program, prepared)
    return prepared


def prepare_for(program: Program, plan: Plan) -> Program:
    """The program in the form that a plan is for, with what it recomputes; `PlanMismatchError` if it is of another."""
    return InsertRecompute(plan.recompute.nodes, plan.offload.nodes)(prepare(program))


def lower_program(
    program: Program,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    with_kernels: bool = False,
    with_generated: bool = True,
    with_native: bool = True,
    with_overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
    saves_least: bool = False,
    micro_batches: int = 1,
    on_pass: OnPass | None = None,
) -> PhasedProgram:
    """The per-rank program of a plan, cut into forward and backward.

    Args:
        program: as traced.
        plan: made for this program.
        cluster: where it runs; decides between reshards of equal effect. None goes by bytes sent.
        with_kernels: let Triton kernels stand in for operators of the phases; the lowered program as a whole stays
            without, for verification.
        with_generated: generated ones too, for the groups that hand-written ones leave.
        with_native: let torch's fused kernels run semantic operators, rather than their definitions.
        with_overlap: let collectives run beside computation, gradients' in buckets, and experts keep what was sent.
        reduce_dtype: in which gradients of float32 travel between ranks; None: in their own.
        saves_least: let the backward compute again what a compiler fuses; for programs without kernels.
        micro_batches: how many a training step has: what depends on parameters alone is computed once for all of them.
        on_pass: sees every pass, those that prepare the program too; it is then prepared anew.

    Raises:
        PlanMismatchError: the plan is of another program.
    """
    passes = (*PREPARATION, InsertRecompute(plan.recompute.nodes, plan.offload.nodes))
    prepared = prepare_for(program, plan) if on_pass is None else run_passes(passes, program, on_pass)
    return lower_prepared(
        prepared, plan, cluster, with_kernels=with_kernels, with_generated=with_generated, with_native=with_native,
        with_overlap=with_overlap, reduce_dtype=reduce_dtype, saves_least=saves_least, micro_batches=micro_batches,
        on_pass=on_pass,
    )  # fmt: skip


def lower_prepared(
    prepared: Program,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    with_kernels: bool = False,
    with_generated: bool = True,
    with_native: bool = True,
    with_overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
    saves_least: bool = False,
    micro_batches: int = 1,
    on_pass: OnPass | None = None,
) -> PhasedProgram:
    """`lower_program` of a program as `prepare_for` gives it: what runs, and what a decided plan is predicted from."""
    step_cost: StepCost | None = StepPrice(cluster, plan.mesh) if cluster is not None else None
    lowered = run_passes((Lower(plan, step_cost),), prepared, on_pass)
    narrow = () if reduce_dtype is None else (NarrowReductions(reduce_dtype),)
    last = (*((SelectKernels(), JoinBiases()) if with_native else ()), NameCommunicators(), *narrow)
    room = room_of(prepared, plan)
    first = (SplitPhases(saves_least), Hoist(micro_batches, NodeTime(plan.mesh, cluster), room))
    phased = phases_of(lowered, cluster, first, last, with_kernels, with_generated, on_pass)
    return overlapped(phased, on_pass, micro_batches, room, cluster, not saves_least) if with_overlap else phased
