"""The options of lowering: one frozen object, from which every pass of `passes.lowering.order` is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.plan import Plan
from autoshard.ir.reshard import StepCost
from cost_models.device import Device
from cost_models.hardware import Cluster
from passes.lowering.in_flight import InFlight
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.strategies.price import StepPrice

OnPass = Callable[[Any, Any, Any], None]
"""Called after each pass with the pass, its input and its result."""


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """Choices of lowering's caller, and the plan and limits of its passes.

    Args:
        with_kernels: replace operators of the phases by Triton kernels; the uncut lowered program stays without, for
            verification.
        with_generated: also generate kernels, for the groups that hand-written kernels leave.
        prices_kernels: price the generated kernels without writing them; the program will not run.
        with_native: run semantic operators by torch's fused kernels instead of their definitions.
        with_overlap: overlap collectives with computation, gradients' in buckets, and let experts save their rows.
        reduce_dtype: type in which float32 gradients are sent between ranks; None: their own.
        saves_least: let the backward recompute values that a compiler fuses; for programs without kernels.
        micro_batches: micro-batches of a training step; values of parameters alone are computed once for all of them.
        load: for a stage of a pipeline, memory on its rank beside the stage.
        on_pass: observer of every pass, including preparation, which then runs anew.
        lowered: the result of `Lower` for the plan, if it is known.
        plan: the plan. `lower_program` sets it and the fields below.
        cluster: hardware, which decides between reshards of equal effect. None decides by bytes sent.
        memory_bytes: memory limit of each rank; None: the program's peak before each pass.
        in_flight: limits on collectives under way, in the passes of `Moment.IN_FLIGHT`.
    """

    with_kernels: bool = False
    with_generated: bool = True
    prices_kernels: bool = False
    with_native: bool = True
    with_overlap: bool = True
    reduce_dtype: torch.dtype | None = None
    saves_least: bool = False
    micro_batches: int = 1
    load: StageLoad = ONE_STAGE
    on_pass: OnPass | None = None
    lowered: LoweredProgram | None = None
    plan: Plan | None = None
    cluster: Cluster | None = None
    memory_bytes: float | None = None
    in_flight: InFlight = field(default_factory=InFlight)

    @property
    def decided(self) -> Plan:
        """The plan, in passes that run after planning."""
        assert self.plan is not None, "passes behind the traced program have a plan"
        return self.plan

    @property
    def keeps_rows(self) -> bool:
        """Whether experts may keep rows: a compiler takes the sizes of values for fixed, and the rows' vary."""
        return self.with_overlap and not self.saves_least

    @property
    def step_cost(self) -> StepCost | None:
        """The price of a reshard step on the cluster."""
        return None if self.cluster is None else StepPrice(self.cluster, self.decided.mesh)

    @property
    def device(self) -> Device | None:
        """The program's device, if known."""
        return None if self.cluster is None else self.cluster.device


USUAL = LoweringOptions()
"""One batch a step, on torch's kernels, with overlap."""
