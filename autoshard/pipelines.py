"""What `compile` is told of a pipeline: checked arguments, and the engine of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import MeshError, NotAvailableError
from autoshard.ir.mesh import Mesh
from autoshard.ir.staged import PIPELINE_AXIS
from cost_models.errors import CostArgumentError
from cost_models.schedule_orders import order_rows

if TYPE_CHECKING:
    import torch

    from autoshard.ir.update import Update
    from autoshard.planner import Planner

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
"""Schedules that run: those whose backwards are whole."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline as it is asked for.

    Args:
        ranks: of the axis that carries stages.
        schedule: one of `SCHEDULES`.
        virtual_stages: stages on each rank.
    """

    ranks: int
    schedule: str
    virtual_stages: int


def pipeline_of(mesh: Any, schedule: str | None, virtual_stages: int, micro_batches: int) -> Pipeline | None:
    """The pipeline of a mesh; None where no axis carries stages.

    Raises:
        MeshError: a schedule is asked for, and no axis carries stages.
        NotAvailableError: the schedule does not run, or not with these numbers.
    """
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else getattr(mesh, "axis_names", ())
    if PIPELINE_AXIS not in names:
        if schedule is not None or virtual_stages != 1:
            raise MeshError(
                f"schedule={schedule!r}, virtual_stages={virtual_stages!r} are of a pipeline, and no axis of {mesh} is "
                "named 'pipeline'. Name one so, or leave them out."
            )
        return None
    chosen = schedule or ("1F1B" if virtual_stages == 1 else "Interleaved1F1B")
    if chosen not in SCHEDULES:
        raise NotAvailableError(f"schedule={chosen!r} does not run; use one of {', '.join(map(repr, SCHEDULES))}.")
    ranks = (Mesh.from_device_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh).axis_size(PIPELINE_AXIS)
    if ranks * virtual_stages < 2:
        raise MeshError(f"{mesh} has one rank along 'pipeline'; leave that axis out, or give it two ranks or more.")
    try:
        order_rows(chosen, ranks, micro_batches, virtual_stages)
    except CostArgumentError as error:
        raise NotAvailableError(
            f"schedule={chosen!r} does not run with micro_batches={micro_batches} on {mesh}: {error}"
        ) from error
    return Pipeline(ranks, chosen, virtual_stages)


def check_pipeline(
    update: Update | None,
    optimizer: torch.optim.Optimizer | None,
    planner: Planner,
    backend: str,
    dynamic_lengths: Any,
) -> None:
    """Refuse what does not go with stages yet.

    Raises:
        NotAvailableError: names what, and the way out.
    """
    refused = None
    if optimizer is None:
        refused = "without optimizer= nothing is trained, and stages run training steps"
    elif update is None:
        refused = f"optimizer={type(optimizer).__name__} is not traced; use SGD, Adam or AdamW of torch.optim"
    elif planner.fixed is not None:
        refused = "plan= is of a program that is not cut; leave plan= out"
    elif backend not in ("auto", "reference"):
        refused = f"backend={backend!r} does not run stages; use backend='auto'"
    elif dynamic_lengths is not None:
        refused = "dynamic_lengths= pads whole programs; leave it out"
    if refused is not None:
        raise NotAvailableError(f"The mesh has an axis 'pipeline': {refused}. Or use a mesh without that axis.")
