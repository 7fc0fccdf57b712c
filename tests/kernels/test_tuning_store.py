"""The folder of choices of block sizes: the first process to publish decides, and damaged files count as missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from autoshard.errors import KernelError
from autoshard.kernels.candidates import Choice
from autoshard.kernels.tuning_store import Key, Store
from autoshard.kernels.tuning_switch import tune_kernels

CANDIDATES = tuple(Choice((("BLOCK", size),), 4) for size in (512, 1024, 2048))
KEY = Key("some_kernel", {"device": "H200"}, CANDIDATES)
TIMES = {choice: float(index) for index, choice in enumerate(CANDIDATES)}


def _entry(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_what_is_published_is_read(tmp_path: Path) -> None:
    """Another store of the same folder reads the published choice, and the file has the times of all candidates in
    words."""
    assert Store(tmp_path / "new").publish(KEY, CANDIDATES[1], TIMES) == CANDIDATES[1]
    assert Store(tmp_path / "new").read(KEY) == CANDIDATES[1]
    entry = json.loads(_entry(tmp_path / "new").read_text())
    assert entry["choice"] == "BLOCK 1024, 4 warps"
    assert entry["median_ms"] == {"BLOCK 512, 4 warps": 0.0, "BLOCK 1024, 4 warps": 1.0, "BLOCK 2048, 4 warps": 2.0}


def test_the_first_decides(tmp_path: Path) -> None:
    """A process that publishes a second choice for a key gets the first choice."""
    store = Store(tmp_path)
    store.publish(KEY, CANDIDATES[2], TIMES)
    assert store.publish(KEY, CANDIDATES[0], TIMES) == CANDIDATES[2]


@pytest.mark.parametrize(
    "other",
    [
        Key("another_kernel", KEY.facts, CANDIDATES),
        Key(KEY.kernel, {"device": "H100"}, CANDIDATES),
        Key(KEY.kernel, KEY.facts, CANDIDATES[:2]),
    ],
)
def test_other_keys_are_apart(tmp_path: Path, other: Key) -> None:
    """A choice counts for its kernel, facts and candidates only, also when its file lies under another key's name."""
    store = Store(tmp_path)
    store.publish(KEY, CANDIDATES[0], TIMES)
    assert store.read(other) is None
    first = _entry(tmp_path).read_text()
    _entry(tmp_path).unlink()
    store.publish(other, CANDIDATES[0], TIMES)
    _entry(tmp_path).write_text(first)
    assert store.read(other) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: "\x00\xff",
        lambda text: text.replace('"choice": "BLOCK 1024', '"choice": "BLOCK 1000'),
        lambda text: text.replace('"choice": "BLOCK 1024, 4 warps"', '"choice": {"BLOCK": 1}'),
        lambda text: text.replace("H200", "H100"),
    ],
)
def test_damage_counts_as_missing(tmp_path: Path, damage: Callable[[str], str]) -> None:
    """A file that is cut, has other content, or names an unknown choice counts as missing, and the next publication
    repairs it."""
    store = Store(tmp_path)
    store.publish(KEY, CANDIDATES[1], TIMES)
    path = _entry(tmp_path)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged, encoding="latin-1")
    assert store.read(KEY) is None
    assert store.publish(KEY, CANDIDATES[2], TIMES) == CANDIDATES[2]
    assert store.read(KEY) == CANDIDATES[2]


def test_writers_at_once_agree(tmp_path: Path) -> None:
    """Writers that publish different choices of the same keys at once all get the same choices.

    Threads stand for ranks, because a lock of `flock` belongs to an open file and each thread opens its own.
    """
    keys = [Key(KEY.kernel, {"number": number}, CANDIDATES) for number in range(30)]
    start = Barrier(len(CANDIDATES))

    def publish(mine: Choice) -> tuple[list[Choice], str]:
        start.wait()
        return [Store(tmp_path).publish(key, mine, TIMES) for key in keys], Store(tmp_path).identity()

    with ThreadPoolExecutor(len(CANDIDATES)) as pool:
        first, *others = pool.map(publish, CANDIDATES)
    assert others == [first, first]
    assert first[0] == [Store(tmp_path).read(key) for key in keys]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk reaches the caller, and no temporary file remains."""

    def refuse(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        Store(tmp_path).publish(KEY, CANDIDATES[0], TIMES)
    assert Store(tmp_path).read(KEY) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_has_an_identity(tmp_path: Path) -> None:
    """A folder's identity is the same for each store of the folder, and two folders have different identities."""
    assert Store(tmp_path / "a").identity() == Store(tmp_path / "a").identity()
    assert Store(tmp_path / "a").identity() != Store(tmp_path / "b").identity()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """A folder with mode 777 is refused, because other users could choose the block sizes. A folder that the store
    makes is private."""
    Store(tmp_path / "own").identity()
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for use in (lambda: tune_kernels(folder=shared), Store(shared).identity):
        with pytest.raises(KernelError, match=r"measured block sizes .*mode 0777.*AUTOSHARD_TUNE"):
            use()
