"""Take snapshots: copies of the tensors that this rank writes, which later steps do not change.

If several ranks hold the same tensor, one of them copies and writes it. Ranks share out the tensors without
communication.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoshard.checkpoints.ranks import Ranks
from autoshard.checkpoints.trees import split
from autoshard.checkpoints.values import packed
from autoshard.errors import CheckpointError
from autoshard.runtime.agreement.digests import digest_of


class Spread(Enum):
    """Whether the plain values and tensors of a saved object are equal on all ranks.

    `ALIKE`: they are equal, and each is saved by one rank. `PER_RANK`: each rank saves its own values and tensors.
    `UNKNOWN`: the ranks compare digests at the save, and then treat the object as `ALIKE` or `PER_RANK`. DTensors are
    always saved by shards.
    """

    ALIKE = "alike"
    UNKNOWN = "unknown"
    PER_RANK = "per rank"


@dataclass(frozen=True, slots=True)
class Part:
    """An object that is saved under a keyword: `state` is the result of its `state_dict`."""

    keyword: str
    state: Any
    spread: Spread = Spread.UNKNOWN


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor or state to write.

    Args:
        source: the saved tensor with its sharding; None for a state.
        value: this rank's piece of the tensor, or the bytes of the state.
        is_mine: whether this rank writes the piece, if several ranks hold it.
    """

    source: torch.Tensor | None
    value: torch.Tensor | bytes
    is_mine: bool

    @property
    def is_sharded(self) -> bool:
        """Whether the saved tensor is a DTensor; false for a state."""
        return isinstance(self.source, DTensor)


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """A `Part` at the moment of the save.

    Args:
        keyword, spread: fields of the `Part`.
        items: the tensors and the state that this rank may have to write, by name.
    """

    keyword: str
    spread: Spread
    items: Mapping[str, Item]

    def digest(self) -> str:
        """Return a hash of the state and its plain tensors, which ranks compare. The hash does not cover DTensors."""
        values = [item.value for item in self.items.values() if not item.is_sharded]
        texts = [value if isinstance(value, bytes) else digest_of(value).encode() for value in values]
        return hashlib.blake2b(b"\n".join(texts), digest_size=16).hexdigest()

    def to_write(self, ranks: Ranks, *, differs: bool) -> Iterator[tuple[str, Item]]:
        """Yield the items that this rank writes, each with its name in the checkpoint.

        With `differs`, each rank writes its own state and plain tensors, under names such as `ema.decay@3`.
        """
        for name, item in self.items.items():
            if item.is_sharded or not differs:
                if item.is_mine:
                    yield name, item
            else:
                yield own_name(name, ranks.rank), item


def whole_name(keyword: str) -> str:
    """Return the name under which an object's state without tensors is saved, such as `state:model`."""
    return f"state:{keyword}"


def own_name(name: str, rank: int) -> str:
    """Return the name under which `rank` saves its own value, such as `state:random@3`."""
    return f"{name}@{rank}"


def suffix_of(name: str) -> str:
    """Return the suffix that `own_name` added to a name: `@3`, or an empty string."""
    _, mark, rank = name.partition("@")
    return mark + rank


