"""Gloo processes whose collectives and messages take the time of a given link."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard import P
from autoshard.errors import MeshError
from autoshard.testing import Link, Transfer, delayed_mesh, record_transfers
from tests.models import Perceptron
from tests.runtime.processes import checked_once, report

_c10d = torch.ops._c10d_functional

AXES = {"data": 2, "model": 2}
SLOW = Link(latency_s=0.01, bandwidth_bytes_per_s=1e5)
FAST = Link(latency_s=0.001, bandwidth_bytes_per_s=1e6)


def check_each_functional_collective_is_right_and_takes_its_time() -> None:
    """Each collective has the right result, and takes the link's time for the bytes that a rank sends."""
    mesh = delayed_mesh(AXES, {"data": SLOW, "model": FAST})
    group, mine = mesh.get_group("data"), mesh.get_local_rank("data")
    name = group.group_name
    value = torch.arange(100.0) + 1000 * mine
    calls = [
        (_c10d.all_reduce.default(value, "sum", name), 2 * torch.arange(100.0) + 1000, "allreduce", 400),
        (_c10d.all_gather_into_tensor.default(value, 2, name), None, "allgather", 400),
        (_c10d.reduce_scatter_tensor.default(value, "sum", 2, name), None, "reduce_scatter", 200),
        (_c10d.all_to_all_single.default(value, [50, 50], [50, 50], name), None, "alltoall", 200),
        (_c10d.broadcast.default(value, 0, name), torch.arange(100.0), "broadcast", 400),
    ]
    gathered = torch.cat([torch.arange(100.0), torch.arange(100.0) + 1000])
    halves = gathered.view(2, 2, 50)[:, mine]
    wanted = [calls[0][1], gathered, halves.sum(0), halves.flatten(), calls[4][1]]
    with record_transfers(mesh) as transfers:
        results = [_c10d.wait_tensor.default(call[0]) for call in calls]
    for result, want in zip(results, wanted, strict=True):
        assert torch.equal(result, want)
    assert [(item.operation, item.sent_bytes) for item in transfers] == [call[2:] for call in calls]
    for item in transfers:
        assert item.axes == ("data",)
        assert item.duration_s == pytest.approx(SLOW.latency_s + item.sent_bytes / SLOW.bandwidth_bytes_per_s)
        assert item.issued_s + item.duration_s <= item.done_s + 1e-9 <= time.perf_counter()
    for before, after in pairwise(transfers):
        assert_queued(after, before)


def assert_queued(after: Transfer, *before: Transfer) -> None:
    """The transfer `after` started when it was issued, or when the link had sent the transfers `before`."""
    start_s = max(after.issued_s, *(item.done_s - SLOW.latency_s for item in before))
    assert abs(after.done_s - after.duration_s - start_s) < 1e-6


def check_axes_have_links_of_their_own_and_groups_of_an_axis_share_it() -> None:
    mesh = delayed_mesh(AXES, {"data": SLOW, "model": FAST})
    members = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in AXES}
    backend = dist.get_backend(mesh.get_group("data"))
    again = dist.new_group(members["data"], backend=backend, use_local_synchronization=True)
    everywhere = dist.new_group(range(4), backend=backend)
    value = torch.ones(1000)
    works: list[Any] = [
        dist.all_reduce(value.clone(), group=group, async_op=True)
        for group in (mesh.get_group("data"), mesh.get_group("model"), again, everywhere)
    ]
    with record_transfers(mesh) as transfers:
        for work in works:
            work.wait()
    first, other, second, both = transfers
    assert abs(other.done_s - other.issued_s - 0.001 - 4000 / 1e6) < 1e-6
    assert_queued(second, first)
    assert (both.axes, both.sent_bytes) == (("data", "model"), 6000)
    assert_queued(both, second)


