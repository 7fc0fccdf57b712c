"""Checkpoints of an attacker run no code, and raise one error that leaves the model unchanged."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import CheckpointError, Checkpoints
from tests.checkpoints.hostile import RunsCode, edit_manifest, edit_table, replace


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    Checkpoints(folder, asynchronous=False).save(nn.Linear(3, 2), at=1)
    return folder / "step-1"


def refused(folder: Path, words: str) -> None:
    """Loading raises CheckpointError with these words, and the model does not change."""
    model = nn.Linear(3, 2)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(folder).load(model)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    """No file of a checkpoint is a pickle or an archive with a pickle."""
    folder = saved(tmp_path)
    for path in folder.iterdir():
        data = path.read_bytes()
        assert b"data.pkl" not in data
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError)):
            pickle.loads(data)
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", "checkpoint.json", "metadata.json"]


@pytest.mark.parametrize("name", ["metadata.json", "__0_0.distcp"])
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, name: str) -> None:
    """A pickle in place of a file is refused, and its code does not run."""
    replace(saved(tmp_path), name, pickle.dumps(RunsCode(tmp_path / "ran")))
    refused(tmp_path, "not a table of contents|names bytes that no file")
    assert not (tmp_path / "ran").exists()


def piece(table: dict[str, Any]) -> dict[str, Any]:
    return table["tensors"]["model.weight"]["pieces"][0]


TABLES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file outside": lambda table: piece(table)["extent"].update(file="../../secret"),
    "an absolute file": lambda table: piece(table)["extent"].update(file="/etc/passwd"),
    "a start before the file": lambda table: piece(table)["extent"].update(start=-1),
    "bytes behind the file": lambda table: piece(table)["extent"].update(start=10**12),
    "too few bytes": lambda table: piece(table)["extent"].update(length=4),
    "a piece outside its tensor": lambda table: piece(table).update(offset=[1, 0]),
    "a piece before its tensor": lambda table: piece(table).update(offset=[-1, 0]),
    "another rank": lambda table: piece(table).update(offset=[0]),
    "no pieces": lambda table: table["tensors"]["model.weight"].update(pieces=[]),
    "an unknown type": lambda table: table["tensors"]["model.weight"].update(dtype="load"),
    "a wider type": lambda table: table["tensors"]["model.weight"].update(dtype="float64"),
    "no tensors": lambda table: table.pop("tensors"),
    "a list": lambda table: table.update(tensors=[]),
    "a text for a number": lambda table: piece(table)["extent"].update(start="0"),
    "a huge tensor": lambda table: table["tensors"]["model.weight"].update(shape=[10**15, 10**15]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_lie(tmp_path: Path, name: str) -> None:
    """A table of contents with a wrong place, shape or dtype of a tensor is refused."""
    folder = saved(tmp_path)
    edit_table(folder, TABLES[name])
    refused(tmp_path, r"metadata\.json is damaged, or Checkpoints did not write it")


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file outside": lambda body: body["files"].update({"../x": {"bytes": 0, "crc32": []}}),
    "too few checksums": lambda body: body["files"]["metadata.json"].update(crc32=[]),
    "no table": lambda body: body["files"].pop("metadata.json"),
    "files in a list": lambda body: body.update(files=[]),
    "a step that is no number": lambda body: body.update(step="1"),
    "no ranks": lambda body: body.pop("ranks"),
    "an earlier version": lambda body: body.update(version=1),
    "a later version": lambda body: body.update(version=3),
    "no version": lambda body: body.pop("version"),
    "a version in a list": lambda body: body.update(version=[[]]),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_lie(tmp_path: Path, name: str) -> None:
    """A manifest with wrong files or a wrong version is refused."""
    edit_manifest(saved(tmp_path), MANIFESTS[name])
    refused(tmp_path, r"was not written by Checkpoints|does not list metadata.json|has version=")


@pytest.mark.parametrize("name", ["checkpoint.json", "metadata.json", "__0_0.distcp"])
@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000, b"9" * 10_000, b"\xff\xfe", b""])
def test_texts_without_end(tmp_path: Path, name: str, text: bytes) -> None:
    """Files of deep, long, empty or undecodable text are refused with one error."""
    folder = saved(tmp_path)
    if name == "checkpoint.json":
        (folder / name).write_bytes(text)
    else:
        replace(folder, name, text)
    refused(tmp_path, "damaged|names bytes|failed")


def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Bytes that are no state, in place of a state, are refused."""
    folder = saved(tmp_path)
    extent = json.loads((folder / "metadata.json").read_text())["states"]["state:model"]
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[extent["start"] : extent["start"] + extent["length"]] = b"[" * extent["length"]
    replace(folder, "__0_0.distcp", bytes(data))
    refused(tmp_path, r"Loading .*step-1 failed")
