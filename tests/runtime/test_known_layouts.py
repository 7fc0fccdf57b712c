"""`is_same_memory` compares the memory of two tensors."""

from __future__ import annotations

import torch

from autoshard.runtime.known_layouts import is_same_memory


def test_the_same_memory_is_the_same_elements_in_the_same_places() -> None:
    """Equal views are the same memory; a transposed view, a part, a copy and another part are not."""
    x = torch.zeros(2, 2)
    assert is_same_memory(x, x.view(2, 2))
    assert not any(is_same_memory(x, other) or is_same_memory(other, x) for other in (x.t(), x[0], x.clone()))
    assert not is_same_memory(x[1], x[0])
