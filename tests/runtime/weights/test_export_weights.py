"""Export a model's weights from the simulator; `tests/end_to_end/test_weights.py` has the tests on processes."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autoshard.errors import NotAvailableError, WeightsError
from autoshard.ir.mesh import Mesh
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.weights import export_weights as module
from autoshard.runtime.weights.export_weights import export_weights
from autoshard.runtime.weights.load_weights import load_weights
from tests.runtime.architectures import BUILDERS, build, logits

ENGINE = SimulatorEngine(Mesh({"data": 2}))


class Odd(nn.Module):
    """A model with parameters of several types and shapes, a tied one, buffers of both kinds, and a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.second = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.number = nn.Parameter(torch.tensor(3.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.tied = self.first
        self.register_buffer("count", torch.tensor([1, 2, 3], dtype=torch.int16))
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.config = {"width": 3}


def export(model: nn.Module, path: Path, max_file_bytes: int = 10**9) -> None:
    export_weights(model, ENGINE, path, max_file_bytes=max_file_bytes)


def files(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", BUILDERS)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """Exported files equal those of `save_pretrained`, and transformers loads them with equal logits."""
    model = build(name)
    model.save_pretrained(tmp_path / "theirs")
    for number, size in enumerate((10**9, 3000)):
        folder = tmp_path / str(number)
        export(model, folder, size)
        assert (folder / "model.safetensors.index.json").exists() is (number == 1)
        assert_same(files(folder), files(tmp_path / "theirs"))
        loaded, notes = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(notes.values()), notes
        assert torch.equal(logits(name, loaded), logits(name, model))
        beside = {path.name for path in folder.iterdir() if path.suffix == ".json"}
        theirs = {path.name for path in (tmp_path / "theirs").iterdir() if path.suffix == ".json"}
        assert beside - {"model.safetensors.index.json"} == theirs
        for path in theirs:
            assert json.loads((folder / path).read_text()) == json.loads((tmp_path / "theirs" / path).read_text())


def test_any_model_is_written_and_read(tmp_path: Path) -> None:
    """A plain model with unusual parameters is exported and loaded again; non-persistent buffers are left out."""
    torch.manual_seed(0)
    model = Odd()
    export(model, tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"model.safetensors"}
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith("tied")}
    assert_same(files(tmp_path / "a"), expected)
    other = Odd()
    load_weights(other, ENGINE, tmp_path / "a", strict=True, cast=False)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_files_are_no_larger_than_asked(tmp_path: Path) -> None:
    """Files have at most the requested size, unless a single tensor is larger."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(40, 8))
    export(model, tmp_path / "a", 300)
    sizes = {path.name: sum(value.nbytes for value in load_file(path).values()) for path in _weights(tmp_path / "a")}
    assert sorted(sizes.values()) == [32, 32 + 256, 256 + 32, 1280]
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"].values()) == sizes.keys()


def test_what_was_written_before_is_replaced(tmp_path: Path) -> None:
    """An export removes all weight files of earlier exports, and keeps the user's own files."""
    folder = tmp_path / "a"
    for size in (300, 10**9, 500):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(40, 8))
        export(model, folder, size)
        (folder / "tokenizer.json").write_text("{}")
        assert_same(files(folder), dict(model.state_dict()))
        load_weights(nn.Sequential(*model), ENGINE, folder, strict=True, cast=False)
    assert (folder / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class Crash(BaseException):
    """An exception that no handler catches, which stands for the end of a process."""


@pytest.mark.parametrize(("act", "nth"), [("rename", 1), ("rename", 2), ("rmtree", 2)])
def test_a_crash_leaves_one_whole_folder(act: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash at any rename or deletion, one whole folder exists, and the next export cleans up."""
    folder, models = tmp_path / "a", [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]
    export(models[0], folder, 300)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "words.txt").write_text("a b")
    owner, calls = {"rename": module.os, "rmtree": module.shutil}[act], []
    real = getattr(owner, act)

    def end(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        if len(calls) == nth:
            raise Crash
        real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, act, end)
        with pytest.raises(Crash):
            export(models[1], folder, 10**9)
    there = [path for path in (folder, tmp_path / ".a.replaced") if path.exists()]
    expected = models[1] if act == "rmtree" else models[0]
    assert_same(files(there[0]), dict(expected.state_dict()))
    assert (there[0] / "tokenizer" / "words.txt").read_text() == "a b"
    export(models[2], folder, 10**9)
    assert_same(files(folder), dict(models[2].state_dict()))
    assert (folder / "tokenizer" / "words.txt").read_text() == "a b"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_renamed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder cannot be renamed, as a mount point, the export raises and the folder is unchanged."""
    model = nn.Linear(8, 8)
    export(model, tmp_path / "a")

    def refuse(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "rename", refuse)
        with pytest.raises(WeightsError, match=r"a cannot be replaced: Device or resource busy.*to a folder inside it"):
            export(nn.Linear(8, 8), tmp_path / "a")
    assert_same(files(tmp_path / "a"), dict(model.state_dict()))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, the export raises and names the file, and the old weights stay."""
    model = nn.Linear(8, 8)
    export(model, tmp_path / "a")
    before = files(tmp_path / "a")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module.SafetensorsWriter, "write", fail)
        with pytest.raises(WeightsError, match=r"model\.safetensors cannot be written.*No space"):
            export(nn.Linear(8, 8), tmp_path / "a")
    assert_same(files(tmp_path / "a"), before)
    export(model, tmp_path / "a")
    assert_same(files(tmp_path / "a"), before)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Unsupported types, weights on meta, a path that is a file, and invalid sizes raise errors that name them."""
    with pytest.raises(WeightsError, match=r"no dtype for 'weight' \(torch.complex128\)"):
        export(nn.Linear(2, 2, bias=False, dtype=torch.complex128), tmp_path / "a")
    with pytest.raises(NotAvailableError, match=r"export would write weights .*'weight', 'bias'"):
        export(nn.Linear(2, 2, device="meta"), tmp_path / "a")
    (tmp_path / "a").write_text("")
    with pytest.raises(WeightsError, match="a is a file; export writes a folder"):
        export(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(WeightsError, match="max_file_bytes=0 holds no tensor"):
        export(nn.Linear(2, 2), tmp_path / "b", 0)
    with pytest.raises(WeightsError, match=r"max_file_bytes='5GB' is a str; pass a number: 5 \* 10\*\*9"):
        export(nn.Linear(2, 2), tmp_path / "b", "5GB")  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [".", ".."])
def test_the_current_folder_is_not_replaced(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's current folder, or a parent of it, cannot be the target; a folder inside can."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(WeightsError, match="current folder of this process"):
        export(nn.Linear(2, 2), Path(path))
    export(nn.Linear(2, 2), Path("weights"))
    assert [item.name for item in Path.cwd().iterdir()] == ["weights"]


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
