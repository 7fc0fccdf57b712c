"""Plans of reshards, compared with the shortest path over all specs."""

import heapq
import math
from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import InvalidSpecError
from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import (
    ReshardKind,
    ReshardStep,
    StepCost,
    bytes_sent,
    plan_reshard,
    reshard_costs,
)
from autoshard.ir.spec import P, PartitionSpec, Reduction
from autoshard.ir.spec_graph import State, moves_from, state_of
from autoshard.testing.strategies import meshes, shapes, specs

LATENCY_S, BANDWIDTH_BYTES_PER_S = 1e-5, 1e9


def seconds(step: ReshardStep) -> float:
    """Seconds of a step, with latency. Local steps and groups of one rank take none."""
    if step.kind in (ReshardKind.SLICE, ReshardKind.MAKE_PARTIAL) or step.axis_size == 1:
        return 0.0
    return LATENCY_S * step.axis_size + bytes_sent(step) / BANDWIDTH_BYTES_PER_S


def price_plan(steps: Sequence[ReshardStep], cost: StepCost) -> float:
    """The sum of the prices of `steps`."""
    return sum(map(cost, steps), 0.0)


def brute_force(
    source: PartitionSpec, target: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, cost: StepCost
) -> float:
    """The price of the cheapest path by Dijkstra over all specs, with the reductions of the two specs."""
    reductions = sorted({reduction for spec in (source, target) for _, reduction in spec.partial})
    start, goal = state_of(source, len(shape)), state_of(target, len(shape))
    order = count()
    queue: list[tuple[float, int, State]] = [(0.0, next(order), start)]
    done: set[State] = set()
    while queue:
        price, _, state = heapq.heappop(queue)
        if state == goal:
            return price
        if state in done:
            continue
        done.add(state)
        before = PartitionSpec(*state[0], partial=dict(state[1]))
        for move, reached in moves_from(state, mesh, reductions):
            after = PartitionSpec(*reached[0], partial=dict(reached[1]))
            sizes = [4 * math.prod(spec.local_shape(shape, mesh)) for spec in (before, after)]
            size = mesh.axis_size(move.axis)
            step = ReshardStep(move.kind, move.axis, size, move.dim, move.to_dim, move.reduction, before, after, *sizes)
            heapq.heappush(queue, (price + cost(step), next(order), reached))
    raise AssertionError("every spec is reached from every other")


@given(st.data(), st.sampled_from([bytes_sent, seconds]))
def test_plans_are_shortest_paths(data: st.DataObject, cost: StepCost) -> None:
    """No sequence of steps is cheaper than the plan, priced in bytes or in seconds."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source, target = data.draw(specs(mesh, len(shape))), data.draw(specs(mesh, len(shape)))
    steps = plan_reshard(source, target, shape, mesh, cost=cost)
    assert price_plan(steps, cost) == pytest.approx(brute_force(source, target, shape, mesh, cost))


@given(st.data())
def test_steps_join_source_and_target(data: st.DataObject) -> None:
    """Each step starts at the spec where the previous step ends, and has the bytes of both specs."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source, target = data.draw(specs(mesh, len(shape))), data.draw(specs(mesh, len(shape)))
    steps = plan_reshard(source, target, shape, mesh, itemsize=2)
    ends = [source, *(step.target for step in steps)]
    assert ends[-1] == target
    assert [step.source for step in steps] == ends[:-1]
    assert len(set(ends)) == len(ends)
    for step, (before, after) in zip(steps, pairwise(ends), strict=True):
        assert step.bytes_before == 2 * math.prod(before.local_shape(shape, mesh))
        assert step.bytes_after == 2 * math.prod(after.local_shape(shape, mesh))


@given(st.data(), st.sampled_from([bytes_sent, seconds]))
def test_reshard_costs_equal_the_plans(data: st.DataObject, cost: StepCost) -> None:
    """The matrix of `reshard_costs` holds the price of each plan."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    drawn = st.lists(specs(mesh, len(shape)), min_size=1, max_size=4)
    sources, targets = data.draw(drawn), data.draw(drawn)
    matrix = reshard_costs(sources, targets, shape, mesh, 4, cost)
    plans = [[plan_reshard(s, t, shape, mesh, cost=cost) for t in targets] for s in sources]
    np.testing.assert_allclose(matrix, [[price_plan(steps, cost) for steps in row] for row in plans])


@given(st.data())
def test_equal_specs_need_no_steps(data: st.DataObject) -> None:
    """A reshard to the same spec has no steps."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    spec = data.draw(specs(mesh, len(shape)))
    assert plan_reshard(spec, spec, shape, mesh) == ()


