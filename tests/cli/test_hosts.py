"""Hostfiles: names, slots and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard import AutoshardError
from autoshard.cli.hosts import Host, read_hosts


def read(folder: Path, text: str, processes: int | None = None) -> tuple[Host, ...]:
    path = folder / "hostfile"
    path.write_text(text)
    return read_hosts(path, processes)


def test_hosts_and_slots(tmp_path: Path) -> None:
    """Comments and empty lines are skipped, and a name may have a user in front."""
    found = read(tmp_path, "# two hosts\n\nnode1 slots=8\nme@10.0.0.2   slots=4  # half\n")
    assert found == (Host("node1", 8), Host("me@10.0.0.2", 4))
    assert [host.address for host in found] == ["node1", "10.0.0.2"]


def test_a_number_of_processes_replaces_slots(tmp_path: Path) -> None:
    """`--nproc` replaces the slots of the hostfile, which may then be missing."""
    assert read(tmp_path, "a\nb slots=8\n", processes=2) == (Host("a", 2), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", r"hostfile, line 2, 'b': how many processes\? Write 'b slots=8', or pass --nproc\."),
        ("a slots=2\n\na slots=2\n", r"hostfile, line 3: the host 'a' is named twice; add up its slots\."),
        ("a slots=two\n", r"line 1, 'a slots=two': 'slots=two' is not understood; write 'a slots=8'\."),
        ("a slots=0\n", r"line 1, 'a slots=0': 'slots=0' is not understood"),
        ("a slots=1 slots=2\n", r"line 1, .*: 'slots=2' is not understood"),
        ("a:8\n", r"line 1, 'a:8': 'a:8' is no name of a host; write 'node1 slots=8'\."),
        ("-oProxyCommand=x slots=1\n", r"'-oProxyCommand=x' is no name of a host"),
        ("# none\n", r"hostfile names no host; write a line such as 'node1 slots=8' for each\."),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    """Each mistake is one sentence with the number of its line."""
    with pytest.raises(AutoshardError, match=message):
        read(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    """A missing hostfile is named."""
    with pytest.raises(AutoshardError, match=r"--hosts .*none cannot be read: .*No such file"):
        read_hosts(tmp_path / "none", None)
