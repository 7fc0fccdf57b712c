"""Start a script on this machine or on the hosts of a hostfile.

Each host runs one `torchrun`. The hosts of a hostfile find each other by torch's rendezvous "c10d".
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from autoshard.cli.hosts import Host, read_hosts
from autoshard.errors import AutoshardError

_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Prefixes of the environment variables that hosts get from the machine that starts them."""

_OWN_STORE = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
"""Variable for a new store in each attempt. The shared store keeps the addresses of the processes that died."""

_SSH = ("ssh", "-tt", "-o", "BatchMode=yes")
"""Command in front of a host's name. The remote processes end with their terminal (`-tt`) if ssh ends."""

_LOOPBACK = ("localhost", "127.0.0.1")

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class HostCommand:
    """The command of one host: its working folder, its `torchrun` words, and the variables of its environment."""

    host: Host
    folder: str
    words: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine, so that no ssh is needed."""
        return self.host.address in (*_LOOPBACK, socket.gethostname())

    @property
    def line(self) -> str:
        """The command as a line of a shell."""
        setting = (f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return f"cd {shlex.quote(self.folder)} && {' '.join((*setting, shlex.join(self.words)))}"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, by ssh if the host is another machine."""
        if self.is_local:
            return subprocess.Popen(self.words, env={**os.environ, **self.variables}, start_new_session=True)
        words = (*_SSH, self.host.name, self.line)
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)


def commands(
    script: str,
    arguments: Sequence[str],
    *,
    hosts: Path | None,
    processes: int | None,
    min_hosts: int | None,
    max_restarts: int,
    port: int,
) -> tuple[HostCommand, ...]:
    """Return the command of each host; without a hostfile, of this machine alone.

    Args:
        script, arguments: the script and its own arguments.
        hosts: the hostfile. The first host is the meeting point, at `port`.
        processes: processes of each host. Default: the hostfile's slots; without a hostfile, one for each GPU, or one.
        min_hosts: the run starts with this number of hosts, and goes on with them if others are lost. Default: all.
        max_restarts: how often `torchrun` starts all processes again after a failure.
        port: port of the meeting point.

    Raises:
        AutoshardError: there is no such script, a line of the hostfile is wrong, or `min_hosts` exceeds the hosts.
    """
    if not Path(script).is_file():
        raise AutoshardError(f"there is no script {script}; pass the path of a Python file.")
    last = ("--max-restarts", str(max_restarts), script, *arguments)
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    if hosts is None:
        if min_hosts is not None:
            raise AutoshardError(f"--min-hosts {min_hosts}: pass --hosts too.")
        own = Host("localhost", processes or torch.cuda.device_count() or 1)
        words = (*torchrun, "--standalone", "--nproc-per-node", str(own.processes), *last)
        return (HostCommand(own, os.getcwd(), words, dict([_OWN_STORE])),)
    found = read_hosts(hosts, processes)
    if min_hosts is not None and min_hosts > len(found):
        raise AutoshardError(f"--min-hosts {min_hosts}: {hosts} names {len(found)} hosts.")
    if found[0].address in _LOOPBACK and any(host.address not in _LOOPBACK for host in found):
        raise AutoshardError(
            f"{hosts}: the ranks meet at the first host, and other hosts cannot reach {found[0].address!r}; write its "
            f"name in the network, such as {socket.gethostname()!r}."
        )
    nodes = f"{len(found)}" if min_hosts in (None, len(found)) else f"{min_hosts}:{len(found)}"
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{found[0].address}:{port}")
    meeting += ("--rdzv-id", Path(script).stem)
    forwarded = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_FORWARDED)}
    return tuple(
        HostCommand(
            host,
            os.getcwd(),
            (*torchrun, "--nnodes", nodes, "--nproc-per-node", str(host.processes), *meeting, *last),
            {**forwarded, **dict([_OWN_STORE])},
        )
        for host in found
    )


def start(hosts: Sequence[HostCommand], *, needed: int) -> int:
    """Start all commands, wait for their ends, and return the exit status of the run.

    If fewer than `needed` hosts can succeed, the other commands are ended too. A SIGINT of this process goes on to all
    commands. A SIGTERM goes on to the commands of this machine, or to all commands if none is of this machine. The
    ranks of this machine then tell all ranks to save (`autoshard.run`). If ssh got the SIGTERM, the ranks of its host
    would end at once. After either signal, all other commands are ended as soon as one ends with an error status.

    Returns:
        0 if at least `needed` commands ended with 0, and otherwise the first other exit status.

    Raises:
        AutoshardError: a host is another machine, and this machine has no ssh. Or a command cannot be started; the
            commands before it are ended.
    """
    if shutil.which(_SSH[0]) is None and not all(host.is_local for host in hosts):
        raise AutoshardError("ssh is not installed here; start the lines of --dry-run yourself.")
    running: dict[str, subprocess.Popen[bytes]] = {}
    failures: list[int] = []
    is_ending = False
    with _passed_on(running, [host.host.name for host in hosts if host.is_local]) as told:
        for host in hosts:
            try:
                running[host.host.name] = host.start()
            except OSError as error:
                _signal(running.values(), signal.SIGTERM)
                raise AutoshardError(f"{host.host.name}: the command cannot be started: {error.strerror}.") from error
        while running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                status = running.pop(name).returncode
                failures += [status] if status else []
            if not is_ending and len(hosts) - len(failures) < (len(hosts) if told else needed):
                is_ending = True
                _signal(running.values(), signal.SIGTERM)
            time.sleep(_POLL_S)
    if len(hosts) - len(failures) >= needed:
        return 0
    return failures[0] if failures[0] > 0 else 128 - failures[0]


def _signal(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        process.send_signal(number)


@contextmanager
def _passed_on(running: Mapping[str, subprocess.Popen[bytes]], local: Sequence[str]) -> Iterator[set[int]]:
    """Pass signals of this process on to `running` commands, as `start` says; yield the set of received signals.

    `local` has the names of the commands of this machine.
    """
    told = set[int]()

    def send(number: int, _: FrameType | None) -> None:
        told.add(number)
        here = [running[name] for name in local if name in running] if number == signal.SIGTERM else []
        _signal(here or running.values(), number)

    before = {number: signal.signal(number, send) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
