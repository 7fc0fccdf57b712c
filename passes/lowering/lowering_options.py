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
    """Choices that the caller of lowering makes, and the plan and the limits that passes are made from.

    Args:
        with_kernels: let Triton kernels stand in for operators of the phases; the lowered program as a whole stays
            without, for verification.
        with_generated: generated kernels too, for the groups that hand-written kernels leave.
        prices_kernels: price the generated kernels, and do not write them; the program is not to be run.
        with_native: let torch's fused kernels run semantic operators, rather than their definitions.
        with_overlap: let collectives run beside computation, gradients' in buckets, and let experts keep their rows.
        reduce_dtype: in which gradients of float32 travel between ranks; None: in their own.
        saves_least: let the backward compute again what a compiler fuses; for programs without kernels.
        micro_batches: how many a training step has; values of parameters alone are computed once for all of them.
        load: of a stage of a pipeline, what its rank holds beside it.
        on_pass: sees every pass, those that prepare the program too; the program is then prepared anew.
        lowered: what `Lower` makes of the plan, where that is known.
        plan: the plan to lower to. Set by `lower_program`, as are the fields below.
        cluster: where the program runs; decides between reshards of equal effect. None goes by bytes sent.
        memory_bytes: the most that each rank may have in use; None: no more than the program has without a pass.
        in_flight: how much may be under way at once, in the passes of `Moment.IN_FLIGHT`.
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
        """The plan, in passes that run when there is one."""
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
        """The device that the program runs on, if it is known."""
        return None if self.cluster is None else self.cluster.device


USUAL = LoweringOptions()
"""One batch a step, on torch's kernels, with overlap."""
