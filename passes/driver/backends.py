"""Backends of `compile`: the functions that rewrite or compile the graphs of a rank before they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard.errors import NotAvailableError
from autoshard.kernels.fusible import traced_through
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.engine import Engine
from autoshard.runtime.graphed_passes import GraphedPasses
from passes.lowering.order import Moment, run_at

_WITH_KERNELS = ("inductor", "triton")


def has_kernels(backend: str, device: torch.device) -> bool:
    """Whether a backend's programs have Triton kernels on a device.

    Programs for a CPU have Triton kernels only in Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    return backend in _WITH_KERNELS and (device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1")


def wrap_of(backend: str) -> Callable[[fx.GraphModule], Callable[..., Any]] | None:
    """Return the function that compiles each graph of a rank for `backend`, or None if graphs run as they are."""
    if backend != "inductor":
        return None

    return lambda graph: torch.compile(traced_through(graph), backend="inductor", fullgraph=True, dynamic=False)


def finish(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Run the passes of `Moment.WRITTEN` on a graph.

    These passes run last, on a graph that writes new parameters over old parameters. An example is `BucketUpdates`.
    """
    return run_at(Moment.WRITTEN, graph_module)


def graphs_of(cuda_graph: bool, engine: Engine, *, is_traced: bool, has_stages: bool) -> GraphedPasses | None:
    """Return an empty store of CUDA graphs for forward, backward and update of a step, or None without `cuda_graph`.

    Args:
        is_traced: whether the optimizer's update is traced.
        has_stages: whether the mesh has a pipeline.

    Raises:
        NotAvailableError: CUDA graphs do not support the call. The message names the reason and the way out.
    """
    if not cuda_graph:
        return None
    refused = None
    if not isinstance(engine, DistributedEngine) or engine.device.type != "cuda":
        refused = "the mesh is not of processes on GPUs; use a DeviceMesh of CUDA devices"
    elif not is_traced:
        refused = "there is no optimizer whose update is traced; pass SGD, Adam, AdamW or Muon of torch.optim"
    elif has_stages:
        refused = "the mesh has an axis 'pipeline', whose stages wait for each other; use a mesh without it"
    if refused is not None:
        raise NotAvailableError(f"cuda_graph=True records training steps, but {refused}. Or leave cuda_graph out.")
    return GraphedPasses()
