"""Options of `compile` and their defaults."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.call import Call
from passes.driver import compile_model
from tests.passes.launches import fused_calls


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_backend_triton_has_triton_kernels_in_its_programs(backend: str) -> None:
    """`backend="triton"` puts Triton kernels into programs, and "auto" puts none on a CPU."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.RMSNorm(8)), torch.randn(4, 8)
    sharded = autoshard.compile(model, Mesh({"data": 2}), backend=backend, example_inputs=(x,))
    assert bool(fused_calls(sharded.programs[0].phased.forward)) == (backend == "triton")


@pytest.mark.parametrize(
    ("options", "names"), [(autoshard.Options(), {"output:0"}), (autoshard.Options(gather_outputs=True), set())]
)
def test_outputs_are_handed_out_as_they_lie(options: autoshard.Options, names: set[str]) -> None:
    """Outputs keep the plan's layout, or are gathered with `gather_outputs=True`."""
    sharded = autoshard.compile(
        nn.Linear(4, 4), Mesh({"data": 2}), example_inputs=(torch.randn(8, 4),), options=options
    )
    assert sharded.programs[0].sharded_outputs == names


@pytest.mark.parametrize(
    ("processes", "ranks", "accelerator", "device"),
    [(2, 2, None, "cpu"), (2, 2, "cuda", "cuda"), (1, 1, "cuda", "cuda"), (1, 2, "cuda", "cpu")],
)
def test_meta_models_have_the_device_of_their_process(
    processes: int, ranks: int, accelerator: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with a process of its own uses the machine's accelerator, and simulated ranks use the CPU."""
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(compile_model, "world_size", lambda: processes)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    call = Call(model=nn.Linear(2, 2, device="meta"), target=Mesh({"data": ranks}))
    assert compile_model._device_of(call) == torch.device(device)
