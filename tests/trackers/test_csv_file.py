"""`CSV` writes a line for each step, and continues a file after a restart."""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path

import pytest

from autoshard.errors import NotAvailableError
from autoshard.trackers import CSV


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    """Each line can be read right after its step, and the folder is made at the first step."""
    path = tmp_path / "runs" / "a.csv"
    writer = CSV(path)
    assert not path.parent.exists()
    writer.log(1, {"loss": 2.5, "lr": 1e-05})
    assert path.read_text() == "step,loss,lr\n1,2.5,1e-05\n"
    writer.log(2, {"loss": 2.25, "lr": 1e-05})
    assert rows_of(path)[1] == {"step": "2", "loss": "2.25", "lr": "1e-05"}
    writer.close()
    writer.close()


def test_new_numbers_get_columns(tmp_path: Path) -> None:
    """A number that appears at some steps only gets a column, which is empty at the other steps."""
    writer = CSV(tmp_path / "a.csv")
    writer.log(1, {"loss": 2.0})
    writer.log(2, {"loss": 1.0, "mfu": 0.25})
    writer.log(3, {"mfu": 0.5})
    writer.close()
    assert (tmp_path / "a.csv").read_text() == "step,loss,mfu\n1,2.0,\n2,1.0,0.25\n3,,0.5\n"


def test_a_restart_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    """After a restart, lines before the first repeated step stay, and the later ones are replaced."""
    first = CSV(tmp_path / "a.csv")
    for number in range(1, 6):
        first.log(number, {"loss": float(number)})
    first.close()
    again = CSV(str(tmp_path / "a.csv"))
    again.log(4, {"loss": 40.0, "lr": 0.5})
    again.close()
    assert [(row["step"], row["loss"], row["lr"]) for row in rows_of(tmp_path / "a.csv")] == [
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "3.0", ""),
        ("4", "40.0", "0.5"),
    ]


@pytest.mark.parametrize(
    "data", [b"name,size\na,3\n", b"step,size\none,3\n", b"a,b\n", b"one line", b"\xff\xfe\x00", b"\n1,2\n"]
)
def test_another_file_is_not_written_over(tmp_path: Path, data: bytes) -> None:
    """A file that `CSV` did not write is refused by name, and stays as it is."""
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(NotAvailableError, match=r"a\.csv'\): the file is there, but was not written by CSV"):
        CSV(tmp_path / "a.csv").log(1, {"loss": 1.0})
    assert (tmp_path / "a.csv").read_bytes() == data


def test_an_empty_file_is_written(tmp_path: Path) -> None:
    """An empty file is written to."""
    (tmp_path / "a.csv").touch()
    writer = CSV(tmp_path / "a.csv")
    writer.log(1, {"loss": 1.0})
    writer.close()
    assert (tmp_path / "a.csv").read_text() == "step,loss\n1,1.0\n"


def test_a_full_disk_leaves_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full when a new column needs the file rewritten, the old lines stay, and later
    steps are written."""
    writer = CSV(tmp_path / "a.csv")
    writer.log(1, {"loss": 2.0})

    def fill(path: Path, text: str, **options: str) -> int:
        path.write_bytes(text[:4].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(NotAvailableError, match="cannot be written: No space left"):
        writer.log(2, {"loss": 1.0, "mfu": 0.25})
    monkeypatch.undo()
    writer.log(3, {"loss": 0.5})
    writer.close()
    assert [(row["step"], row["loss"]) for row in rows_of(tmp_path / "a.csv")] == [("1", "2.0"), ("3", "0.5")]


def test_names_with_commas_are_quoted(tmp_path: Path) -> None:
    """A name with a comma is quoted, and stays one column when the file is continued."""
    for number in (1, 2):
        writer = CSV(tmp_path / "a.csv")
        writer.log(number, {"loss, mean": 1.0})
        writer.close()
    assert rows_of(tmp_path / "a.csv") == [{"step": "1", "loss, mean": "1.0"}, {"step": "2", "loss, mean": "1.0"}]
