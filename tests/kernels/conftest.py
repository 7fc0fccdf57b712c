"""What tests of Triton kernels share: outputs start as NaN. `tests/conftest.py` turns the interpreter on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _poisoned_outputs() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN, so that an element never stored is seen."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(was_on)
