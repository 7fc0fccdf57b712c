"""Two emulated hosts on this machine: network namespaces on a link of limited rate (Linux, root).

Each host has its own network stack, and messages in each direction pass a token bucket (`tc tbf`). Processors and
memory are shared.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

ADDRESSES = ("10.99.0.1", "10.99.0.2")
PORT = 29611
_BURST, _LATENCY = "256kb", "200ms"


class TwoHosts:
    """Two hosts within this context.

    Args:
        rate: rate of the link in each direction, as for `tc` ("200mbit", "1gbit"); "none" leaves the rate unlimited.

    Attributes:
        names: names of the two network namespaces, for `ip netns exec`.

    Raises:
        SystemExit: this machine cannot make the hosts; the message names the missing part.
    """

    def __init__(self, rate: str) -> None:
        _check_machine(rate)
        self._rate = rate
        self.names = tuple(f"as{os.getpid()}{letter}" for letter in "ab")

    def __enter__(self) -> Self:
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise SystemExit(
                f"--link {self._rate}: {' '.join(error.cmd)} says: {error.stderr.strip()}. "
                "The rate is tc's, such as 200mbit or 1gbit; network namespaces and tbf must be in the kernel."
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def torchrun(self, python: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run `torchrun` with one process on each host; the first host's output is shown. Returns its exit status."""
        silent, env = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}, os.environ | environment
        other = subprocess.Popen(self._command(1, python, arguments), env=env, **silent)
        try:
            return subprocess.run(self._command(0, python, arguments), check=False, env=env).returncode
        finally:
            _stop(other)

    def _command(self, node: int, python: str, arguments: Sequence[str]) -> list[str]:
        host = ["ip", "netns", "exec", self.names[node], "env", "GLOO_SOCKET_IFNAME=eth0"]
        launcher = [python, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        return [*host, *launcher, f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", *arguments]

    def _make(self) -> None:
        cables = [f"v{host}" for host in self.names]
        for host in self.names:
            _run("ip", "netns", "add", host)
        _run("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable, address in zip(self.names, cables, ADDRESSES, strict=True):
            _run("ip", "link", "set", cable, "netns", host, "name", "eth0")
            _run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
        if self._rate == "none":
            return
        for host in self.names:
            bucket = ("tbf", "rate", self._rate, "burst", _BURST, "latency", _LATENCY)
            _run("ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def _remove(self) -> None:
        for host in self.names:
            left = subprocess.run(["ip", "netns", "pids", host], check=False, capture_output=True, text=True)
            for process in left.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _check_machine(rate: str) -> None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.name != "posix" or os.geteuid() != 0 or missing:
        found = f"missing: {', '.join(missing)}" if missing else "not run as root"
        raise SystemExit(
            f"--link {rate} emulates two hosts by Linux network namespaces, which takes root and iproute2 (ip, tc); "
            f"found: {found}. Run it as root, or leave --link out to measure on loopback."
        )


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end, and end the process otherwise."""
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
