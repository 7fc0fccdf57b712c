"""Batches with fewer rows than the step's, cut for the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard import TraceError
from autoshard.integrations.short_batches import cut_short_batch


def test_a_tensor_without_rows_of_the_batch_is_named() -> None:
    """A tensor whose first dim is not the batch's rows is refused by its shape."""
    step: Any = SimpleNamespace(micro_batches=1, plans_any_batch=False)
    batch = {"input_ids": torch.zeros(3, 5), "position_ids": torch.arange(5)[None]}
    with pytest.raises(TraceError, match=r"shape=\[1, 5\] is no part of a batch, .* must be its samples"):
        cut_short_batch(batch, step, 4, torch.device("cpu"))
