"""Triton kernels run in its interpreter here, unless there is a GPU; outputs start as NaN."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before autoshard.kernels.registry is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def _poisoned_outputs() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN, so that an element never stored is seen."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(was_on)
