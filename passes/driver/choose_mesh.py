"""The mesh that suits a model on a cluster, where a user gives none."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from autoshard.arguments import ExampleInputs, split_inputs
from autoshard.cluster import candidate_meshes
from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.request import Request
from autoshard.ir.update import Update
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.launch import share_among_processes, world_size
from cost_models.hardware import Cluster
from passes.driver.planner import Planner


def choose_mesh(
    model: nn.Module,
    cluster: Cluster,
    planner: Planner,
    example_inputs: ExampleInputs | None,
    update: Update | None = None,
    timeout_s: float = TIMEOUT_S,
    outputs: Outputs = Outputs.AS_PLANNED,
) -> tuple[Planner, Mesh]:
    """The mesh that suits a model on a cluster, and a planner that keeps the plan made for it."""
    if planner.fixed is not None:
        return planner, planner.fixed.mesh
    if example_inputs is None:
        raise MeshError(
            "compile(model, Cluster(...)) must plan to pick the axes of the mesh: pass example_inputs=, or a mesh."
        )
    processes = world_size()
    if 1 < processes != cluster.size:
        raise MeshError(f"{cluster} has {cluster.size} devices, but this run has {processes} processes.")
    args, kwargs = split_inputs(example_inputs)
    grad = any(parameter.requires_grad for parameter in model.parameters())
    request = Request(model, args, kwargs, grad, update=update, outputs=outputs)
    chosen = share_among_processes(lambda: planner.plan_call(request, candidate_meshes(cluster))[1], timeout_s)
    return replace(planner, made=chosen), chosen.mesh
