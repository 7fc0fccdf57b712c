"""Make the engine that runs a rank's pipeline stages, and the object that sends messages between stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.ir.mesh import Mesh
from autoshard.ir.staged import ONLY_AXIS, PIPELINE_AXIS
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.engine import Engine, SimulatorEngine
from autoshard.runtime.graph_loader import Loading
from autoshard.runtime.launch import make_engine
from autoshard.runtime.process_groups import ProcessGroups
from autoshard.runtime.stages.stage_meshes import StageMeshes
from autoshard.runtime.stages.stage_messages import MessagesBetweenRanks, MessagesInProcess, StageMessages


def make_engines(
    mesh: DeviceMesh | Mesh,
    device: torch.device,
    loading: Loading = Loading(),  # noqa: B008  (frozen)
    timeout_s: float = TIMEOUT_S,
) -> tuple[Engine, StageMessages | None]:
    """Return the engine that runs programs on `mesh`, and the object that carries messages between pipeline stages.

    Without an axis "pipeline", these are the engine of `make_engine` and None. With this axis, the engine runs the
    programs of stages, which use the other axes of the mesh. The arguments are those of `make_engine`.
    """
    mesh = _with_an_axis_for_stages(mesh)
    engine = make_engine(mesh, device, loading, timeout_s)
    if PIPELINE_AXIS not in engine.mesh.axis_names:
        return engine, None
    if isinstance(engine, SimulatorEngine):
        rest = {name: size for name, size in engine.mesh.axes if name != PIPELINE_AXIS}
        return SimulatorEngine(Mesh(rest), device), MessagesInProcess()
    assert isinstance(engine, DistributedEngine), "an engine runs processes, or simulates them"
    whole = engine.device_mesh
    stages = StageMeshes.of(whole)
    control = ControlGroup(whole.mesh.flatten().tolist(), timeout_s)
    groups = ProcessGroups(whole, timeout_s)
    engine = DistributedEngine(stages.own, loading, timeout_s, control, groups, stages)
    return engine, MessagesBetweenRanks(whole, groups)


def _with_an_axis_for_stages(mesh: DeviceMesh | Mesh) -> DeviceMesh | Mesh:
    """Return the mesh, with one more axis of size 1 if its only axis is "pipeline". Stages need an axis to run on."""
    if isinstance(mesh, Mesh):
        return Mesh({PIPELINE_AXIS: mesh.size, ONLY_AXIS: 1}) if mesh.axis_names == (PIPELINE_AXIS,) else mesh
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != (PIPELINE_AXIS,):
        return mesh  # `make_engine` refuses an object that is no mesh
    group, ranks = mesh.get_group(), mesh.mesh[:, None]
    alone: Any
    alone, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend=dist.get_backend(group))
    return DeviceMesh.from_group([group, alone], mesh.device_type, ranks, mesh_dim_names=(PIPELINE_AXIS, ONLY_AXIS))