def take(parts: Sequence[Part], ranks: Ranks, *, copies: bool) -> list[PartSnapshot]:
    """Return snapshots of `parts`.

    With `copies`, tensors are copied to the host's memory, so that training may go on. Without, snapshots have the
    tensors themselves.
    """
    choice = _WriterChoice(ranks)
    known: dict[Any, torch.Tensor] = {}
    taken = [_take(part, choice, known, copies=copies) for part in parts]
    for device in {device for _, device, _ in known if device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    return taken


def _take(part: Part, choice: _WriterChoice, known: dict[Any, torch.Tensor], *, copies: bool) -> PartSnapshot:
    tensors, rest = ({}, part.state) if part.spread is Spread.PER_RANK else split(part.keyword, part.state)
    items, of_plain = {}, choice.of_plain(part.spread)
    for name, tensor in tensors.items():
        refuse_meta(name, tensor)
        is_mine = (choice if isinstance(tensor, DTensor) else of_plain).is_mine(name, tensor)
        if is_mine or (part.spread is Spread.UNKNOWN and not isinstance(tensor, DTensor)):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            value = _copied(local.detach(), known) if copies else local.detach()
            items[name] = Item(tensor, value, is_mine)
    items[whole_name(part.keyword)] = Item(None, packed(rest), choice.is_first)
    return PartSnapshot(part.keyword, part.spread, items)


def refuse_meta(name: str, tensor: torch.Tensor) -> None:
    """Raise `CheckpointError` for a tensor on the meta device, which has no values."""
    if tensor.is_meta:
        raise CheckpointError(f"{name!r} is on the meta device, without values. Give the model memory first.")


def _copied(tensor: torch.Tensor, known: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Return a copy of a tensor on the host.

    `known` has the copies so far, and gets the new copy. An equal view of the same memory gets the same copy.
    """
    view = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    key = tensor.data_ptr(), tensor.device, view
    if key not in known or not tensor.numel():
        known[key] = _copy(tensor)
    return known[key]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=tensor.is_cuda)


@dataclass(frozen=True, slots=True)
class _Holders:
    """The ranks that hold the same piece of a tensor.

    `sizes` has the sizes of the mesh axes along which the tensor is replicated. `place` is this rank's position among
    the holders; None if this rank is not on the mesh.
    """

    sizes: tuple[int, ...]
    place: int | None

    @classmethod
    def of(cls, tensor: DTensor) -> _Holders:
        mesh, own = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        copied = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
        sizes = tuple(mesh.size(dim) for dim in copied)
        if own is None:
            return cls(sizes, None)
        place = 0
        for dim, size in zip(copied, sizes, strict=True):
            place = place * size + own[dim]
        return cls(sizes, place)


class _WriterChoice:
    """Chooses which rank writes a piece that several ranks hold: the holder with the fewest bytes to write so far.

    The ranks do not communicate. Each rank makes the choices for all ranks, from names and shapes that are equal on all
    ranks. Bytes are counted separately for each tuple of sizes of the mesh axes that hold copies.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._bytes: dict[tuple[int, ...], list[int]] = {}
        self._holders: dict[tuple[int, tuple[Placement, ...]], _Holders] = {}

    @property
    def is_first(self) -> bool:
        return self._ranks.rank == 0

    def of_plain(self, spread: Spread) -> _WriterChoice:
        """Return the choice for an object's plain tensors. It is a new choice if their sizes may differ between ranks.

        Otherwise ranks would count different bytes, and make different choices for later tensors.
        """
        return _WriterChoice(self._ranks) if spread is Spread.UNKNOWN else self

    def is_mine(self, name: str, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return self._share((self._ranks.size,), tensor.nbytes) == self._ranks.rank
        spec = tensor._spec
        key = id(spec.mesh), spec.placements
        holders = self._holders.get(key)
        if holders is None:
            _check_placements(name, tensor)
            holders = self._holders[key] = _Holders.of(tensor)
        return self._share(holders.sizes, tensor.numel() * tensor.element_size()) == holders.place

    def _share(self, sizes: tuple[int, ...], size_bytes: int) -> int:
        """Choose the holder that writes a piece, and add the piece's bytes to that holder's count.

        Return the position of the chosen holder among the holders.
        """
        held = self._bytes.setdefault(sizes, [0] * math.prod(sizes))
        chosen = held.index(min(held))
        held[chosen] += size_bytes + 1
        return chosen


def _check_placements(name: str, tensor: DTensor) -> None:
    strange = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if strange:
        raise CheckpointError(
            f"{name!r} lies as {tensor.placements}, and {strange[0]} cannot be saved by shards. Redistribute the "
            "DTensor to Shard and Replicate in state_dict."
        )


def differing(everyone: Sequence[Mapping[str, str]]) -> Set[str]:
    """Return the keywords whose digests differ between ranks; `everyone` has each rank's digests by keyword."""
    return {keyword for keyword in everyone[0] if len({digests.get(keyword) for digests in everyone}) > 1}
