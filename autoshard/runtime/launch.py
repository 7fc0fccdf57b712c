"""Where to run: which engine serves the mesh that a user names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.distributed import CheckInPlace, DistributedEngine, FinishInPlace
from autoshard.runtime.engine import Engine, SimulatorEngine

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


def world_size() -> int:
    """The number of processes of this run: of the process group, or of `torchrun`, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def share_among_processes(compute: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """What `compute` gives on the first process, on all of this run; it runs once where there is one."""
    return compute() if world_size() == 1 else _all_processes(timeout_s).share(compute)


def _all_processes(timeout_s: float) -> ControlGroup:
    """All processes of this run; groups that are made here give up after `timeout_s` on CPUs."""
    if not dist.is_initialized():
        timeout = None if torch.accelerator.is_available() else timedelta(seconds=timeout_s)
        dist.init_process_group(timeout=timeout)
    return ControlGroup(range(dist.get_world_size()), timeout_s)


def make_engine(
    mesh: DeviceMesh | Mesh,
    device: torch.device,
    wrap: Callable[[fx.GraphModule], Callable[..., Any]] | None = None,
    check_in_place: CheckInPlace | None = None,
    finish_in_place: FinishInPlace | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Engine:
    """The engine for a mesh: processes where there are as many as ranks, else the simulator.

    Args:
        mesh: a torch mesh, always run by processes; or an abstract one.
        device: where the model is.
        wrap, check_in_place, finish_in_place, timeout_s: with processes, see `DistributedEngine`.

    Raises:
        MeshError: the mesh is larger than a run of several processes, or is no mesh.
    """
    if isinstance(mesh, DeviceMesh):
        return DistributedEngine(mesh, wrap, check_in_place, finish_in_place, timeout_s)
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"mesh={mesh!r} is a {type(mesh).__name__}; pass autoshard.Mesh({{'data': 2}}), a torch DeviceMesh with "
            "names, or an autoshard.Cluster."
        )
    processes = world_size()
    if 1 < processes < mesh.size:
        raise MeshError(
            f"{mesh} has {mesh.size} ranks, but this run has {processes} processes. Start {mesh.size} processes "
            f"(torchrun --nproc-per-node {mesh.size}), or use a mesh of {processes}."
        )
    if processes == 1 or processes != mesh.size:
        _log_simulation(mesh, processes)
        return SimulatorEngine(mesh, device)
    kind = "cuda" if device.type == "cuda" else "cpu"
    _all_processes(timeout_s).agree(lambda: {"mesh": str(mesh), "timeout_s": str(timeout_s)}, f"make {mesh}")
    device_mesh = init_device_mesh(kind, mesh.shape, mesh_dim_names=mesh.axis_names)
    return DistributedEngine(device_mesh, wrap, check_in_place, finish_in_place, timeout_s)


def _log_simulation(mesh: Mesh, processes: int) -> None:
    if processes > 1:
        _LOGGER.warning(
            "%s has fewer ranks than the %d processes of this run: each process simulates it", mesh, processes
        )
