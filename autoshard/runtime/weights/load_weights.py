"""Load weights from files into a sharded model: each rank reads only its shards.

Before any weight is changed, all weights are checked: names, shapes and dtypes, and whether all names of a tied
parameter have equal values. Ranks exchange the problems that they find, so all ranks raise the same error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from autoshard.errors import WeightsError
from autoshard.runtime.engine import Engine
from autoshard.runtime.inference import in_normal_mode
from autoshard.runtime.weights.local_part import LocalPart
from autoshard.runtime.weights.unread import Region, Unread, blocks_of
from autoshard.runtime.weights.unset_weights import check_is_placed
from autoshard.runtime.weights.weight_files import WeightFiles, describe
from autoshard.runtime.weights.weight_names import match, names_by_tensor, persistent_tensors

T = TypeVar("T")

BLOCK_BYTES = 8 * 2**20
"""At most about this many bytes of a file are read at a time, including the bytes between rows of a region."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of a model, and the tensors in files from which it can be loaded.

    Args:
        names: the tensor's names in the model, several if it is tied.
        tensor: the model's tensor.
        sources: a tensor in files for each of these names that the files have.
    """

    names: Sequence[str]
    tensor: torch.Tensor
    sources: Sequence[Unread]


@in_normal_mode
@torch.no_grad()
def load_weights(model: nn.Module, engine: Engine, path: str | Path, *, strict: bool, cast: bool) -> None:
    """Load parameters and persistent buffers of `model` from files.

    The arguments are those of `HasWeights.load_weights`.
    """
    check_is_placed(model, "load_weights")
    found, text = together(engine, f"read {path}", lambda: _found(model, path, strict=strict, cast=cast))
    texts = _everyone(engine, text, f"read {path}")
    if len(set(texts)) > 1:
        raise WeightsError(f"Ranks find different files at {path}: give all ranks the same files.")
    together(engine, f"read {path}", lambda: _take_all(found))


def together(engine: Engine, action: str, make: Callable[[], T]) -> T:
    """Run `make` on every rank, and return this rank's result. Ranks wait for each other without a time limit.

    After a `WeightsError` or `OSError` on any rank, raise `WeightsError` on all ranks, with the texts of all errors.
    After any other error, the other ranks raise `RankMismatchError`. `action` names the action in errors.
    """
    made, failure = [], ""
    with nullcontext() if engine.control is None else engine.control.working(action):
        try:
            made.append(make())
        except WeightsError as error:
            failure = str(error)
        except OSError as error:
            failure = f"The disk failed: {error}"
    failures = _everyone(engine, failure, action)
    if any(failures):
        by_text = {text: [rank for rank, said in enumerate(failures) if said == text] for text in failures if text}
        texts = [text if len(ranks) == len(failures) else f"Ranks {ranks}: {text}" for text, ranks in by_text.items()]
        raise WeightsError(" ".join(texts))
    return made[0]


def _everyone(engine: Engine, said: str, action: str) -> list[str]:
    return [said] if engine.control is None else engine.control.gather(said, action)


def _found(model: nn.Module, path: str | Path, *, strict: bool, cast: bool) -> tuple[list[Found], str]:
    """Match the tensors in files with the model's tensors, and check them.

    Return the tensors to load, and a description of the files' tensors. The caller compares this description between
    ranks.

    Raises:
        WeightsError: tensors are missing, unexpected, or of another shape or dtype, or tied tensors differ.
    """
    files = WeightFiles(path)
    tensors = persistent_tensors(model)
    matched = match(model, tensors, files.tensors)
    found = [
        Found(names, tensors[names[0]], [matched.sources[name] for name in names if name in matched.sources])
        for names in names_by_tensor(tensors)
    ]
    problems = [
        *(_listed("Missing", _missing(found, matched.optional)) if strict else ()),
        *(_listed("Unexpected", map(repr, matched.unexpected)) if strict else ()),
        *_listed("Of another shape", _unlike(found, lambda tensor: tuple(tensor.shape))),
        *(() if cast else _listed("Of another dtype", _unlike(found, lambda tensor: tensor.dtype))),
    ]
    if not problems:
        problems += _listed("Tied in the model, but not equal", _untied(found))
    if problems:
        raise WeightsError(
            f"{path} does not hold the weights of {type(model).__name__}, whose weights are unchanged. "
            f"{' '.join(problems)} strict=False leaves missing weights as they are, and ignores unexpected tensors; "
            "cast=True converts dtypes."
        )
    return [item for item in found if item.sources], files.describe()


def _missing(found: Sequence[Found], optional: frozenset[str]) -> Iterator[str]:
    for item in found:
        if not item.sources and not optional.intersection(item.names):
            yield " = ".join(map(repr, item.names))


def _unlike(found: Sequence[Found], trait: Callable[[torch.Tensor | Unread], object]) -> Iterator[str]:
    for item in found:
        if any(trait(source) != trait(item.tensor) for source in item.sources):
            there = " and ".join(dict.fromkeys(map(describe, item.sources)))
            yield f"{item.names[0]!r} ({there}, in the model {describe(item.tensor)})"


def _untied(found: Sequence[Found]) -> Iterator[str]:
    """Yield the names of each tied parameter for which the files have unequal values, in this rank's part."""
    for item in found:
        if len(item.sources) > 1:
            blocks = [there for _, there in _blocks(LocalPart.of(item.tensor))]
            first, *others = item.sources
            if not all(torch.equal(first.read(at), other.read(at)) for other in others for at in blocks):
                yield " = ".join(map(repr, item.names))


def _listed(title: str, texts: Iterable[str]) -> Iterator[str]:
    listed = ", ".join(texts)
    if listed:
        yield f"{title}: {listed}."


def _take_all(found: Sequence[Found]) -> None:
    for item in found:
        part = LocalPart.of(item.tensor)
        for here, there in _blocks(part):
            part.tensor[here] = item.sources[0].read(there)
        if not part.tensor.numel():
            part.tensor.zero_()  # writes nothing, but counts as an in-place write, which marks the weight as set


def _blocks(part: LocalPart) -> Iterator[tuple[Region, Region]]:
    """Yield regions that make up a part, each in indices of the part and in indices of the whole tensor.

    A region spans at most about `BLOCK_BYTES` in the file.
    """
    held = part.tensor.shape
    if not held.numel():
        return
    itemsize = part.tensor.dtype.itemsize * math.prod(part.shape[1:]) // math.prod(held[1:])  # with the bytes between
    for region in blocks_of(held, itemsize, BLOCK_BYTES):
        moved = (slice(at.start + start, at.stop + start) for at, start in zip(region, part.offset, strict=True))
        yield region, tuple(moved)
