"""Examine this machine for autoshard: versions, devices, process groups, and one compile as a test."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist
from torch import nn

from autoshard import api
from autoshard.ir.mesh import Mesh
from cost_models import constants

_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one examination: its name, the state that was found, and whether autoshard can work with this state."""

    name: str
    found: str
    is_good: bool = True


def diagnose() -> tuple[Finding, ...]:
    """Examine everything that a compile and a run need, from packages to one small compile as a test."""
    return tuple(look() for look in _LOOKS)


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")


def _versions() -> Finding:
    names = ("torch", "triton", "highspy", "networkx", "sympy", "numpy")
    found = {name: _version(name) for name in names}
    needed = found["torch"] is not None and found["highspy"] is not None
    return Finding("packages", ", ".join(f"{name} {found[name] or 'missing'}" for name in names), needed)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Finding:
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    return Finding("devices", f"{count} x {', '.join(names)}" if count else "CPU only (simulator and Gloo)")


def _process_groups() -> Finding:
    if not dist.is_available():
        return Finding("process groups", "torch.distributed is not in this build of torch", is_good=False)
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return Finding("process groups", ", ".join(name for name, has in backends.items() if has) or "none")


def _hardware_files() -> Finding:
    return Finding("hardware files", ", ".join(constants.names("nodes")))


def _small_compile() -> Finding:
    """Compile a small model for two simulated ranks, and report how far its output is from one device's."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    features = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    sharded = api.compile(copy.deepcopy(model), Mesh({"data": 2}), example_inputs=(features,))
    with torch.no_grad():
        expected, actual = model(features), sharded(features)
    difference = float((expected - actual).abs().max())
    return Finding(
        "compile on the simulator",
        f"largest difference to one device {difference:.1e}",
        is_good=difference <= _TOLERANCE * float(expected.abs().max()),
    )


_LOOKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _versions,
    _devices,
    _process_groups,
    _hardware_files,
    _small_compile,
)
