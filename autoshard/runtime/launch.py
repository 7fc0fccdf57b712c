"""Chooses the engine of a user's mesh: torch.distributed if the run has a process for each rank, else simulation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.agreement.meeting import launcher_keeps_store, meet
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.engine import Engine, SimulatorEngine
from autoshard.runtime.graph_loader import Loading

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

_PATIENCE_S = 1800.0
"""Seconds that processes with accelerators wait for each other to start; torch waits as long."""


def world_size() -> int:
    """Return the number of processes of this run: the size of the process group, else `WORLD_SIZE`, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def share_among_processes(compute: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """Run `compute` on the first process only; return its result, or raise its error, on all processes.

    `timeout_s` is how many seconds the other processes wait without a sign of life.
    """
    return compute() if world_size() == 1 else _all_processes(timeout_s).share(compute)


def _all_processes(timeout_s: float) -> ControlGroup:
    """Return a control group of all processes of this run. Before, initialise torch.distributed if that was not done.

    On CPUs, communication in the process group that is made here raises an error after `timeout_s` seconds of waiting.
    """
    if not dist.is_initialized():
        timeout = None if torch.accelerator.is_available() else timedelta(seconds=timeout_s)
        if launcher_keeps_store():
            store, rank, ranks = meet(timeout_s if timeout else _PATIENCE_S)
            dist.init_process_group(timeout=timeout, store=store, rank=rank, world_size=ranks)
        else:
            dist.init_process_group(timeout=timeout)
    return ControlGroup(range(dist.get_world_size()), timeout_s)


def make_engine(
    mesh: DeviceMesh | Mesh,
    device: torch.device,
    loading: Loading = Loading(),  # noqa: B008  (frozen)
    timeout_s: float = TIMEOUT_S,
) -> Engine:
    """Return the engine for a mesh: a `DistributedEngine` if the run has a process for each rank, else a simulator.

    A torch `DeviceMesh` always gets a `DistributedEngine`.

    Args:
        mesh: the mesh.
        device: the device of the user's model.
        loading, timeout_s: see `DistributedEngine`.

    Raises:
        MeshError: `mesh` is not a mesh, or the run has several processes, but fewer than `mesh` has ranks.
    """
    if isinstance(mesh, DeviceMesh):
        return DistributedEngine(mesh, loading, timeout_s)
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
    return DistributedEngine(_device_mesh(mesh, kind, timeout_s), loading, timeout_s)


def _device_mesh(mesh: Mesh, kind: str, timeout_s: float) -> DeviceMesh:
    """Return a torch `DeviceMesh` of all processes on devices of type `kind`, such as "cpu".

    On CPUs, communication in its groups raises an error after `timeout_s` seconds. Torch's own `init_device_mesh`
    always gives such groups a timeout of half an hour.
    """
    if kind != "cpu":
        return init_device_mesh(kind, mesh.shape, mesh_dim_names=mesh.axis_names)
    groups = [_group_along(mesh, axis, timedelta(seconds=timeout_s)) for axis in mesh.axis_names]
    ranks = torch.arange(mesh.size).view(mesh.shape)
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=mesh.axis_names)


def _group_along(mesh: Mesh, axis: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return the process group of this rank along an axis. If the axis has all processes, it is the default group."""
    columns = [list(column) for column in mesh.groups(axis)]
    world = dist.group.WORLD
    if len(columns) == 1 and world is not None:
        return world
    group: Any
    group, _ = dist.new_subgroups_by_enumeration(columns, timeout=timeout)
    return cast(dist.ProcessGroup, group)


def _log_simulation(mesh: Mesh, processes: int) -> None:
    if processes > 1:
        _LOGGER.warning(
            "%s has fewer ranks than the %d processes of this run: each process simulates it", mesh, processes
        )
