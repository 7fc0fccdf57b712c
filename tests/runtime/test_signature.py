"""Inputs on another device than the program's raise an error that names both devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import autoshard
from autoshard.errors import TraceError
from autoshard.runtime.signature import check_devices

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_an_input_on_another_device() -> None:
    """An input on another device than it was traced on raises an error that names input and devices."""
    with FakeTensorMode():
        given = {"input:0": torch.empty(2, 3, device=CUDA), "input:1": torch.empty(2)}
    check_devices(given, CUDA, {"input:0": "cuda", "input:1": "cpu"})
    check_devices(given, CUDA, {})
    message = r"input:1 of shape=\(2,\) is on device='cpu', and the call computes on 'cuda': move it with .to\('cuda'\)"
    with pytest.raises(TraceError, match=message):
        check_devices(given, CUDA, {"input:0": "cuda", "input:1": "cuda"})
    with pytest.raises(TraceError, match=r"input:0 of shape=\(2, 3\) is on device='cuda:0', and the call computes on"):
        check_devices(given, CPU, {"input:0": "cpu", "input:1": "cpu"})


@pytest.mark.parametrize("compiled_first", [False, True])
def test_an_input_without_values(compiled_first: bool) -> None:
    """A call on an input on meta is refused, whether a program for its shape is compiled or not."""
    inputs = torch.ones(4, 6, device="meta")
    sharded = autoshard.compile(
        nn.Linear(6, 2), autoshard.Mesh({"data": 2}), example_inputs=(inputs,) if compiled_first else None
    )
    with pytest.raises(
        TraceError, match=r"input:0 of shape=\(4, 6\) is on device='meta', and the call computes on 'cpu'"
    ):
        sharded(inputs)
    assert sharded(torch.ones(4, 6)).shape == (4, 2)
