"""A watch over parameters and buffers between calls: changed in place, or of other values than other ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime.agreement import Facts, Held
from autoshard.runtime.digests import combine, digest_of_words, words_of
from autoshard.runtime.held import facts_of, piece_of

SAMPLE = "values of parameters and buffers"

_AT_ONCE = 8
"""Tensors whose elements are compared at a call."""

_ELEMENTS = 64
"""Elements of each that are."""


class ParameterWatch:
    """Over tensors as they lie from now on.

    In-place changes are seen in torch's version counters. Writes that these do not show (through `.data`) are seen by
    the values of a few elements of a few tensors at a time, where another rank holds the same piece.

    Args:
        named: parameters and buffers.
        ranks: how many hold the buffers.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], ranks: int) -> None:
        self._named = list(named)
        self._ranks = ranks
        self._versions = self._read_versions()
        self._changes: list[int] = [0] * len(self._named)
        self._groups: list[tuple[str, list[torch.Tensor]]] = list(self._by_place())

    def changes(self) -> int:
        """A digest of which tensors were changed in place how often since the last call; 0 for none."""
        found = self._read_versions()
        self._changes = [new - old for new, old in zip(found, self._versions, strict=True)]
        self._versions = found
        return combine(self._changes) if any(self._changes) else 0

    def sample(self, turn: int) -> dict[Held, torch.Tensor]:
        """The digest of some elements of some tensors, others at each turn; nothing where no two ranks hold alike."""
        if not self._groups:
            return {}
        place, elements = self._elements_at(turn)
        return {Held(SAMPLE, place): digest_of_words(words_of(elements))}

    def elements(self, turn: int) -> dict[str, list[float]]:
        """What `sample` reads at a turn and at the one before, by place."""
        found: dict[str, list[float]] = {}
        for place, elements in map(self._elements_at, (turn - 1, turn)) if self._groups else ():
            real = torch.view_as_real(elements) if elements.is_complex() else elements
            found.setdefault(place, []).extend(real.double().reshape(-1).tolist())
        return found

    def stop_sampling(self) -> None:
        """Compare no values from now on."""
        self._groups = []

    def facts(self) -> Facts:
        """What says which tensors differ: every piece's digest, and how often those that nobody shares were changed."""
        changed = {
            f"in-place changes of {name} between two calls": str(count)
            for (name, tensor), count in zip(self._named, self._changes, strict=True)
            if piece_of(tensor, self._ranks).copies == 1
        }
        return {**facts_of(self._named, self._ranks), **changed}

    def _read_versions(self) -> list[int]:
        return [0 if tensor.is_inference() else tensor._version for _, tensor in self._named]

    @torch.no_grad()
    def _elements_at(self, turn: int) -> tuple[str, torch.Tensor]:
        """Some elements of some tensors, and their place."""
        place, tensors = self._groups[turn % len(self._groups)]
        step = turn // len(self._groups) * _ELEMENTS
        return place, torch.cat([_elements(tensor, step) for tensor in tensors])

    def _by_place(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Tensors that other ranks hold too, a few at a time, all at one place, of one device and type."""
        found: dict[tuple, list[torch.Tensor]] = {}
        for _, tensor in self._named:
            piece = piece_of(tensor, self._ranks)
            if piece.copies > 1 and piece.local.numel() and piece.local.is_contiguous() and not tensor.is_meta:
                found.setdefault((piece.place, tensor.device, tensor.dtype), []).append(tensor)
        for (place, *_), tensors in found.items():
            for start in range(0, len(tensors), _AT_ONCE):
                yield str(place), tensors[start : start + _AT_ONCE]


def _elements(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Some elements of what this rank holds of a tensor, which lie after the step-th."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)
    count = flat.numel()
    return flat if count <= _ELEMENTS else flat.narrow(0, step % (count - _ELEMENTS + 1), _ELEMENTS)