MESH = Mesh({"data": 2, "model": 4})


SLICES = ["slice(data, to_dim=0)", "slice(model, to_dim=0)"]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (P("data"), P(), ["all_gather(data, dim=0)"]),
        (P(), P("data"), ["slice(data, to_dim=0)"]),
        (P("data"), P(None, "data"), ["all_to_all(data, dim=0, to_dim=1)"]),
        (P(partial={"model": "sum"}), P(), ["all_reduce(model, reduction=sum)"]),
        (P(partial={"model": "max"}), P("model"), ["reduce_scatter(model, to_dim=0, reduction=max)"]),
        (P(), P(partial={"model": "min"}), ["make_partial(model, reduction=min)"]),
        (
            P(partial={"model": "sum"}),
            P(partial={"model": "max"}),
            ["all_reduce(model, reduction=sum)", "make_partial(model, reduction=max)"],
        ),
        (P("model"), P(("data", "model")), ["all_gather(model, dim=0)", *SLICES]),
    ],
)
def test_examples(source: PartitionSpec, target: PartitionSpec, expected: list[str]) -> None:
    """Common reshards become the expected collectives."""
    assert [str(step) for step in plan_reshard(source, target, (8, 8), MESH, cost=seconds)] == expected


def test_a_large_value_steps_aside_to_let_a_major_axis_in() -> None:
    """To split a dim by a major axis, the minor axis moves to another dim and back, which sends fewer bytes than a
    gather."""
    steps = plan_reshard(P("model"), P(("data", "model")), (1024, 1024), MESH, cost=seconds)
    assert [str(step) for step in steps] == [
        "all_to_all(model, dim=0, to_dim=1)",
        "slice(data, to_dim=0)",
        "all_to_all(model, dim=1, to_dim=0)",
    ]


def test_an_idle_axis_helps_where_it_pays() -> None:
    """A large value is sliced over an idle axis before an all-reduce, and gathered afterwards."""
    mesh = Mesh({"data": 4, "model": 4})
    steps = plan_reshard(P(partial={"data": "sum"}), P(), (1024, 1024), mesh)
    kinds = [(step.kind, step.axis) for step in steps]
    assert kinds == [
        (ReshardKind.SLICE, "model"),
        (ReshardKind.ALL_REDUCE, "data"),
        (ReshardKind.ALL_GATHER, "model"),
    ]


def test_groups_of_one_send_nothing() -> None:
    """Steps over an axis of one rank send less than a byte."""
    mesh = Mesh({"data": 1})
    for source, target in [
        (P("data"), P()),
        (P(partial={"data": "sum"}), P("data")),
        (P("data"), P(None, "data")),
    ]:
        assert price_plan(plan_reshard(source, target, (8, 8), mesh), bytes_sent) < 1


def test_spec_that_does_not_fit() -> None:
    """A spec with an axis that the mesh lacks, or with more dims than the shape, is refused."""
    with pytest.raises(InvalidSpecError, match="names mesh axis 'stage'"):
        plan_reshard(P(), P("stage"), (8,), MESH)
    with pytest.raises(InvalidSpecError, match="splits 2 dims"):
        reshard_costs([P(None, "data")], [P()], (8,), MESH)


def test_mixed_reductions() -> None:
    """A spec that is partial in a sum and in a maximum is refused, because the two do not commute."""
    mixed = P(partial={"data": "sum", "model": "max"})
    with pytest.raises(InvalidSpecError, match="they do not commute"):
        plan_reshard(mixed, P(), (8,), MESH)


@given(st.data())
def test_no_step_mixes_reductions(data: st.DataObject) -> None:
    """No step of a plan leaves a value partial in two reductions."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source, target = data.draw(specs(mesh, len(shape))), data.draw(specs(mesh, len(shape)))
    for step in plan_reshard(source, target, shape, mesh, cost=seconds):
        assert len({reduction for _, reduction in step.target.partial}) <= 1


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_prices_are_checked(price: float) -> None:
    """A price that is negative, infinite or NaN is refused."""
    with pytest.raises(ValueError, match="a price is finite and not negative"):
        plan_reshard(P(), P("data"), (8,), MESH, cost=lambda step: price)


def test_empty_matrix() -> None:
    """The matrix of no sources and one target has the shape (0, 1)."""
    assert reshard_costs([], [P()], (8,), MESH).shape == (0, 1)


def test_reductions_are_all_known() -> None:
    """Each reduction can be resharded to each other reduction at a finite price."""
    every = [P(partial={"data": reduction}) for reduction in Reduction]
    assert np.isfinite(reshard_costs(every, every, (), MESH)).all()
