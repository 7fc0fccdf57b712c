"""Processes of one attempt of a run meet in a store that outlives attempts, and agree on a token."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import autoshard
from autoshard import LostRankError, Mesh, NotAvailableError
from autoshard.runtime.agreement.meeting import meet_in, refuse_a_kept_store
from tests.runtime.one_layer import OneLayer
from tests.runtime.processes import PRELOADED, held_store

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost"}


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("localhost", store.port, is_master=False)


def clients(store: dist.TCPStore, count: int) -> list[dist.TCPStore]:
    """Return clients of a store, connected before any of them polls; a busy store can take five seconds to connect."""
    return [client(store) for _ in range(count)]


def tokens(stores: list[dist.TCPStore], delays_s: list[float], timeout_s: float = 20.0) -> list[str]:
    """Return the token that each rank finds, if rank i comes `delays_s[i]` seconds later."""

    def come(rank: int) -> str:
        time.sleep(delays_s[rank])
        return meet_in(stores[rank], rank, len(delays_s), timeout_s)

    with ThreadPoolExecutor(len(delays_s)) as pool:
        return [*pool.map(come, range(len(delays_s)))]


def test_attempts_have_tokens_of_their_own() -> None:
    """All ranks of an attempt get one token, and no two attempts get the same, in any order of arrival."""
    server, found = held_store(), list[str]()
    stores = clients(server, 3)
    for delays_s in ([0.0, 0.2], [0.2, 0.0], [0.0, 0.1, 0.2], [0.1, 0.0], [0.0]):
        met = tokens(stores, delays_s)
        assert len(set(met)) == 1
        found.append(met[0])
    assert len(set(found)) == len(found)


FEWEST_ACTS = 6
"""Store operations of a rank that comes so late that it never polls twice; the first rank has one more."""


class DoomedError(Exception):
    """The error that stands for the end of a process by its launcher."""


class DoomedStore:
    """A store that raises after some operations, and then in all processes of the attempt."""

    def __init__(self, store: dist.TCPStore, acts: int, over: threading.Event) -> None:
        self._store, self._acts, self._over = store, acts, over

    def __getattr__(self, name: str) -> Any:
        if self._acts == 0:
            self._over.set()
        if self._over.is_set():
            raise DoomedError
        self._acts -= 1
        return getattr(self._store, name)


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_an_attempt_that_ended_anywhere_is_no_part_of_the_next(doomed: int) -> None:
    """After an attempt ends at any store operation of any rank, the next attempt meets with a new token."""
    server, found = held_store(), set[str]()
    stores = clients(server, 3)
    for acts in range(12):
        over = threading.Event()
        theirs = [DoomedStore(one, acts if rank == doomed else -1, over) for rank, one in enumerate(stores)]
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(meet_in, one, rank, 3, 20.0) for rank, one in enumerate(theirs)]
            ended = [isinstance(future.exception(), DoomedError) for future in futures]
        assert ended[doomed] or (acts >= FEWEST_ACTS and not any(ended))
        met = tokens(stores, [0.0, 0.0, 0.0])
        assert len(set(met)) == 1
        assert met[0] not in found
        found.add(met[0])


def test_a_first_rank_that_was_replaced_ends() -> None:
    """Rank 0 of an ended attempt raises once a new rank 0 comes, and the new attempt meets."""
    store = held_store()
    stores = clients(store, 4)
    with ThreadPoolExecutor(4) as pool:
        left = pool.submit(meet_in, stores[3], 0, 3, 20.0)
        while not store.check(["autoshard/shown"]):
            time.sleep(0.01)
        first = pool.submit(meet_in, stores[0], 0, 3, 20.0)
        with pytest.raises(LostRankError, match="rank 0 of the previous attempt"):
            left.result()
        others = [pool.submit(meet_in, stores[rank], rank, 3, 20.0) for rank in (1, 2)]
        assert {future.result() for future in others} == {first.result()}


@pytest.mark.parametrize(
    ("late", "match"), [(1, r"Ranks \[1\] did not come within 0"), (0, r"Ranks \[0\] did not come")]
)
def test_a_rank_that_does_not_come_is_named(late: int, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank does not come in time, each other rank raises an error that names it."""
    monkeypatch.setattr("autoshard.runtime.agreement.meeting._GRACE_S", 0.3)
    store, ranks = held_store(), [rank for rank in range(3) if rank != late]
    stores = clients(store, 3)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(meet_in, stores[rank], rank, 3, 0.4) for rank in ranks]:
            with pytest.raises(LostRankError, match=match):
                future.result()


def restarted(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    for name, value in {**AGENT, "MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": str(count)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.fixture(params=["by torch", "given"])
def group_on_kept_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a process group on the launcher's store, by torch's environment or from a given store."""
    store = held_store()
    restarted(store, monkeypatch)
    given = {"store": client(store), "rank": 0, "world_size": 1} if request.param == "given" else {}
    dist.init_process_group("gloo", **given)
    yield
    dist.destroy_process_group()


def test_a_group_on_the_kept_store_is_refused(group_on_kept_store: None) -> None:
    """At a restart, a process group on the store of earlier attempts raises, and the error names two alternatives."""
    model = nn.Linear(2, 2)
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    with pytest.raises(NotAvailableError, match=r"this is restart 1.*Mesh.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        autoshard.compile(model, mesh)


def test_a_group_of_the_first_attempt_is_taken(group_on_kept_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first attempt, a process group on the launcher's store is accepted."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    refuse_a_kept_store(dist.group.WORLD.get_group_store())


def test_a_group_on_another_prefix_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a restart, a process group on the launcher's store under another prefix is accepted."""
    store = held_store()
    restarted(store, monkeypatch)
    dist.init_process_group("gloo", store=dist.PrefixStore("third", client(store)), rank=0, world_size=1)
    refuse_a_kept_store(dist.group.WORLD.get_group_store())
    dist.destroy_process_group()


def train(rank: int, port: int, attempt: int, told: Path) -> None:
    """Run one rank of an attempt under a launcher; in the first attempt, rank 1 is killed."""
    found = {**AGENT, "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    os.environ.update(found, GLOO_SOCKET_IFNAME="lo", WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    model = autoshard.compile(OneLayer(), Mesh({"data": 2}), options=autoshard.Options(timeout_s=20.0))
    for _ in range(4):
        loss = model(torch.ones(4, 6))
        if attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    told.write_text(str(loss.item()))
    os._exit(0)


def test_a_run_begins_anew_on_the_kept_store(tmp_path: Path) -> None:
    """After a rank of the first attempt is killed in a call, two more attempts compile and run."""
    store, context = held_store(), mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    expected = OneLayer()(torch.ones(4, 6)).item()
    for attempt in range(3):
        told = [tmp_path / f"{attempt}.{rank}" for rank in range(2)]
        processes = [
            context.Process(target=train, args=(rank, store.port, attempt, told[rank]), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in reversed(processes):
            process.join(60.0)
            if attempt == 0:
                processes[0].kill()
        assert attempt == 0 or [float(path.read_text()) for path in told] == pytest.approx([expected] * 2)
