"""The examples for clusters, run with substitutes for the programs of SLURM and Ray."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.benchmarks.two_hosts import ADDRESSES, TwoHosts
from tests.examples.scripts import ROOT, run_python

CLUSTERS = ROOT / "examples" / "clusters"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

_SRUN = """#!/bin/bash
for _ in $(seq "$SLURM_NNODES"); do "$@" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""
_SRUN_ON_HOSTS = """#!/bin/bash
# Each host has its own name, and finds the others' addresses in /etc/hosts, as on a cluster.
as_host='hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
on() {{ ip netns exec "$1" unshare --uts --mount bash -c "$as_host" "$2" {table} "${{@:3}}"; }}
export GLOO_SOCKET_IFNAME=eth0
on {first} node1 "$@" & one=$!
on {second} node2 "$@" & two=$!
wait "$one" && wait "$two"
"""
_SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && tr , '\\n' <<< "$3"
"""
_RAY = """
import threading
from dataclasses import dataclass

@dataclass
class FailureConfig:
    max_failures: int

@dataclass
class RunConfig:
    failure_config: FailureConfig

@dataclass
class ScalingConfig:
    num_workers: int
    use_gpu: bool
"""
_RAY_TORCH = """
import threading
from dataclasses import dataclass
from typing import Any, Callable
import torch

@dataclass
class TorchTrainer:
    train: Callable[[Any], Any]
    train_loop_config: Any
    scaling_config: Any
    run_config: Any

    def fit(self):
        torch.distributed.init_process_group("gloo")
        thread = threading.Thread(target=self.train, args=({"folder": "checkpoints"},))
        thread.start()
        thread.join()
        torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the examples, and with substitutes for the programs of SLURM and for torchrun."""
    shutil.copytree(CLUSTERS, tmp_path, dirs_exist_ok=True)
    for name, text in {"bin/srun": _SRUN, "bin/scontrol": _SCONTROL}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return tmp_path


def steps_in(text: str) -> list[tuple[int, int, str]]:
    """The steps that a text reports: number of the step, number of ranks, and loss."""
    return [
        (int(step), int(ranks), loss)
        for step, ranks, loss in re.findall(r"step (\d+) on (\d+) ranks: loss (\S+)", text)
    ]


def test_the_script_goes_on(folder: Path) -> None:
    """The script runs alone, and continues from its last step on two ranks."""
    first = run_python("train.py", "3", folder=folder)
    second = run_python(*TORCHRUN, "2", "train.py", "5", folder=folder)
    assert [item[:2] for item in steps_in(first + second)] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]


def free_job() -> int:
    """The number of a job whose port nobody uses."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", 20000 + number))
            return 20000 + number
    raise AssertionError("no port is free")


def submit(folder: Path, nodes: str, steps: int) -> list[tuple[int, int, str]]:
    """Run the sbatch script as a job on two nodes, and return the steps that it reports."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": str(free_job()),
    }
    done = subprocess.run(
        ["bash", "train.sbatch", str(steps)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return steps_in(done.stdout)


@pytest.mark.slow
def test_the_sbatch_script_runs(folder: Path) -> None:
    """The sbatch script trains on two ranks, one on each of two nodes that this machine emulates."""
    assert [item[:2] for item in submit(folder, "localhost,127.0.0.1", 2)] == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_two_jobs_on_two_hosts(folder: Path) -> None:
    """On two hosts with separate network stacks and a slow link, a second job continues where the first one ended."""
    with ExitStack() as stack:
        try:
            first, second = stack.enter_context(TwoHosts("200mbit")).names
        except SystemExit as error:
            pytest.skip(str(error))
        table = folder / "hosts"
        table.write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} node1\n{ADDRESSES[1]} node2\n")
        (folder / "bin" / "srun").write_text(_SRUN_ON_HOSTS.format(first=first, second=second, table=table))
        lines = submit(folder, "node1,node2", 3) + submit(folder, "node1,node2", 5)
    assert [item[:2] for item in lines] == [(number, 2) for number in range(5)]


def test_the_options_of_sbatch() -> None:
    """The sbatch options are complete, and the time for saving is shorter than that between the signal and the
    job's end."""
    text = (CLUSTERS / "train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert {"nodes", "time", "gpus-per-node", "requeue"} <= options.keys()
    assert options["ntasks-per-node"] == "1"
    kind, _, seconds = options["signal"].partition("@")
    waited = re.search(r"--shutdown-timeout (\d+)", text)
    assert waited is not None
    assert kind == "TERM"
    assert int(waited[1]) < int(seconds)


def test_the_job_of_kubernetes() -> None:
    """The file is a PyTorchJob whose pods run torchrun, restart, and have time for the save."""
    job: Any = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert spec["elasticPolicy"]["rdzvBackend"] == "c10d"
    assert spec["elasticPolicy"]["minReplicas"] <= worker["replicas"] <= spec["elasticPolicy"]["maxReplicas"]
    assert worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    program, option, seconds, script = container["command"]
    assert (program, option, Path(script).name) == ("torchrun", "--shutdown-timeout", "train.py")
    assert int(seconds) < pod["terminationGracePeriodSeconds"]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert spec["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {item["name"] for item in container["volumeMounts"]} == {item["name"] for item in pod["volumes"]}


@pytest.mark.slow
def test_the_script_for_ray(folder: Path) -> None:
    """Under a trainer that calls the function in a thread, as Ray's does, two ranks train and save."""
    (folder / "ray" / "train").mkdir(parents=True)
    (folder / "ray" / "__init__.py").touch()
    (folder / "ray" / "train" / "__init__.py").write_text(_RAY)
    (folder / "ray" / "train" / "torch.py").write_text(_RAY_TORCH)
    (folder / "train.py").write_text((folder / "train.py").read_text().replace("else 100", "else 3"))
    text = run_python(*TORCHRUN, "2", "ray_train.py", folder=folder)
    assert [item[:2] for item in steps_in(text)] == [(0, 2), (1, 2), (2, 2)]
    assert (folder / "checkpoints" / "step-3").is_dir()
