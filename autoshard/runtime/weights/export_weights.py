"""Write a model's weights as files that `load_weights` and transformers' `from_pretrained` can read.

Ranks gather one block of a tensor at a time, and the first rank writes it. So a rank holds no more than its shards and
one block. The folder is renamed when it is complete: a crash leaves the old folder or the new one, never a mixture.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path

import torch
from torch import nn

from autoshard.errors import WeightsError
from autoshard.ir.files import sync
from autoshard.runtime.engine import NO_PIPELINE_RANKS, Engine
from autoshard.runtime.four_bit import is_4bit
from autoshard.runtime.freed_memory import give_freed_memory_back
from autoshard.runtime.inference import in_normal_mode
from autoshard.runtime.weights import peft_weights, transformers_weights
from autoshard.runtime.weights.load_weights import together
from autoshard.runtime.weights.safetensors_writer import SafetensorsWriter, check_types, in_file_order
from autoshard.runtime.weights.unread import Region, Unread, blocks_of
from autoshard.runtime.weights.unset_weights import check_is_placed
from autoshard.runtime.weights.weight_files import INDEX, SINGLE
from autoshard.runtime.weights.weight_names import names_by_tensor, persistent_tensors, to_write

MAX_FILE_BYTES = 5_000_000_000
"""The default of `max_file_bytes`, the largest number of bytes of tensors in a file."""

BLOCK_BYTES = 8 * 2**20
"""At most this many bytes are gathered and written at a time."""

_OF_ADAPTERS = re.compile("|".join(map(re.escape, (peft_weights.FILE, peft_weights.CONFIG))))
"""Names of the adapter files that an export writes and replaces."""

_OURS = re.compile(
    rf"{re.escape(SINGLE)}|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors|{_OF_ADAPTERS.pattern}"
)
"""Names of the files that an export of whole weights replaces.

They include adapter files of an earlier export, which would change the weights when they are loaded.
"""


@in_normal_mode
@torch.no_grad()
def export_weights(
    model: nn.Module,
    engine: Engine,
    path: str | Path,
    *,
    max_file_bytes: int,
    merge: bool = False,
    pipeline_rank_of: Mapping[str, int] = NO_PIPELINE_RANKS,
) -> None:
    """Write the weights of `model`, and the files that transformers needs beside them. All ranks must call.

    The arguments are those of `HasWeights.export`. `pipeline_rank_of` has the pipeline rank that alone holds a
    parameter, by the parameter's name.
    """
    if not isinstance(max_file_bytes, Real):
        kind = type(max_file_bytes).__name__
        raise WeightsError(f"max_file_bytes={max_file_bytes!r} is a {kind}; pass a number: 5 * 10**9 for 5 GB.")
    if max_file_bytes < 1:
        raise WeightsError(f"max_file_bytes={max_file_bytes} holds no tensor; pass at least 1.")
    check_is_placed(model, "export")
    give_freed_memory_back()
    path = Path(path).resolve()
    aside = path.with_name(f".{path.name}.partial")
    is_writer = engine.control is None or engine.control.channel.rank == engine.control.channel.ranks[0]

    def on_writer(action: str, do: Callable[[], None]) -> None:
        together(engine, action, lambda: do() if is_writer else None)

    tensors = _tensors(model, engine, pipeline_rank_of)
    if peft_weights.has_adapters(model) and not merge:
        content = _adapters(model, engine, tensors)
    else:
        content = together(engine, f"export to {path}", lambda: _weights(model, tensors, max_file_bytes))
    on_writer(f"export to {path}", lambda: _begin(path, aside))
    with _removed_on_failure(aside if is_writer else None):
        for name, held in content.files.items():
            together(engine, f"write {name}", lambda: _write(aside / name if is_writer else None, held))  # noqa: B023
        on_writer(f"export to {path}", lambda: _finish(content, path, aside))


@contextmanager
def _removed_on_failure(aside: Path | None) -> Iterator[None]:
    """Remove the temporary folder `aside` if the context raises `WeightsError`, to free a full disk.

    `aside` is None on ranks that do not write.
    """
    try:
        yield
    except WeightsError:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _tensors(model: nn.Module, engine: Engine, pipeline_rank_of: Mapping[str, int]) -> Mapping[str, Unread]:
    """Return the tensors of the model's state dict by name. Each is gathered only when it is read."""

    def unread_of(name: str, tensor: torch.Tensor) -> Unread:
        gather = partial(engine.gather_region, tensor, pipeline_rank=pipeline_rank_of.get(name))
        return Unread(tensor.shape, tensor.dtype, gather)

    return {name: unread_of(name, tensor) for name, tensor in persistent_tensors(model).items()}


@dataclass(frozen=True, slots=True)
class _FolderContent:
    """The content of a folder of weights.

    Args:
        files: name of a file → name of a tensor → the tensor.
        write_beside: writes the folder's other files, such as the configuration, into a folder.
        replaced: matches the names of an old folder's files that the new folder does not keep.
    """

    files: Mapping[str, Mapping[str, Unread]]
    write_beside: Callable[[Path], None]
    replaced: re.Pattern[str]


