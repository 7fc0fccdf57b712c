"""Sources of generated kernels lie in the user's cache, and the generated text runs rather than bytecode or edited
files."""

from __future__ import annotations

import importlib.util
import inspect
import os
import py_compile
from pathlib import Path

import pytest

from autoshard.errors import KernelError
from autoshard.kernels.generated.files import load_text, source_folder, write_file


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder is XDG_CACHE_HOME, if it is absolute, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source_folder() == tmp_path / "autoshard" / "kernels"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert source_folder() == Path.home() / ".cache" / "autoshard" / "kernels"


def test_an_edited_file_is_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Writing a text again repairs its edited file. Another text has another file, and no temporary files remain."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_file("answer = 42\n")
    path.write_text("answer = 41\n")
    assert write_file("answer = 42\n") == path
    assert path.read_text() == "answer = 42\n"
    assert write_file("answer = 43\n") != path
    assert sorted(item.suffix for item in path.parent.iterdir() if item.is_file()) == [".py", ".py"]


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the folder, and the variable XDG_CACHE_HOME that moves the folder."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(KernelError, match=r"cannot be written to .*file.*Set XDG_CACHE_HOME"):
        write_file("")


def test_bytecode_beside_the_source_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A foreign `.pyc` for the same path, size and time does not run, and the generated text does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, other = "answer = 42\n", "answer = 41\n"
    path = write_file(other)
    text_path = write_file(text)
    stamp = text_path.stat()
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    py_compile.compile(str(path), cfile=importlib.util.cache_from_source(str(text_path)), doraise=True)
    spec = importlib.util.spec_from_file_location("imported", text_path)
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    assert imported.answer == 41, "an import runs what was planted, so this test can fail"
    assert load_text(text, write_file(text)).answer == 42


def test_the_file_is_not_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a file changes after it was written, the loaded module and its source for Triton are still
    the generated text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "def answer():\n    return 42\n"
    path = write_file(text)
    path.write_text("def answer():\n    return 41\n")
    module = load_text(text, path)
    assert module.answer() == 42
    assert inspect.getsource(module.answer) == text


def test_folders_are_made_for_their_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folders have mode 700 under any umask."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        folder = write_file("").parent
    finally:
        os.umask(before)
    assert [item.stat().st_mode & 0o777 for item in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("name", ["autoshard", "autoshard/kernels"])
def test_a_folder_that_others_can_write_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, mode: int
) -> None:
    """The error names the folder, its mode, and `chmod 700`, and no source is written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / name
    folder.mkdir(mode=0o700, parents=True)
    folder.chmod(mode)
    with pytest.raises(
        KernelError, match=rf"generated kernels .*{name}': other users can .*mode {mode:04o}.*chmod 700"
    ):
        write_file("")
    assert not list(tmp_path.rglob("*.py"))


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the numbers of the folder's owner and of the process's user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_file("")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(KernelError, match=r"belongs to user \d+, and this process runs as user \d+"):
        write_file("")
