"""Sources lie where the user's cache is, and what runs is what was generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.errors import KernelError
from autoshard.kernels.generated.files import load_file, source_folder, write_file


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME, if it is absolute, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source_folder() == tmp_path / "autoshard" / "kernels"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert source_folder() == Path.home() / ".cache" / "autoshard" / "kernels"


def test_an_edited_file_is_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Equal texts share a file; one that was edited is put right; nothing else is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_file("answer = 42\n")
    path.write_text("answer = 41\n")
    assert write_file("answer = 42\n") == path
    assert load_file(path).answer == 42
    assert write_file("answer = 43\n") != path
    assert sorted(item.suffix for item in path.parent.iterdir() if item.is_file()) == [".py", ".py"]


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the folder, and the variable that moves it."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(KernelError, match=r"cannot be written to .*file.*Set XDG_CACHE_HOME"):
        write_file("")
