"""Finds parameters and buffers that only some ranks changed between calls, or whose values differ between ranks."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Sequence
from operator import attrgetter, sub
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime.agreement.control_group import Facts, PieceFact
from autoshard.runtime.agreement.digests import digest_of_bytes, digest_of_words, words_of
from autoshard.runtime.agreement.pieces import WHOLE, copies_of, facts_of, piece_of
from autoshard.runtime.known_layouts import local_of
from autoshard.runtime.stages.stage_meshes import is_elsewhere

SAMPLE = "values of parameters and buffers"

_AT_ONCE = 8
"""At most this many tensors are compared at a call."""

_ELEMENTS = 64
"""At most this many elements of each tensor are compared."""


class ParameterWatch:
    """Computes digests of a model's tensors, which ranks compare at each call.

    `changes` returns a digest of in-place changes, which show in torch's version counters, also for parameters of other
    stages. Writes through `.data` do not show there. To find them, `sample` returns a digest of a few elements of a few
    tensors, for the ranks that hold the same piece. Tensors are grouped by their sharding, so a new sharding needs a
    new watch.

    Args:
        named: the tensors, each with its name in messages.
        ranks: the number of ranks, in all pipeline stages together.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], ranks: int) -> None:
        self._named = list(named)
        self._ranks = ranks
        self._counted = [tensor for _, tensor in self._named if not tensor.is_inference()]
        self._versions = self._read_versions()
        self._changes: list[int] = [0] * len(self._counted)
        self._groups: list[tuple[str, list[torch.Tensor]]] = list(self._by_place())

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterWatch:
        """Return a watch of the copied tensors."""
        result = ParameterWatch(copy.deepcopy(self._named, memo), self._ranks)
        result._groups = result._groups if self._groups else []
        return result

    def changes(self) -> int:
        """Return a digest of how often each tensor was changed in place since the last call; 0 without changes."""
        found, before = self._read_versions(), self._versions
        self._changes, self._versions = [*map(sub, found, before)], found
        return digest_of_bytes(array("q", self._changes).tobytes()) if found != before else 0

    def sample(self, turn: int) -> dict[PieceFact, torch.Tensor]:
        """Return a dict with one entry: a digest of a few elements of one group of tensors.

        Each `turn` reads other elements.

        The key says which piece of the tensors this rank holds, and which elements were read. The dict is empty if no
        other rank holds the same piece, or after `stop_sampling`.
        """
        if not self._groups:
            return {}
        place, elements = self._elements_at(turn)
        place = f"{place} from {self._first_element(turn)}"  # stages may have different numbers of groups
        return {PieceFact(SAMPLE, place): digest_of_words(words_of(elements))}

    def elements(self, turn: int) -> dict[str, list[float]]:
        """Return the elements that `sample` read at this turn and at the previous turn, by the name of their group.

        A complex element gives two numbers.
        """
        found: dict[str, list[float]] = {}
        for place, elements in map(self._elements_at, (turn - 1, turn)) if self._groups else ():
            real = torch.view_as_real(elements) if elements.is_complex() else elements
            found.setdefault(place, []).extend(real.double().reshape(-1).tolist())
        return found

    def stop_sampling(self) -> None:
        """Make `sample` and `elements` return empty dicts from now on, so that values are no longer compared."""
        self._groups = []

    def facts(self) -> Facts:
        """Return facts that show which tensors differ, for the error message.

        The facts are a digest of each piece that this rank holds, and counts of in-place changes. A tensor has a count
        only if this rank holds no piece of it, or if no other rank holds the same piece. This rank cannot compare a
        digest of such a tensor with another rank's digest.
        """
        names = [name for name, tensor in self._named if not tensor.is_inference()]
        changed = {
            PieceFact(f"in-place changes of {name} between two calls", WHOLE): str(count)
            for name, tensor, count in zip(names, self._counted, self._changes, strict=True)
            if is_elsewhere(tensor) or self._copies(tensor) == 1
        }
        return {**facts_of(self._named), **changed}

    def _copies(self, tensor: torch.Tensor) -> int:
        """Return the number of ranks that hold this rank's piece of a tensor.

        Only ranks of one stage hold a parameter.
        """
        return copies_of(tensor, tensor.device_mesh.size() if isinstance(tensor, DTensor) else self._ranks)

    def _read_versions(self) -> list[int]:
        return [*map(_version_of, self._counted)]

    def _elements_at(self, turn: int) -> tuple[str, torch.Tensor]:
        """Return the name of the tensor group whose turn it is, and a few elements of its tensors, concatenated."""
        place, rows = self._groups[turn % len(self._groups)]
        first = self._first_element(turn)
        return place, torch.cat([_elements_of(row, first) for row in rows])

    def _first_element(self, turn: int) -> int:
        """Return the index of the first element to read at a turn. It grows when each group has had its turn.

        The index wraps around at the end of a tensor.
        """
        return turn // len(self._groups) * _ELEMENTS

    def _by_place(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield groups of at most `_AT_ONCE` tensors that other ranks hold too, each with a name.

        The tensors of a group agree in stage, device, dtype, and the part of the whole tensor that this rank holds.
        """
        found: dict[tuple, list[torch.Tensor]] = {}
        for _, tensor in self._named:
            if is_elsewhere(tensor) or self._copies(tensor) == 1:
                continue
            piece, stage = piece_of(tensor), -1
            if isinstance(tensor, DTensor) and tensor.device_mesh.size() < self._ranks:
                stage = int(tensor.device_mesh.mesh.min())
            if piece.local.numel() and piece.local.is_contiguous() and not tensor.is_meta:
                found.setdefault((piece.shard_coordinates, stage, tensor.device, tensor.dtype), []).append(tensor)
        for (place, stage, *_), rows in found.items():
            for start in range(0, len(rows), _AT_ONCE):
                yield f"{place} of stage {stage}, {start}", rows[start : start + _AT_ONCE]


def _elements_of(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Return `_ELEMENTS` neighbouring elements of this rank's piece of a tensor, or all elements if there are fewer.

    The first has index `first`, modulo the number of possible starts.
    """
    flat = (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach().view(-1)
    count = len(flat)
    return flat if count <= _ELEMENTS else flat.narrow(0, first % (count - _ELEMENTS + 1), _ELEMENTS)


_version_of = attrgetter("_version")
