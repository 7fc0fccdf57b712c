"""Snapshots of a state: which rank writes a tensor, and which tensors share a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.checkpoints import snapshot
from autoshard.checkpoints.snapshot import Part, take


class OneOfTwo:
    """One of two ranks, without a process group."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def written(rank: int, *states: Any) -> set[str]:
    """The names of the items that a rank writes, if the objects with these states are equal on both ranks."""
    ranks: Any = OneOfTwo(rank)
    parts = [Part(f"object{number}", state) for number, state in enumerate(states)]
    return {name for part in take(parts, ranks, copies=True) for name, _ in part.to_write(ranks, differs=False)}


def test_an_object_of_another_size_on_each_rank_moves_no_other_tensor() -> None:
    """If an object has different sizes on two ranks, each tensor of the next object is still written by exactly
    one rank."""
    alike = {"a": torch.ones(50), "b": torch.ones(50)}
    both = [written(rank, {"own": torch.zeros(size)}, alike) for rank, size in enumerate((100, 10))]
    assert {"object1.a", "object1.b"} <= both[0] ^ both[1]


def test_a_view_of_other_values_has_a_copy_of_its_own() -> None:
    """Conjugated and negated views of a tensor are saved with their own values."""
    whole = torch.tensor([1 + 2j])
    ranks: Any = OneOfTwo(0)
    state = {"whole": whole, "conjugate": whole.conj(), "part": whole.imag, "negated": whole.conj().imag}
    (part,) = take([Part("object", state)], ranks, copies=True)
    for name, tensor in state.items():
        torch.testing.assert_close(part.items[f"object.{name}"].value, tensor)


def test_every_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot waits for each GPU from which it copies."""

    def copy(part: Part, choice: Any, known: dict[Any, torch.Tensor], *, copies: bool) -> None:
        known.update({(0, torch.device(name), ()): torch.ones(1) for name in ("cuda:0", "cuda:1", "cpu")})

    waited: list[torch.device] = []
    monkeypatch.setattr(snapshot, "_take", copy)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    ranks: Any = OneOfTwo(0)
    take([Part("object", {})], ranks, copies=True)
    assert set(waited) == {torch.device("cuda:0"), torch.device("cuda:1")}
