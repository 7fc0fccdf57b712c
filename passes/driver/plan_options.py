"""The options of planning a program on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.planning.restrictions import Roles
from passes.solver.search_control import SearchControl


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Limits, constraints and choices that a user may ask of a plan.

    Args:
        constraints: glob of qualified names to the spec they must have.
        memory_budget: bytes per device, None for no limit.
        time_budget_s: seconds that searches are to take; `control` ends them.
        state_bytes_per_parameter_byte: optimizer state as a multiple of the parameters' bytes (2 for Adam in float32).
        strict: refuse operators without a sharding rule.
        with_baselines: price the known recipes too.
        before: a plan of the program, on this mesh or another, to start from; the result is not worse than it is here,
            if it fits (on another mesh: without what it recomputes and offloads).
        micro_batches: how many of them a training step has; the program is that of one.
        load: of a stage of a pipeline, what its rank holds beside it.
        dispatch: how the host issues operators, see `cost_models.device.Device.dispatch`.
        recompute: whether values of the forward may be computed again in the backward where memory is short.
        offload: whether, then, they may also lie in the host's memory until the backward.
        reduce_dtype: in which gradients of float32 travel between ranks; predicted, while the search prices their own.
        with_kernels: whether calls are priced within the Triton kernels that run in place of them.
        recipe: within which the plan is searched; None: everywhere.
        specs: sites of the program to the spec that their value must have.
        roles: mesh axes to the role that each must have.
        elsewhere: plans on other meshes; what is far dearer than those is not lowered, and known recipes that use every
            axis alike are not priced again, see `solve_baselines`.
        control: told how the search goes, and may stop it: the plan is then the best until then.
    """

    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)
    memory_budget: float | None = None
    time_budget_s: float = 60.0
    state_bytes_per_parameter_byte: float = 0.0
    strict: bool = False
    with_baselines: bool = True
    before: Plan | None = None
    micro_batches: int = 1
    load: StageLoad = ONE_STAGE
    dispatch: str = "eager"
    recompute: bool = True
    offload: bool = True
    reduce_dtype: torch.dtype | None = None
    with_kernels: bool = False
    recipe: Recipe | None = None
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    roles: Roles = field(default_factory=dict)
    elsewhere: Sequence[Plan] = ()
    control: SearchControl = field(default_factory=SearchControl)