def check_groups_inside_a_box_take_its_link() -> None:
    """Pairs within a box take the box's link. With a clock that only moves by waiting, a collective ends at one
    time for all ranks."""
    clock = _Waited(float(dist.get_rank()))
    mesh = delayed_mesh({"pipeline": 4}, {"pipeline": SLOW}, box=(2, FAST), clock=clock)
    backend, rank = dist.get_backend(mesh.get_group()), dist.get_rank()
    pairs: list[Any] = [dist.new_group(pair, backend=backend) for pair in ([0, 1], [2, 3])]
    with record_transfers(mesh) as transfers:
        dist.all_reduce(torch.ones(100), group=pairs[rank // 2])
        dist.all_reduce(torch.ones(100), group=mesh.get_group())
    inside, across = transfers
    assert inside.duration_s == pytest.approx(FAST.latency_s + 400 / FAST.bandwidth_bytes_per_s)
    assert across.duration_s == pytest.approx(SLOW.latency_s + 600 / SLOW.bandwidth_bytes_per_s)
    assert inside.done_s == pytest.approx(1 + 2 * (rank // 2) + inside.duration_s)
    assert clock.now_s() == pytest.approx(3 + inside.duration_s + across.duration_s)


class _Waited:
    """A clock that moves only when it sleeps."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """The time in seconds."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock forward by `seconds`."""
        self._now_s += seconds


def check_messages_take_the_time_of_their_senders_link() -> None:
    """Two messages each way between ranks 0 and 1, over one group per direction, take the time of the sender's link."""
    mesh = delayed_mesh({"pipeline": 4}, {"pipeline": SLOW})
    backend, rank = dist.get_backend(mesh.get_group()), dist.get_rank()
    there: Any = dist.new_group([0, 1], backend=backend)
    back: Any = dist.new_group([0, 1], backend=backend)
    if rank > 1:
        return
    out, into = (there, back) if rank == 0 else (back, there)
    for group in (there, back):
        dist.barrier(group)  # connects; barriers are not delayed
    received = [torch.empty(100) for _ in range(2)]
    with record_transfers(mesh) as transfers:
        comes = [dist.irecv(tensor, 1 - rank, into) for tensor in received]
        sends = [dist.isend(torch.full((100,), 10.0 * rank + number), 1 - rank, out) for number in range(2)]
        for work in (*sends, *comes):
            assert work is not None
            work.wait()
    assert [tensor.unique().tolist() for tensor in received] == [[10.0 * (1 - rank) + number] for number in range(2)]
    assert [(item.operation, item.sent_bytes) for item in transfers] == [("send", 400)] * 2 + [("recv", 400)] * 2
    occupied_s = 400 / SLOW.bandwidth_bytes_per_s
    for (first, second), latency_s in ((transfers[:2], 0.0), (transfers[2:], SLOW.latency_s)):
        assert first.done_s - first.issued_s == pytest.approx(occupied_s + latency_s)
        start_s = max(first.done_s, second.issued_s + latency_s)  # on a busy machine, a rank may issue it late
        assert second.done_s - start_s == pytest.approx(occupied_s)
        assert first.duration_s == pytest.approx(occupied_s + latency_s)
        assert second.done_s <= time.perf_counter()
    with pytest.raises(MeshError, match="name the sender"):
        dist.recv(received[0], group=into)


def check_what_a_rank_works_meanwhile_is_hidden() -> None:
    mesh = delayed_mesh({"data": 4}, {"data": Link(latency_s=0.3)})
    work: Any = dist.all_reduce(torch.ones(4), group=mesh.get_group(), async_op=True)
    time.sleep(0.4)
    dist.barrier()
    with record_transfers(mesh) as transfers:
        work.wait()
        work.wait()
    (found,) = transfers
    assert found.waited_s < 0.1 < found.duration_s


def check_dtensors_and_compiled_models_run_on_it() -> None:
    mesh = delayed_mesh(AXES, {"model": FAST})
    constraints = {"up.weight": P("model"), "down.weight": P(None, "model"), "input:*": P("data")}
    sharded = autoshard.compile(Perceptron(), mesh, constraints=constraints)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with record_transfers(mesh) as transfers:
        loss = sharded(x)
        loss.backward()
    torch.testing.assert_close(loss, Perceptron()(x))
    assert {item.axes for item in transfers} >= {("data",), ("model",)}
    whole = torch.arange(8.0)
    shards = DTensor.from_local(whole.view(2, 4)[mesh.get_local_rank("model")], mesh["model"], [Shard(0)])
    assert torch.equal(shards.full_tensor(), whole)


def check_wrong_use_is_refused() -> None:
    for axes, links, message in (
        (AXES, {"expert": FAST}, "has no axis 'expert'"),
        ({"data": 3}, {}, "needs 3 processes, found 4"),
    ):
        with pytest.raises(MeshError, match=message):
            delayed_mesh(axes, links)
    plain = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    with pytest.raises(MeshError, match="has no delayed links"), record_transfers(plain):
        pass


CHECKS = {
    check.__name__: check
    for check in (
        check_each_functional_collective_is_right_and_takes_its_time,
        check_axes_have_links_of_their_own_and_groups_of_an_axis_share_it,
        check_groups_inside_a_box_take_its_link,
        check_messages_take_the_time_of_their_senders_link,
        check_what_a_rank_works_meanwhile_is_hidden,
        check_dtensors_and_compiled_models_run_on_it,
        check_wrong_use_is_refused,
    )
}


outcomes = checked_once(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_processes(outcomes: dict[str, str], name: str) -> None:
    """The check of this name passes on four processes."""
    report(outcomes, name)


@pytest.mark.parametrize("numbers", [{"latency_s": -1.0}, {"bandwidth_bytes_per_s": 0.0}, {"latency_s": float("nan")}])
def test_a_link_that_no_network_is_is_refused(numbers: dict[str, float]) -> None:
    """A link with a negative latency, no bandwidth or NaN is refused."""
    with pytest.raises(MeshError, match=r"write Link\("):
        Link(**numbers)


def test_a_mesh_needs_its_processes() -> None:
    """Without a process group, the mesh is refused."""
    with pytest.raises(MeshError, match="found no process group"):
        delayed_mesh({"data": 2}, {})


def test_transfers_are_public() -> None:
    """`Transfer` can be made from its fields."""
    assert Transfer("allreduce", ("data",), 8, 0.0, 1.0, 1.0, 0.5).waited_s == 0.5
