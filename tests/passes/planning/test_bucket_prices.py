"""Prices of reshards in buckets, as collectives of parameters and gradients are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, P, Plan
from autoshard.ir.reshard import ReshardKind, ReshardStep
from autoshard.tracing import trace
from passes.driver import plan_and_lower as pipeline
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_options import PlanOptions
from passes.planning.baselines import solve_baselines
from passes.planning.bucket_prices import BucketPrice, hidden_part, in_buckets, solve_in_buckets
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.solver.search_control import SearchControl, SearchProgress
from passes.strategies.price import StepPrice
from tests.passes.blocks import Perceptron

MESH = Mesh({"model": 2})
CLUSTER = Cluster("cpu_laptop", devices_per_node=2)
MIB = 2**20


@pytest.mark.parametrize("kind", [ReshardKind.ALL_GATHER, ReshardKind.REDUCE_SCATTER, ReshardKind.ALL_REDUCE])
def test_members_share_the_price_of_their_bucket(kind: ReshardKind) -> None:
    """A reshard of 1/64 of a bucket costs 1/64 of the bucket and its own copies.

    A reshard beyond the bucket costs its full price.
    """
    alone = StepPrice(CLUSTER, MESH)
    price = BucketPrice(alone, MIB)

    def step(piece: int) -> ReshardStep:
        before, after = (piece, 2 * piece) if kind is ReshardKind.ALL_GATHER else (2 * piece, piece)
        return ReshardStep(kind, "model", 2, 0, 0, None, P("model"), P(), before, after)

    small, large = step(MIB // 64), step(3 * MIB)
    bucket_s, copied_s = alone.parts(step(MIB))[0], alone.parts(small)[1]
    assert price(small) == pytest.approx(bucket_s / 64 + copied_s)
    assert price(small) < 0.5 * alone(small)
    assert price(large) == alone(large)


def test_nothing_costs_more_in_buckets() -> None:
    """No choice costs more in buckets.

    A solution in buckets has its cost without buckets, and is not shown as progress.
    """
    rows = torch.empty(64, 16, device="meta")
    program = trace(Perceptron(), (rows, rows))
    planning = planning_problem(program, MESH, CLUSTER, PlanOptions())
    bucketed = in_buckets(planning, MIB)
    generator = np.random.default_rng(0)
    for _ in range(20):
        choice = [int(generator.integers(len(cost))) for cost in bucketed.costs]
        assert bucketed.cost_of(choice) <= planning.assignment.cost_of(choice) + 1e-12
    shown: list[SearchProgress] = []
    search = Search(control=SearchControl(shown.append))
    found = solve_in_buckets(planning, bucketed, search, {})
    assert found is not None
    assert found.cost == planning.assignment.cost_of(found.choice)
    assert not shown
    search(planning)
    assert shown


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


def _plan() -> Plan:
    """Plan three blocks whose matrices are split as in Megatron-LM, and leave all other specs to the planner."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(128, 512) for _ in range(3)))
        rows = torch.empty(2048, 128)
    return autoshard.plan(
        model, CLUSTER.mesh(MESH), example_inputs=(rows,), loss_fn=lambda out: out.sum(), precision=None,
        constraints={"input:*": P(), "*.first.weight": P("model"), "*.second.weight": P(None, "model")},
    )  # fmt: skip


def test_a_layout_of_many_small_gathers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket prices lead to a plan that is over 3 % faster, although its cost without buckets is higher."""
    found = _plan()
    monkeypatch.setattr(pipeline, "solve_in_buckets", lambda *_: None)
    alone = _plan()
    assert found.predicted.step_time_s < 0.97 * alone.predicted.step_time_s
    assert found.objective > alone.objective


@pytest.mark.slow
def test_what_is_cheaper_in_buckets_is_found_whatever_it_costs_alone() -> None:
    """The free plan is as fast as data parallelism by constraint, although its many reductions cost more alone."""

    def planned(**options: Any) -> Plan:
        with torch.device("meta"):
            model = nn.Sequential(*(Block(128, 512) for _ in range(6)))
            rows = torch.empty(1024, 128)
        return autoshard.plan(
            model, CLUSTER.mesh({"data": 2}), example_inputs=(rows,), optimizer="adamw", precision=None,
            loss_fn=lambda out: out.square().mean(), **options,
        )  # fmt: skip

    free, data = planned(), planned(constraints={"input:*": P("data"), "[0-9]*": P()})
    assert free.predicted.step_time_s <= data.predicted.step_time_s
    assert free.objective > 1.1 * free.lower_bound  # alone its collectives cost more than another plan's


def _gathered(cluster: Cluster) -> tuple[PlanningProblem, list[int]]:
    """The planning problem of a perceptron on four ranks, and a choice that gathers its parameters."""
    rows = torch.empty(4096, 16, device="meta")
    planning = planning_problem(trace(Perceptron(), (rows, rows)), Mesh({"data": 4}), cluster, PlanOptions())
    found = solve_baselines(planning, Search(), {})["fully sharded data parallel"]
    assert found is not None
    return planning, list(found.choice)


def _h100s(bytes_per_s: float) -> Cluster:
    speed = {"network_bytes_per_s_per_device": bytes_per_s}
    return Cluster.of("h100_sxm", 4, devices_per_node=2, network="roce_v2", **speed)


def test_gpus_hide_what_they_can() -> None:
    """CPUs hide no communication. GPUs hide nearly none on a slow network, and up to 80 % on a fast network."""
    assert hidden_part(*_gathered(Cluster("cpu_laptop", nodes=1, devices_per_node=4))) == 0.0
    slow, fast = (hidden_part(*_gathered(_h100s(speed))) for speed in (1e3, 1e15))
    assert 0 < slow < 0.01
    assert slow < fast <= 0.8


def test_a_larger_bucket_costs_less_whichever_is_priced_first() -> None:
    """A choice costs less in larger buckets, which share their latency, in either order of pricing."""
    for sizes in ((2**10, MIB), (MIB, 2**10)):
        planning, choice = _gathered(_h100s(25e9))
        costs = {size: in_buckets(planning, size).cost_of(choice) for size in sizes}
        assert costs[MIB] < costs[2**10]


def test_what_is_hidden_costs_that_much_less() -> None:
    """The cost in buckets falls linearly with the hidden share of the communication."""
    planning, choice = _gathered(_h100s(25e9))
    none, half, all_of_it = (in_buckets(planning, MIB, hidden).cost_of(choice) for hidden in (0.0, 0.5, 1.0))
    assert half == pytest.approx((none + all_of_it) / 2)
    assert all_of_it < none <= planning.assignment.cost_of(choice)


def test_what_hides_is_found() -> None:
    """On two nodes with large blocks, whose gathers can be hidden, the plan is no slower than a known recipe."""
    with torch.device("meta"):
        model, rows = nn.Sequential(*(Block(2048, 8192) for _ in range(3))), torch.empty(16, 1024, 2048)
    found = autoshard.plan(
        model, Cluster("a100_sxm_80gb", nodes=2).mesh(Mesh({"data": 8, "model": 2})), example_inputs=(rows,),
        optimizer="adamw", loss_fn=lambda out: out.square().mean(),
    )  # fmt: skip
    assert found.predicted.step_time_s <= min(step for step in found.baselines.values() if step is not None)
