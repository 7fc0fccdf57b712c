"""The hardware decides which collectives overlap, and how many buckets there are."""

from __future__ import annotations

import math

import pytest

from autoshard.cluster import Cluster, local_cluster
from autoshard.ir.collectives import is_collective
from autoshard.ir.communicators import without_purpose
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from cost_models.hardware import node_type
from cost_models.streams import overlap_of
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.in_flight import SHARE_WITH_OVERLAP, SHARE_WITHOUT_OVERLAP, WITH_OVERLAP, WITHOUT_OVERLAP
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.order import Moment, passes_at
from passes.lowering.overlap import overlapped
from passes.lowering.start_soon import StartSoon
from passes.memory.lowered_memory import peak_bytes
from passes.verification.verify_phases import verify_phases
from tests.passes.lowering.overlapped import fully_sharded, of_one_batch, plain

ONE_MACHINE = Cluster("cpu_laptop", devices_per_node=4)
HOSTS = Cluster(node_type("cpu_laptop").with_network("ethernet_1g"), nodes=4, devices_per_node=1)


def sends(phased: PhasedProgram) -> int:
    """Count the collectives of a step."""
    return sum(is_collective(node) for phase in phased.phases.values() for node in phase.graph.nodes)


def test_where_nothing_runs_beside_communication_buckets_are_few() -> None:
    """Four ranks of one machine, where nothing runs beside communication, have fewer buckets than four hosts."""
    phased = fully_sharded()
    alone, beside = (
        overlapped(phased, LoweringOptions(memory_bytes=math.inf, cluster=item)) for item in (ONE_MACHINE, HOSTS)
    )
    verify_phases(alone)
    assert sends(alone) < sends(beside) < sends(phased)
    assert sends(beside) == sends(overlapped(phased, LoweringOptions(memory_bytes=math.inf)))


def order_of(phased: PhasedProgram) -> list[str]:
    """Return the products of a backward, and the starts of collectives, in order."""
    found = []
    for node in phased.backward.graph.nodes:
        if "mm" in node.name:
            found.append(node.name)
        elif is_collective(node) and without_purpose(str(node.args[-1])) == node.args[-1]:
            found.append("start")
    return found


def test_where_nothing_runs_beside_communication_calls_that_compute_keep_their_order() -> None:
    """Passes for one machine keep the order of products and collectives.

    `StartSoon`, which hosts use, changes the order.
    """
    phased = plain("gpt", "tensor")
    for in_flight in WITHOUT_OVERLAP[: -len(WITH_OVERLAP)]:
        made = phased
        for rewrite in passes_at(Moment.IN_FLIGHT, LoweringOptions(in_flight=in_flight)):
            made = made if isinstance(rewrite, BucketCollectives) else rewrite(made)
        assert order_of(made) == order_of(phased)
    assert order_of(StartSoon()(phased)) != order_of(phased)


def test_memory_has_the_last_word() -> None:
    """Within the peak memory of the program, one machine sends at most as many collectives as several hosts."""
    phased = fully_sharded()
    alone, beside = (overlapped(phased, LoweringOptions(cluster=item)) for item in (ONE_MACHINE, HOSTS))
    assert sends(alone) <= sends(beside)


@pytest.mark.slow
def test_buckets_that_nothing_runs_beside_may_take_more_memory() -> None:
    """Buckets raise the peak memory by at most a fixed share, which is larger on one machine than on several hosts."""
    phased = of_one_batch("gpt", "ZeRO-1")
    made = [overlapped(phased, LoweringOptions(memory_bytes=math.inf, cluster=item)) for item in (ONE_MACHINE, HOSTS)]
    alone, beside = (peak_bytes(item) / peak_bytes(phased) - 1 for item in made)
    assert beside <= SHARE_WITH_OVERLAP < alone <= SHARE_WITHOUT_OVERLAP


def test_overlap_is_that_of_the_links() -> None:
    """`overlap_of` is None for the CPUs of one machine.

    The slowdown is smaller for CPUs behind a network than for GPUs.
    """
    behind_network, of_gpus = overlap_of(HOSTS), overlap_of(Cluster("h100_sxm"))
    assert overlap_of(ONE_MACHINE) is None
    assert behind_network is not None
    assert of_gpus is not None
    assert 0 < behind_network < of_gpus


@pytest.mark.parametrize(("local", "nodes"), [("4", 1), ("2", 2), ("1", 4), ("3", 1), (None, 1)])
def test_hosts_of_a_run_are_known(monkeypatch: pytest.MonkeyPatch, local: str | None, nodes: int) -> None:
    """The number of hosts follows from `torchrun`'s variables if each host has equally many processes."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    found = local_cluster(Mesh({"data": 2, "model": 2}))
    assert (found.nodes, found.size) == (nodes, 4)
    assert local_cluster(Mesh({"data": 2})).nodes == 1  # a simulated mesh
