"""The options of the search for a plan of one program on one mesh."""

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
    """The options of a search for a plan: limits, constraints and choices of the user.

    Args:
        constraints: pattern (glob) of qualified names → the spec that matching values must have.
        memory_budget: bytes on each device; None: no limit.
        is_budget_given: whether the user gave `memory_budget`. Otherwise it is the memory of the device.
        time_budget_s: seconds that all searches together may take. If a search may need more, mesh axes are tied
            (`space_in_time`). `control` ends the searches.
        state_bytes_per_parameter_byte: optimizer state as a multiple of the parameters' bytes (2 for Adam in float32).
        strict: whether an operator without a sharding rule is an error.
        with_baselines: whether to price the known recipes too, such as FSDP.
        before: a plan of the program to start from. If this plan fits, the result is no slower. A plan of another mesh
            counts without its recomputation and offload.
        micro_batches: number of micro-batches in a training step; the program is for one micro-batch.
        load: number of stages and of micro-batches in flight on a pipeline rank.
        dispatch: the way in which the host launches operators, see `cost_models.device.Device.dispatch`.
        recompute: whether values of the forward may be recomputed in the backward if memory is short.
        offload: whether values may then also wait in the host's memory.
        reduce_dtype: the type in which float32 gradients are sent between ranks. Predictions use it; the search prices
            the gradients' own type.
        with_kernels: whether to price Triton kernels instead of the calls that they replace.
        recipe: restricts the search; None: no restriction.
        specs: name of a node of the program → the spec that its value must have.
        roles: mesh axis → the role that it must have, such as `ROLES["fsdp"]`.
        elsewhere: plans on other meshes. Choices that are much slower are not lowered. `solve_baselines` skips known
            recipes that are much slower.
        control: shows the progress, and may stop the search; the plan is then the best so far.
    """

    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)
    memory_budget: float | None = None
    is_budget_given: bool = True
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
