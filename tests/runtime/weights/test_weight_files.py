"""`WeightFiles` reads a set of safetensors files as named tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autoshard.errors import WeightsError
from autoshard.runtime.weights import weight_files
from autoshard.runtime.weights.weight_files import INDEX, SINGLE, WeightFiles

TENSORS = {
    "matrix": torch.randn(6, 5),
    "narrow": torch.randn(4, 3).bfloat16(),
    "number": torch.tensor(7),
    "nothing": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
}


def two_files(folder: Path) -> Path:
    names = list(TENSORS)
    files = {"first.safetensors": names[:2], "second.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_all_there(path: Path) -> None:
    tensors = WeightFiles(path).tensors
    assert tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert tensors[name].dtype == expected.dtype
        torch.testing.assert_close(tensors[name].read(), expected, rtol=0, atol=0)
    part = tensors["matrix"].read((slice(2, 4), slice(1, 5)))
    torch.testing.assert_close(part, TENSORS["matrix"][2:4, 1:5], rtol=0, atol=0)


def test_a_path_is_a_file_an_index_or_a_folder(tmp_path: Path) -> None:
    """All tensors are found from a folder, an index or a single file."""
    two_files(tmp_path)
    assert_all_there(tmp_path)
    assert_all_there(tmp_path / INDEX)
    (tmp_path / INDEX).unlink()
    assert_all_there(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE)
    assert_all_there(tmp_path)
    assert_all_there(tmp_path / SINGLE)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "a/../../b", "a\\b", "\0", ".."])
def test_an_index_names_no_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    """An index that names a file outside its folder raises, even if the file exists."""
    save_file(TENSORS, tmp_path / "secret.safetensors")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
    with pytest.raises(WeightsError, match=r"which is outside of the index's folder"):
        WeightFiles(tmp_path / "inner")


def test_files_of_an_index_may_be_links(tmp_path: Path) -> None:
    """Links to weight files, as in the cache of huggingface_hub, are followed."""
    for name in ("blobs", "snapshot"):
        (tmp_path / name).mkdir()
    two_files(tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert_all_there(tmp_path / "snapshot")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map":' * 100_000, '{"weight_map":{"a":3}}', '{"a":1,"a":2}'])
def test_an_index_without_end(tmp_path: Path, text: str) -> None:
    """Deeply nested JSON, and JSON that is not an index, raise the same error."""
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match="is damaged, or not an index"):
        WeightFiles(tmp_path)


def test_files_are_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are right if the file is closed and opened again between reads, to keep few pages mapped."""
    monkeypatch.setattr(weight_files, "_MOST_MAPPED_BYTES", 1)
    assert_all_there(two_files(tmp_path))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: data + b"1",
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: b"\xff" * 8 + data[8:],
    ],
    ids=["truncated", "no header", "empty", "too long", "header", "length of header"],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage) -> None:
    """A weight file with any kind of damage raises an error that names the file."""
    file = two_files(tmp_path) / "second.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightsError, match=r"second\.safetensors is damaged, truncated, or not a safetensors file"):
        WeightFiles(tmp_path)


def test_all_that_is_wrong_with_files_is_said_at_once(tmp_path: Path) -> None:
    """One error lists a missing file, a damaged file, and a tensor in another file than the index says."""
    two_files(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] |= {"matrix": "second.safetensors", "other": "third.safetensors", "more": "fourth.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "fourth.safetensors").write_bytes(b"1234")
    with pytest.raises(WeightsError) as caught:
        WeightFiles(tmp_path)
    for text in ("no file", "third.safetensors", "fourth.safetensors is damaged", "'matrix' is in second.safetensors"):
        assert text in str(caught.value)


def test_a_tensor_that_no_file_has_is_named(tmp_path: Path) -> None:
    """A tensor that the index lists and its file lacks raises an error that names both."""
    two_files(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["other"] = "first.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"'other' is in first\.safetensors, which has no tensor of that name"):
        WeightFiles(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    """Without an index, a tensor in two files raises an error that names both files."""
    for file in ("first.safetensors", "second.safetensors"):
        save_file({"matrix": TENSORS["matrix"]}, tmp_path / file)
    with pytest.raises(WeightsError, match=r"'matrix' is in first\.safetensors and in second\.safetensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_damaged_indices_are_refused_by_name(tmp_path: Path, text: str) -> None:
    """A damaged index raises an error that names it."""
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=r"index.json is damaged"):
        WeightFiles(tmp_path)


def test_paths_without_weights_say_what_is_there(tmp_path: Path) -> None:
    """A missing path, and a folder without weights or with two indices, raise errors that list the contents."""
    with pytest.raises(WeightsError, match=r"There is no file or folder .*snapshot_download"):
        WeightFiles(tmp_path / "none")
    with pytest.raises(WeightsError, match=r"no safetensors files, it is empty\. Write"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"no safetensors files, only pytorch_model\.bin"):
        WeightFiles(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"several indices: a.*, b.*Name one"):
        WeightFiles(tmp_path)
