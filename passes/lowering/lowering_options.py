"""The options of lowering, in one frozen object. `passes.lowering.order` makes each pass from it."""

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
"""Called after each pass, with the pass, its input program and its result."""


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """The options of lowering. The caller sets the fields up to `lowered`. Lowering sets the fields from `plan` on.

    Args:
        with_kernels: replace calls by hand-written Triton kernels. The uncut lowered program stays without kernels, for
            verification.
        with_generated: with `with_kernels`, also generate kernels for calls without a hand-written kernel.
        prices_kernels: mark the calls that generated kernels would replace, with their times, and write no kernels.
            Such a program is only for predictions.
        with_native: run semantic operators (attention, norms) by torch's fused kernels.
        with_overlap: overlap collectives with computation, put them into buckets, and let expert layers save their
            received rows (`KeepRows`).
        reduce_dtype: dtype in which float32 gradients are sent between ranks; None: float32.
        saves_least: let the backward recompute pointwise values (`passes.lowering.save_least`). This is for programs
            without kernels that a compiler such as Inductor fuses.
        micro_batches: number of micro-batches in a training step. With several, values of parameters alone are computed
            once for all (`Hoist`).
        load: stages and micro-batches that the rank holds in memory at once.
        on_pass: called after each pass. If it is set, the passes before planning run again, so that it is called for
            them too.
        lowered: the result of `Lower` for the plan if the caller has it already; `Lower` is then left out.
        cluster: the hardware. Passes compare times on it. None: they compare bytes.
        memory_bytes: limit of each rank's peak memory. None: no pass may raise the peak.
        in_flight: limits on collectives under way, for the passes of `Moment.IN_FLIGHT`.
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
        """The field `plan`, which must not be None. Passes that run after planning read it."""
        assert self.plan is not None, "passes behind the traced program have a plan"
        return self.plan

    @property
    def keeps_rows(self) -> bool:
        """Whether expert layers may save received rows for the backward.

        This is False without `with_overlap`, and for programs that a compiler such as Inductor fuses.
        """
        return self.with_overlap and not self.saves_least

    @property
    def step_cost(self) -> StepCost | None:
        """A function from a reshard step to its seconds on the cluster; None without a cluster."""
        return None if self.cluster is None else StepPrice(self.cluster, self.decided.mesh)

    @property
    def device(self) -> Device | None:
        """The device of the cluster; None without a cluster."""
        return None if self.cluster is None else self.cluster.device


USUAL = LoweringOptions()
"""One micro-batch in a step, torch's kernels, and overlap of communication with computation."""
