"""Hostfiles: the hosts of a run and their numbers of processes, in the format of Open MPI and DeepSpeed.

# comments, and empty lines, are left out
node1 slots=8
node2 slots=8
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from autoshard.errors import AutoshardError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(@[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
"""Names and addresses of hosts, with a user in front or without ("me@node1")."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a run, and the number of processes to start on the host."""

    name: str
    processes: int

    @property
    def address(self) -> str:
        """The name without the user: "node1" of "me@node1"."""
        return self.name.rpartition("@")[2]


def read_hosts(path: Path, processes: int | None) -> tuple[Host, ...]:
    """Read a hostfile.

    Args:
        path: the file; each line is `NAME slots=NUMBER`, where `slots=NUMBER` may be missing with `processes`.
        processes: number of processes on each host, in place of the file's slots; None to take the slots.

    Raises:
        AutoshardError: there is no such file, it names no host, or a line is wrong; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AutoshardError(f"--hosts {path} cannot be read: {error}.") from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(f"{path}, line {number}, {line.strip()!r}", words, processes)
        if host.address in hosts:
            raise AutoshardError(f"{path}, line {number}: the host {host.address!r} is named twice; add up its slots.")
        hosts[host.address] = host
    if not hosts:
        raise AutoshardError(f"{path} names no host; write a line such as 'node1 slots=8' for each.")
    return tuple(hosts.values())


def _host(place: str, words: list[str], processes: int | None) -> Host:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise AutoshardError(f"{place}: {name!r} is no name of a host; write 'node1 slots=8'.")
    slots = None
    for word in rest:
        key, _, value = word.partition("=")
        if key != "slots" or not value.isdecimal() or int(value) < 1 or slots is not None:
            raise AutoshardError(f"{place}: {word!r} is not understood; write '{name} slots=8'.")
        slots = int(value)
    count = slots if processes is None else processes
    if count is None:
        raise AutoshardError(f"{place}: how many processes? Write '{name} slots=8', or pass --nproc.")
    return Host(name, count)
