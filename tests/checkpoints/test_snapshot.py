"""Snapshots: which rank writes a tensor, and which tensors share a copy."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.checkpoints.snapshot import Part, take


class OneOfTwo:
    """The number of a rank among two, without a process group."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def written(rank: int, *states: Any) -> set[str]:
    """The names of a rank's items, if the objects with these states are alike on both ranks."""
    ranks: Any = OneOfTwo(rank)
    parts = [Part(f"object{number}", state) for number, state in enumerate(states)]
    return {name for part in take(parts, ranks, copies=True) for name, _ in part.to_write(ranks, differs=False)}


def test_an_object_of_another_size_on_each_rank_moves_no_other_tensor() -> None:
    """Each tensor of the second object is written by one rank."""
    alike = {"a": torch.ones(50), "b": torch.ones(50)}
    both = [written(rank, {"own": torch.zeros(size)}, alike) for rank, size in enumerate((100, 10))]
    assert {"object1.a", "object1.b"} <= both[0] ^ both[1]


def test_a_view_of_other_values_has_a_copy_of_its_own() -> None:
    """A conjugate and its imaginary part read the memory of the original with another sign."""
    whole = torch.tensor([1 + 2j])
    ranks: Any = OneOfTwo(0)
    state = {"whole": whole, "conjugate": whole.conj(), "part": whole.imag, "negated": whole.conj().imag}
    (part,) = take([Part("object", state)], ranks, copies=True)
    for name, tensor in state.items():
        torch.testing.assert_close(part.items[f"object.{name}"].value, tensor)
