"""`autoshard run`: the command of each host, and the start of all commands."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard import AutoshardError
from autoshard.cli.hosts import Host
from autoshard.cli.run import HostCommand, commands, start
from tests.examples.scripts import ROOT

_SUM = """
import sys
import torch
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
open(f"{sys.argv[1]}.{torch.distributed.get_rank()}", "w").write(str(total.item()))
torch.distributed.destroy_process_group()
"""

_FAKE_SSH = """#!/bin/bash
while [ "$1" != node2 ]; do shift; done
shift
setsid bash -c "$*" &
trap 'kill -HUP -- -$!; exit 143' TERM
wait $!
"""
"""Ends at SIGTERM, and sends its command SIGHUP, as the terminal of a real ssh does."""

_TOLD = """
import os, pathlib, signal, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("told").touch())
pathlib.Path(f"ready.{rank}").touch()
while not pathlib.Path("told").exists():
    time.sleep(0.05)
time.sleep(0.5)
pathlib.Path(f"saved.{rank}").touch()
exit(143)
"""
"""Ends, like `autoshard.run`, on all ranks after SIGTERM to one of them."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, where the commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_SUM)
    return tmp_path


def asked(hosts: str | None = None, min_hosts: int | None = None) -> tuple[HostCommand, ...]:
    if hosts is not None:
        Path("hosts").write_text(hosts)
    return commands(
        "train.py",
        ["--lr", "a b"],
        hosts=None if hosts is None else Path("hosts"),
        processes=None,
        min_hosts=min_hosts,
        max_restarts=3,
        port=29400,
    )


def torchrun_words(command: HostCommand) -> str:
    return shlex.join(command.words[3:])


@pytest.mark.usefixtures("folder")
def test_the_commands_of_two_hosts() -> None:
    """All hosts meet at the first host, and each starts its own number of processes."""
    first, second = asked("node1 slots=8\nme@node2 slots=4\n")
    meeting = "--rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id train --max-restarts 3 train.py --lr 'a b'"
    assert torchrun_words(first) == f"--nnodes 2 --nproc-per-node 8 {meeting}"
    assert torchrun_words(second) == f"--nnodes 2 --nproc-per-node 4 {meeting}"
    assert not first.is_local
    assert first.line.startswith(f"cd {Path.cwd()} && ")


@pytest.mark.usefixtures("folder")
def test_the_environment_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's command passes NCCL's variables on, and not the user's other variables. Each attempt to start gets
    its own store."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO WARN")
    monkeypatch.setenv("SECRET", "x")
    (first,) = asked("node1 slots=8\n")
    assert first.variables["NCCL_DEBUG"] == "INFO WARN"
    assert first.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "SECRET" not in first.variables
    assert "NCCL_DEBUG='INFO WARN' " in first.line


@pytest.mark.usefixtures("folder")
def test_fewer_hosts_are_enough_if_asked() -> None:
    """`--min-hosts` becomes the lower end of torchrun's range of nodes."""
    first, _ = asked("node1 slots=8\nnode2 slots=8\n", min_hosts=1)
    assert torchrun_words(first).startswith("--nnodes 1:2 --nproc-per-node 8 ")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("hosts", "min_hosts", "message"),
    [
        (None, 1, r"--min-hosts 1: pass --hosts too\."),
        ("a slots=1\n", 2, r"--min-hosts 2: hosts names 1 hosts\."),
        (
            "localhost slots=1\na slots=1\n",
            None,
            r"hosts: the ranks meet at the first host, .* cannot reach 'localhost'",
        ),
    ],
)
def test_what_is_refused(hosts: str | None, min_hosts: int | None, message: str) -> None:
    """Each mistake is refused before anything starts."""
    with pytest.raises(AutoshardError, match=message):
        asked(hosts, min_hosts)


def test_a_missing_script() -> None:
    """A script that does not exist is named."""
    with pytest.raises(AutoshardError, match=r"there is no script none\.py"):
        commands("none.py", (), hosts=None, processes=1, min_hosts=None, max_restarts=0, port=1)


def autoshard_run(*words: str, path: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{path}:{environment['PATH']}"
    command = (sys.executable, "-m", "autoshard", "run", *words)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_dry_run_starts_nothing(folder: Path) -> None:
    """With `--dry-run --json` the commands of the hosts are printed, and nothing runs."""
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    out, err = autoshard_run("train.py", "--hosts", "hosts", "--dry-run", "--json").communicate(timeout=120)
    assert [item["host"] for item in json.loads(out)] == ["node1", "node2"], err
    assert sorted(path.name for path in folder.iterdir()) == ["hosts", "train.py"]


def on_two_hosts(folder: Path, slots: int, *words: str) -> subprocess.Popen[str]:
    """Start the script on two emulated hosts with a program in place of ssh. The second host has `slots`."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(_FAKE_SSH)
    ssh.chmod(0o755)
    (folder / "hosts").write_text(f"{socket.gethostname()} slots=1\nnode2 slots={slots}\n")
    return autoshard_run("train.py", "--hosts", "hosts", "--port", str(free_port()), *words, path=str(ssh.parent))


def test_two_hosts_meet(folder: Path) -> None:
    """Three ranks on two hosts add up a tensor of ones."""
    process = on_two_hosts(folder, 2, "--", "sum")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [(folder / f"sum.{rank}").read_text() for rank in range(3)] == ["3.0"] * 3


def test_a_failing_host_ends_the_run(folder: Path) -> None:
    """If the script fails on one host, the other host's processes end too, and the exit status is not 0."""
    (folder / "train.py").write_text("import os, time\nos.environ['RANK'] == '0' and exit(3)\ntime.sleep(600)\n")
    (folder / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    process = autoshard_run("train.py", "--hosts", "hosts", "--port", str(free_port()))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "autoshard: the run ended with exit status 1." in err


def test_sigterm_lets_all_hosts_save(folder: Path) -> None:
    """After SIGTERM the ranks of both hosts save and the run ends, although restarts are left."""
    (folder / "train.py").write_text(_TOLD)
    process = on_two_hosts(folder, 1, "--max-restarts", "3")
    deadline = time.monotonic() + 120
    while len(list(folder.glob("ready.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode not in (0, None), err
    assert sorted(path.name for path in folder.glob("saved.*")) == ["saved.0", "saved.1"], err


@pytest.mark.usefixtures("folder")
def test_a_machine_without_ssh_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ssh no command is started, not even those of this machine."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a command was started"))
    with pytest.raises(AutoshardError, match="ssh is not installed here; start the lines of --dry-run yourself"):
        start(asked(f"{socket.gethostname()} slots=1\nnode2 slots=1\n"), needed=2)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_command_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a command cannot be started, the error is one sentence and the commands that run are terminated."""
    running: list[subprocess.Popen[bytes]] = []
    original = HostCommand.start
    monkeypatch.setattr(HostCommand, "start", lambda host: running.append(original(host)) or running[-1])
    first = HostCommand(Host("localhost", 1), "/", (sys.executable, "-c", "import time; time.sleep(60)"), {})
    second = HostCommand(Host("127.0.0.1", 1), "/", ("/no/such/command",), {})
    with pytest.raises(AutoshardError, match=r"127\.0\.0\.1: the command cannot be started: No such file"):
        start((first, second), needed=2)
    (process,) = running
    assert process.wait(30) == -signal.SIGTERM
