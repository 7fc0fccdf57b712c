"""The pipeline arguments of a call (axis, schedule, stages, micro-batches), checked and completed from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.call import Call
from autoshard.errors import MeshError, NotAvailableError, PlanMismatchError
from autoshard.ir.mesh import Mesh
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.staged import ONLY_AXIS, PIPELINE_AXIS
from autoshard.ir.update import Update
from cost_models.errors import CostArgumentError
from cost_models.schedule_orders import SCHEDULES, order_rows, usual_schedule


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The pipeline of a call.

    Args:
        mesh: the whole mesh, with the axis "pipeline".
        schedule: a name of `cost_models.schedule_orders.SCHEDULES`.
        virtual_stages: number of stages on each rank.
    """

    mesh: Mesh
    schedule: str
    virtual_stages: int
    micro_batches: int

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks: the size of the axis "pipeline"."""
        return self.mesh.axis_size(PIPELINE_AXIS)

    @property
    def stages(self) -> int:
        """The number of stages on all pipeline ranks together."""
        return self.ranks * self.virtual_stages

    @property
    def stage_mesh(self) -> Mesh:
        """The mesh of one stage: all axes but "pipeline", or one axis of one rank if there are no other axes."""
        return Mesh({name: size for name, size in self.mesh.axes if name != PIPELINE_AXIS} or {ONLY_AXIS: 1})


def pipeline_of(mesh: Any, schedule: str | None, virtual_stages: int, micro_batches: int) -> Pipeline | None:
    """Return the pipeline of a mesh, or None for a mesh without the axis "pipeline".

    Without a schedule, the usual schedule for `virtual_stages` is taken. If the schedule needs more virtual stages than
    `virtual_stages`, it gets as many as it needs.

    Raises:
        MeshError: the pipeline would have a single stage.
        NotAvailableError: the schedule does not run with this number of micro-batches.
    """
    if PIPELINE_AXIS not in _axis_names(mesh):
        return None
    chosen = schedule or usual_schedule(virtual_stages)
    virtual_stages = max(virtual_stages, SCHEDULES[chosen].least_stages)
    whole = whole_mesh(mesh)
    ranks = whole.axis_size(PIPELINE_AXIS)
    if ranks * virtual_stages < 2:
        raise MeshError(f"{mesh} has one rank along 'pipeline'; leave that axis out, or give it two ranks or more.")
    try:
        order_rows(chosen, ranks, micro_batches, virtual_stages)
    except CostArgumentError as error:
        raise NotAvailableError(
            f"schedule={chosen!r} does not run with micro_batches={micro_batches} on {mesh}: {error}"
        ) from error
    return Pipeline(whole, chosen, virtual_stages, micro_batches)


@dataclass(frozen=True, slots=True)
class PipelineArguments:
    """The pipeline arguments of a call of `autoshard.compile`.

    If the call uses a plan with stages, they are the plan's. Otherwise they are the caller's, and `micro_batches` and
    `schedule` may be None.
    """

    micro_batches: int | None
    schedule: str | None
    virtual_stages: int


def pipeline_arguments(
    plan: Plan | None, mesh: Any, micro_batches: int | None, recipe: Recipe | None
) -> PipelineArguments:
    """Return the pipeline arguments of a call of `autoshard.compile`.

    `plan` is the plan that the call uses, if it is known. The other arguments are the caller's.

    Raises:
        PlanMismatchError: the call contradicts the plan, or the mesh has no axis for the plan's stages.
    """
    given = PipelineArguments(micro_batches, recipe and recipe.schedule, (recipe and recipe.virtual_stages) or 1)
    if plan is None:
        return given
    if plan.order is not None and PIPELINE_AXIS not in _axis_names(mesh):
        raise PlanMismatchError(
            f"The plan has {len(plan.stages)} stages, for {plan.mesh}, and no axis of {mesh} is named 'pipeline'. Run "
            "it on that mesh, or leave plan= out."
        )
    of_order = {} if plan.order is None else _of_order(plan, plan.order)
    if plan.order is not None or plan.mesh == whole_mesh(mesh):
        _check_same({**_fields(plan.recipe), **of_order}, {"micro_batches": micro_batches, **_fields(recipe)})
    return PipelineArguments(**of_order) if of_order else given


def _of_order(plan: Plan, order: PipelineOrder) -> dict[str, Any]:
    return {
        "micro_batches": order.micro_batches,
        "schedule": plan.schedule,
        "virtual_stages": order.virtual_stages,
    }


def _fields(recipe: Recipe | None) -> dict[str, Any]:
    """Return the fields of a recipe by name, all None without a recipe.

    The field `pipeline` is left out, because the mesh decides it.
    """
    known = recipe or Recipe()
    return {item.name: getattr(known, item.name) for item in fields(Recipe) if item.name != "pipeline"}


def _check_same(planned: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise `PlanMismatchError` for the first argument in `asked` that differs from the plan's value."""
    for name, value in asked.items():
        if value is not None and name in planned and value != planned[name]:
            raise PlanMismatchError(
                f"{name}={value!r} is asked for, and the plan has {name}={planned[name]!r}. Leave {name} out, or plan "
                "again."
            )


def whole_mesh(mesh: DeviceMesh | Mesh) -> Mesh:
    """Return a mesh or a `DeviceMesh` as a `Mesh`."""
    return Mesh.from_device_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh


def _axis_names(mesh: Any) -> tuple[str, ...]:
    return tuple((mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else getattr(mesh, "axis_names", ()))


def check_pipeline(update: Update | None, call: Call) -> None:
    """Raise `NotAvailableError` if pipeline stages do not support an argument of a call.

    The message names the argument and the way out.
    """
    refused = None
    if call.optimizer is None:
        refused = "without optimizer= nothing is trained, and stages run training steps"
    elif update is None:
        refused = (
            f"optimizer={type(call.optimizer).__name__} is not traced; use SGD, Adam, AdamW or Muon of torch.optim"
        )
    elif call.fixed is not None and not call.fixed.stages:
        refused = f"plan= is of a program that is not cut, for {call.fixed.mesh}; leave plan= out"
    elif call.backend not in ("auto", "reference"):
        refused = f"backend={call.backend!r} does not run stages; use backend='auto'"
    elif call.options.dynamic_lengths is not None:
        refused = "dynamic_lengths= pads whole programs; leave it out"
    if refused is not None:
        raise NotAvailableError(f"The mesh has an axis 'pipeline': {refused}. Or use a mesh without that axis.")
