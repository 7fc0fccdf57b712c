"""Errors of files that cannot be written give a way out that fits the reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from autoshard.errors import NotAvailableError
from autoshard.ir.files import check_can_write, write_text


@pytest.mark.parametrize(
    ("number", "way_out"),
    [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.ENOENT, "Name a file in a folder")],
)
def test_the_way_out_fits_the_reason(
    number: int, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a full disk says to free space, and for a missing folder to name another file."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(NotAvailableError, match=f"cannot be written: {os.strerror(number)}. {way_out}"):
        write_text(tmp_path / "plan.json", "{}")


def test_a_place_is_checked_before_the_work(tmp_path: Path) -> None:
    """A folder, and a file in a folder that does not exist, are refused before the work, and nothing is written."""
    check_can_write(tmp_path / "trace.json")
    for wrong in (tmp_path, tmp_path / "none" / "trace.json"):
        with pytest.raises(NotAvailableError, match="cannot be written"):
            check_can_write(wrong)
    assert not list(tmp_path.iterdir())
