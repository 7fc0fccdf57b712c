"""The folder of checkpoints: complete checkpoints, remains of crashes, and the number that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard import CheckpointError
from autoshard.checkpoints import folder as folders


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def made(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"step-{step}").mkdir()
    return folder


def written(folder: Path, step: int) -> Path:
    path = folders.begin(folder, step)
    path.mkdir()
    (path / "file").write_text(str(step))
    return path


def test_steps_are_numbers(tmp_path: Path) -> None:
    """Checkpoints are ordered by the number of their step, and other names are ignored."""
    (tmp_path / "step-11.bak").mkdir()
    (tmp_path / "logs").mkdir()
    assert folders.latest(tmp_path) is None
    assert folders.latest(tmp_path / "nowhere") is None
    made(tmp_path, 9, 10)
    assert [*folders.complete(tmp_path)] == [9, 10]
    assert folders.latest(tmp_path) == tmp_path / "step-10"


def test_a_symbolic_link_goes_and_its_target_stays(tmp_path: Path) -> None:
    """A symbolic link to a checkpoint is kept or deleted as a checkpoint, and its target stays. Broken links and
    plain files do not count."""
    target, runs = tmp_path / "old" / "step-1", tmp_path / "runs"
    target.mkdir(parents=True)
    runs.mkdir()
    for name in ("step-1", "step-3", ".step-2.deleted-ab", ".step-2.writing-ab", ".step-3.replaced"):
        (runs / name).symlink_to(target)
    (runs / "step-2").symlink_to(tmp_path / "nowhere")
    (runs / ".step-1.writing-cd").write_text("a file")
    (runs / "step-9").write_text("a file")
    assert [*folders.complete(runs)] == [1, 3]
    folders.commit(written(runs, 3), 3)
    folders.keep_latest(runs, 1)
    assert names(runs) == ["step-2", "step-3", "step-9"]
    assert target.is_dir()
    (runs / "step-3" / "file").unlink()
    (runs / "step-3").rmdir()
    folders.commit(written(runs, 2), 2)
    assert names(runs) == ["step-2", "step-9"]


def test_what_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Remains that cannot be removed are a warning, and the save succeeds."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / ".step-1.writing-ab").mkdir()
    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    folders.commit(written(tmp_path, 2), 2)
    assert folders.latest(tmp_path) == tmp_path / "step-2"
    assert "Permission denied" in caplog.text


def test_it_is_complete_at_once(tmp_path: Path) -> None:
    """A checkpoint counts from the moment when it gets its final name."""
    path = written(tmp_path, 5)
    assert folders.latest(tmp_path) is None
    assert folders.commit(path, 5) == folders.latest(tmp_path)
    assert names(tmp_path) == ["step-5"]


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    """A second checkpoint of the same step replaces the first."""
    for _ in range(2):
        folders.commit(written(tmp_path, 5), 5)
    assert names(tmp_path) == ["step-5"]


def test_a_crash_amid_replacing_leaves_the_old_one(tmp_path: Path) -> None:
    """If a crash interrupts a replacement, the old checkpoint counts while there is no new one, and
    gets its name back."""
    (tmp_path / ".step-5.replaced").mkdir()
    assert folders.latest(tmp_path) == tmp_path / ".step-5.replaced"
    folders.sweep(tmp_path)
    assert names(tmp_path) == ["step-5"]
    (tmp_path / ".step-5.replaced").mkdir()
    assert folders.latest(tmp_path) == tmp_path / "step-5"
    folders.sweep(tmp_path)
    assert names(tmp_path) == ["step-5"]


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    """The next save removes remains of crashes, and keeps complete checkpoints and foreign files."""
    made(tmp_path, 5)
    (tmp_path / ".step-6.writing-0123abcd").mkdir()
    (tmp_path / ".step-4.deleted-0123abcd").mkdir()
    (tmp_path / ".mine").mkdir()
    folders.begin(tmp_path, 6)
    assert names(tmp_path) == [".mine", "step-5"]


def test_a_later_one_is_not_overtaken(tmp_path: Path) -> None:
    """A save of an earlier step than the folder's latest is refused, because the later one would stay the latest."""
    made(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of step 5, .* and would stay the latest"):
        folders.begin(tmp_path, 3)


def test_the_latest_stay(tmp_path: Path) -> None:
    """The `keep` latest checkpoints stay, and None keeps all."""
    made(tmp_path, 1, 2, 10, 20)
    folders.keep_latest(tmp_path, None)
    folders.keep_latest(tmp_path, 5)
    assert len(names(tmp_path)) == 4
    folders.keep_latest(tmp_path, 2)
    assert names(tmp_path) == ["step-10", "step-20"]
