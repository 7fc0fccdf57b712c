"""Run checks on Gloo processes, many checks with one start, before a deadline."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoshard.ir.garbage import THRESHOLDS

Check = Callable[[], None]

PRELOADED = ["autoshard", "passes.driver.entry", "tests.models", "transformers.models.llama.modeling_llama"]
"""Modules that take seconds to import: one process imports them, and forks the processes of all checks."""


def run_checks(checks: Mapping[str, Check], ranks: int = 4, deadline_s: float = 300.0) -> dict[str, str]:
    """Run each check, in order, in `ranks` processes of one Gloo group.

    Return for each check "" or an error: that of a rank that failed by itself, before those of ranks that waited. A
    check that a process did not reach in `deadline_s` seconds has the text "did not finish".
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        processes = [
            context.Process(target=_work, args=(rank, ranks, folder, dict(checks)), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + deadline_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        return {name: _outcome(Path(folder), name, ranks) for name in checks}


def held_store() -> dist.TCPStore:
    """Return a store that no rank hosts, as under torchrun, for ranks that are killed or stopped.

    Ranks connect by `join_ranks`. With a store in a file, a rank that is stopped with the file's lock would stop all
    others.
    """
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def join_ranks(port: int, rank: int, ranks: int) -> None:
    """Make this process one rank of a Gloo group whose store listens at a port of this host."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def new_folder() -> Path:
    """Return a new folder, the same on all ranks of a process group if there is one."""
    names = [tempfile.mkdtemp() if _is_first() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return Path(str(names[0]))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a `new_folder`, and delete it at the end unless a check fails."""
    folder = new_folder()
    yield folder
    if dist.is_initialized():
        dist.barrier()
    if _is_first():
        shutil.rmtree(folder)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def checked_once(checks: Mapping[str, Check], **options: Any) -> Any:
    """Return a module's fixture with the outcomes of checks, which `run_checks` runs at the first use.

    Only the checks run that tests of this session ask for, by a parameter `name`.
    """

    def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
        return run_checks(asked(request, checks), **options)

    return pytest.fixture(scope="module")(outcomes)


def on_processes(
    checks: Mapping[str, Check], *, slow: Collection[str] = (), sample: int | None = None, **options: Any
) -> Any:
    """Return a test with a case for each check; the first case runs `run_checks` on all checks of this session."""
    outcomes: dict[str, str] = {}

    @pytest.mark.parametrize("name", named(checks, slow=slow))
    def test(request: pytest.FixtureRequest, name: str) -> None:
        """The check passes on every rank."""
        if not outcomes:
            items = [item for item in request.session.items if getattr(item, "function", None) is request.function]
            names = {item.callspec.params["name"] for item in items}  # type: ignore[attr-defined]
            outcomes.update(run_checks({key: checks[key] for key in checks if key in names}, **options))
        report(outcomes, name)

    return test if sample is None else pytest.mark.sample(sample)(test)


def asked(request: pytest.FixtureRequest, checks: Mapping[str, Check]) -> dict[str, Check]:
    """Return the checks that tests of this session ask a module's fixture for, by a parameter `name`."""
    tests = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    names = {test.callspec.params["name"] for test in tests if test.path == request.path}  # type: ignore[attr-defined]
    return {name: check for name, check in checks.items() if name in names}


def named(checks: Iterable[str], *, slow: Collection[str]) -> list[Any]:
    """Return the names of checks as parameters of a test; those in `slow` are marked slow."""
    assert set(slow) <= set(checks), f"no check is called {sorted(set(slow) - set(checks))}"
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in checks]


def report(outcomes: Mapping[str, str], name: str) -> None:
    """Fail the test if the outcome of the check is an error."""
    if outcomes[name]:
        pytest.fail(outcomes[name], pytrace=False)


def _outcome(folder: Path, name: str, ranks: int) -> str:
    found = []
    for rank in range(ranks):
        path = folder / f"{name}.{rank}"
        text = path.read_text() if path.exists() else "did not finish"
        if text:
            found.append(f"rank {rank}: {text}")
    return min(found, key=_tells_less, default="")


def _tells_less(outcome: str) -> tuple[bool, bool, str]:
    """Sort a rank that failed by itself before ranks that waited for it."""
    waited = any(name in outcome for name in ("RankMismatchError", "LostRankError"))
    return "did not finish" in outcome, waited, outcome


def _work(rank: int, ranks: int, folder: str, checks: dict[str, Check]) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork
    gc.set_threshold(*THRESHOLDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for name, check in checks.items():
        outcome = _run(check)
        Path(folder, f"{name}.{rank}").write_text(outcome)
        if outcome:
            break  # ranks may be out of step now
        dist.barrier()
    dist.destroy_process_group()


def _run(check: Callable[[], Any]) -> str:
    try:
        check()
    except BaseException:  # noqa: BLE001
        return traceback.format_exc()
    return ""