def _adapters(model: nn.Module, engine: Engine, tensors: Mapping[str, Unread]) -> _FolderContent:
    """Return the content of a folder of adapters. Only the first rank asks peft for names, as peft may use the hub."""
    named = engine.share(lambda: peft_weights.adapters_of(model))
    files = {file: {name: tensors[own] for name, own in names.items()} for file, names in named.items()}
    for held in files.values():
        check_types(held)
    return _FolderContent(files, partial(peft_weights.write_configurations, model), _OF_ADAPTERS)


def _weights(model: nn.Module, tensors: Mapping[str, Unread], max_file_bytes: int) -> _FolderContent:
    """Return the content of a folder with all weights of a model, dequantised, with adapters merged into them."""
    if peft_weights.has_adapters(model) or any(map(is_4bit, model.modules())):
        model, tensors = peft_weights.merged(model, tensors)
    written = to_write(model, tensors, names_by_tensor(persistent_tensors(model)))
    check_types(written)
    files = _files(written, max_file_bytes)
    return _FolderContent(files, partial(_write_beside, model, files), _OURS)


def _files(tensors: Mapping[str, Unread], max_file_bytes: int) -> dict[str, dict[str, Unread]]:
    """Return the tensors of each file by the file's name, with at most `max_file_bytes` of tensors in a file.

    A larger tensor has a file of its own. The tensors of a file are a dict by tensor name.
    """
    parts: list[dict[str, Unread]] = [{}]
    held_bytes = 0
    for name, tensor in tensors.items():
        if parts[-1] and held_bytes + tensor.nbytes > max_file_bytes:
            parts.append({})
            held_bytes = 0
        parts[-1][name] = tensor
        held_bytes += tensor.nbytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _begin(path: Path, aside: Path) -> None:
    """Undo an interrupted `_swap` of the folder `path`, and make the empty temporary folder `aside`."""
    if path.exists() and not path.is_dir():
        raise WeightsError(f"{path} is a file; export writes a folder. Name another.")
    if Path.cwd().is_relative_to(path):
        raise WeightsError(
            f"{path} is or contains the current folder of this process ({Path.cwd()}), and export replaces the folder. "
            "Name a folder inside the current folder."
        )
    _put_back(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write(path: Path | None, tensors: Mapping[str, Unread]) -> None:
    """Write a file of tensors. A rank with `path=None` writes nothing, and only takes part in gathering the tensors."""
    blocks = _blocks(tensors)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with SafetensorsWriter(path, tensors) as writer:
                for tensor, region in blocks:
                    writer.write(tensor.read(region))
    except OSError as error:
        _gather(blocks)
        raise WeightsError(f"{path} cannot be written: {error}.") from error
    _gather(blocks)


def _blocks(tensors: Mapping[str, Unread]) -> Iterator[tuple[Unread, Region]]:
    for name in in_file_order(tensors):
        tensor = tensors[name]
        for region in blocks_of(tensor.shape, tensor.dtype.itemsize, BLOCK_BYTES):
            yield tensor, region


def _gather(blocks: Iterator[tuple[Unread, Region]]) -> None:
    """Take part in gathering tensors block by block, on a rank that does not write, or whose write failed."""
    for tensor, region in blocks:
        tensor.read(region)


def _write_beside(model: nn.Module, files: Mapping[str, Mapping[str, Unread]], folder: Path) -> None:
    """Write the index of several files, and the model's configuration if it has one, into a folder."""
    if len(files) > 1:
        total_bytes = sum(tensor.nbytes for held in files.values() for tensor in held.values())
        places = {name: file for file, held in files.items() for name in held}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if transformers_weights.applies_to(model):
        transformers_weights.write_config(model, folder)
    else:
        save_config = getattr(getattr(model, "config", None), "save_pretrained", None)
        if callable(save_config):
            save_config(folder)


def _finish(content: _FolderContent, path: Path, aside: Path) -> None:
    content.write_beside(aside)
    _keep_others(path, aside, content.replaced)
    for folder, _, files in os.walk(aside):
        for name in (*files, "."):
            sync(Path(folder, name))
    _swap(path, aside)


def _keep_others(path: Path, aside: Path, replaced: re.Pattern[str]) -> None:
    """Link the files of the old folder that the export does not replace, such as a tokenizer's, into the new folder."""
    for old in path.iterdir() if path.exists() else ():
        new = aside / old.name
        if new.exists() or replaced.fullmatch(old.name):
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, new, symlinks=True, copy_function=_link)
        else:
            _link(old, new)


def _link(old: str | Path, new: str | Path) -> None:
    """Make a hard link `new` to the file `old`; a copy if the file system has no links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _swap(path: Path, aside: Path) -> None:
    """Replace the folder `path` by the folder `aside`, by renaming both.

    After a crash in between, both folders are complete, and `_put_back` restores the old one.
    """
    replaced = _replaced(path)
    try:
        if path.exists():
            os.rename(path, replaced)
        os.rename(aside, path)
    except OSError as error:
        _put_back(path)
        raise WeightsError(
            f"{path} cannot be replaced: {error.strerror}. It is unchanged. If another disk is mounted there, export "
            "to a folder inside it."
        ) from error
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _put_back(path: Path) -> None:
    """Undo an interrupted `_swap`: rename the old folder back, or remove it if the new folder is in place."""
    replaced = _replaced(path)
    if not replaced.exists():
        return
    if path.exists():
        shutil.rmtree(replaced)
    else:
        os.rename(replaced, path)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")
