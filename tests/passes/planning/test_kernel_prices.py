"""Calls are priced within the kernels that run in place of them, and the search minimises that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recompute import RecomputedNode
from autoshard.ir.reshard import ReshardKind, plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.tracing import trace
from cost_models.compute import memory_time
from cost_models.device import device
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from passes.planning.kernel_prices import NOTHING_FUSED
from passes.planning.search import Search
from passes.prediction.predict import HOST
from passes.recomputation.recompute_problem import Again
from passes.recomputation.with_again import with_again
from passes.strategies.enumerate_strategies import Link
from passes.strategies.price import local_bytes
from tests.benchmarks.decoder import Decoder, DecoderShape
from tests.passes.blocks import problem_of

MESH = Mesh({"x": 2})
H100 = device("h100_sxm")


class Chain(nn.Module):
    """Pointwise operators behind each other, one with a parameter, and a sum over the columns at the end or none."""

    def __init__(self, columns: int, forms: Sequence[str], *, is_summed: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(columns))
        self.forms, self.is_summed = forms, is_summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for form in self.forms:
            x = x * self.scale if form == "scale" else getattr(torch, form)(x)
        return x.sum(1) if self.is_summed else x


class Shared(nn.Module):
    """Values that several calls read, and that the backward reads again; with a product in front or without."""

    def __init__(self, width: int, has_product: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.enter = nn.Linear(width, width, bias=False) if has_product else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        y = torch.tanh(x * self.scale)
        return (y * torch.exp(-x) + y).sum(-1).relu()


class Sliced(nn.Module):
    """A product of which kernels read a third each, one of them in two views of the same part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.enter(x).chunk(3, -1)
        left = torch.tanh(one * 2) @ torch.exp(two + 1).transpose(-1, -2)
        return left @ (three.relu() + three.neg())


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """Forward programs of one kernel of two to four calls."""
    rows, columns = draw(st.sampled_from([4, 64, 4096])), draw(st.sampled_from([4, 512]))
    forms = draw(st.lists(st.sampled_from(["tanh", "exp", "neg"]), min_size=1, max_size=2))
    forms.insert(draw(st.integers(0, len(forms))), "scale")
    with torch.device("meta"):
        model = Chain(columns, forms, is_summed=draw(st.booleans()))
        return trace(model, (torch.zeros(rows, columns),), {}, grad=False)


def shared_program(*, has_product: bool, rows: int = 4096, width: int = 1024) -> Program:
    """The joint program of `Shared`."""
    with torch.device("meta"):
        return trace(Shared(width, has_product), (torch.zeros(rows, width),), {})


def time_of_pieces(planning: PlanningProblem, choice: Sequence[int]) -> float:
    """Seconds of a chain's calls where each run of calls between two reshards is one kernel, and of the reshards."""
    sites, total, piece = planning.space.sites, 0.0, 0
    reads = {link.head: link for link in planning.space.links if link.operand == 0}
    pieces: dict[str, int] = {}
    for link in planning.space.links:
        source = planning.strategy(link.tail, choice).outputs[link.result]
        target = planning.strategy(link.head, choice).inputs[link.operand]
        total += float(planning.prices.reshard_table(sites[link.tail].results[0], (source,), (target,))[0, 0])
        total -= copies_taken(planning, link, source, target)
    for name, site in sites.items():
        if site.node is None or site.node.op != "call_function":
            continue
        tail = reads[name].tail
        cut = planning.strategy(tail, choice).outputs[0] != planning.strategy(name, choice).inputs[0]
        piece += cut or tail not in pieces
        pieces[name] = piece
    for _, run in groupby(pieces, pieces.__getitem__):
        names = list(run)
        moved = [(sites[names[-1]].results[0], planning.strategy(names[-1], choice).outputs[0])]
        for link in planning.space.links:
            if link.head in names and (link.tail not in names):
                spec = planning.strategy(link.head, choice).inputs[link.operand]
                moved.append((sites[link.tail].results[0], spec))
        total += H100.launch_latency_s
        total += sum(memory_time(local_bytes(value, spec, planning.space.mesh), H100) for value, spec in moved)
    return total


def copies_taken(planning: PlanningProblem, link: Link, source: PartitionSpec, target: PartitionSpec) -> float:
    """Seconds of a reshard's copies that pointwise calls on either side do along with their own work."""
    value, price = planning.space.sites[link.tail].results[0], planning.prices.step_price
    steps = plan_reshard(source, target, value.shape, MESH, itemsize=value.itemsize, cost=price)
    before, behind = (name.split("_")[0] in ("mul", "tanh", "exp", "neg") for name in (link.tail, link.head))
    if len(steps) != 1 or not (before or behind):  # of several steps they are counted as operators
        return 0.0
    (step,) = steps
    copied_s = price.parts(step)[1]
    if step.kind is ReshardKind.MAKE_PARTIAL:
        chosen_s = H100.launch_latency_s + memory_time(2 * step.bytes_before, H100)
        return copied_s * chosen_s / (chosen_s + H100.launch_latency_s)
    splits = step.kind is ReshardKind.REDUCE_SCATTER and step.to_dim == 1
    joins = step.kind is ReshardKind.SLICE or (step.kind is ReshardKind.ALL_GATHER and step.dim == 1)
    if step.kind is ReshardKind.ALL_TO_ALL:  # of two dims, so that one of both sides copies
        splits, joins = step.to_dim == 1, step.dim == 1
    return copied_s if (splits and before) or (joins and behind) else 0.0


@settings(max_examples=8)
@given(chains())
def test_every_plan_of_a_chain_costs_what_its_kernels_do_and_the_search_finds_the_cheapest(program: Program) -> None:
    """Whole or parted, at each of all choices; and the search's is the least of them to the last digit."""
    planning = problem_of(program, MESH, with_kernels=True)
    assert planning.fusion.parts
    costs = []
    for choice in product(*(range(len(cost)) for cost in planning.assignment.costs)):
        costs.append(planning.assignment.cost_of(choice))
        assert costs[-1] == pytest.approx(time_of_pieces(planning, choice), rel=1e-9)
    assert Search()(planning).cost == pytest.approx(min(costs), rel=1e-12)


def test_a_kernel_reads_no_more_of_a_value_than_its_slices() -> None:
    """Slices read a third each of a product's result, once; so its terms sum to its time, with nothing left over."""
    with torch.device("meta"):
        program = trace(Sliced(64), (torch.zeros(8, 32, 64),), {}, grad=False)
    parts = problem_of(program, MESH, with_kernels=True).fusion.parts
    assert [part.reads for part in parts.values() if part.reads] == [((0, 1.0),)] * 3
    assert not any(part.beside for part in parts.values())


def test_a_product_takes_its_bias_along_in_the_search_too() -> None:
    """With every value whole, the objective is the time that is predicted of the library's product with a bias."""
    with torch.device("meta"):
        program = trace(nn.Linear(512, 2048), (torch.zeros(1024, 512),), {}, grad=False)
    planning = problem_of(program, MESH, with_kernels=True)
    plan = _planned(planning, [0] * len(planning.members))
    assert [use.name for use in plan.predicted.kernels.uses] == ["biased_product"]
    cost = planning.assignment.cost_of([0] * len(planning.members))
    assert cost == pytest.approx(_time_without_host(plan), rel=1e-9)


def _planned(planning: PlanningProblem, choice: Sequence[int]) -> Plan:
    options = PlanOptions(with_kernels=True)
    return lowered_plan(planning, choice, 0.0, None, planning.prices.cluster, options).plan


def _time_without_host(plan: Plan) -> float:
    return plan.predicted.step_time_s - plan.predicted.breakdown.get(HOST, 0.0)


@pytest.mark.parametrize(("has_product", "splits"), [(False, False), (False, True), (True, False)])
def test_the_objective_is_what_is_predicted_with_kernels(*, has_product: bool, splits: bool) -> None:
    """The search's objective is the prediction, for whole values and for rows; the host's time is apart."""
    planning = problem_of(shared_program(has_product=has_product), MESH, with_kernels=True)
    masks = {
        planning.classes[name]: np.array([bool(item.outputs[0].axes_of(0)) is splits for item in site.strategies])
        for name, site in planning.space.sites.items()
        if splits and name in ("input_0", "tangent_0", "p_scale")
    }
    choice = Search()(planning, masks).choice if splits else [0] * len(planning.members)
    plan = _planned(planning, choice)
    assert plan.predicted.kernels.uses
    assert planning.assignment.cost_of(choice) == pytest.approx(_time_without_host(plan), rel=1e-9)


@cache
def _decoder(vocabulary: int) -> Program:
    """The joint program of a decoder's block in bfloat16, with its embedding and loss."""
    shape = DecoderShape(
        layers=1, hidden=1024, heads=8, kv_heads=8, head_size=128, ffn=4096, gated=False, vocab=vocabulary,
        sequence=1024, tied=False, learned_positions=False, norm_bias=True, bias=True, dropout=0.0,
        fused_attention=True,
    )  # fmt: skip
    with torch.device("meta"):
        tokens = torch.zeros(4, 1024, dtype=torch.int64)
        return trace(Decoder(shape).bfloat16(), (tokens, tokens), {})


def test_the_plan_of_a_decoder_costs_what_is_predicted() -> None:
    """With copies at collectives in kernels: within 0.1 %."""
    planning = problem_of(_decoder(4096), Mesh({"x": 4}), with_kernels=True)
    choice = Search()(planning).choice
    plan = lowered_plan(planning, choice, 0.0, None, planning.prices.cluster, PlanOptions(with_kernels=True)).plan
    assert planning.assignment.cost_of(choice) == pytest.approx(_time_without_host(plan), rel=1e-3)


def test_the_search_picks_what_is_fastest_with_kernels() -> None:
    """Splitting pays for operators, but not for kernels: gradients would have to be summed."""
    program = shared_program(has_product=False)
    fused, plain = (problem_of(program, MESH, with_kernels=with_kernels) for with_kernels in (True, False))
    own, others = Search()(fused).choice, Search()(plain).choice
    assert plain.assignment.cost_of(others) < plain.assignment.cost_of(own)
    assert fused.assignment.cost_of(own) < fused.assignment.cost_of(others)
    assert _planned(fused, own).predicted.step_time_s < _planned(fused, others).predicted.step_time_s


def test_what_is_recomputed_runs_in_kernels_too() -> None:
    """Clones are members as their originals are, and so are the links between them."""
    planning = problem_of(shared_program(has_product=False), MESH, with_kernels=True)
    (hub,) = (link.head for link in planning.space.links if link.tail == "tanh")
    nodes = (RecomputedNode(name, "threshold_backward", "") for name in ("mul", "tanh", hub))
    again = with_again(planning, Again(tuple(nodes))).fusion
    parts, seams = planning.fusion.parts, planning.fusion.seams
    assert again.parts == {**parts, "mul_again": parts["mul"], "tanh_again": parts["tanh"]}
    assert again.seams["mul_again", 0, "tanh_again", 0] == seams["mul", 0, "tanh", 0]
    assert again.seams.items() >= seams.items()


def test_programs_without_kernels_are_priced_as_ever() -> None:
    """A product alone is in no kernel."""
    with torch.device("meta"):
        program = trace(nn.Linear(8, 8, bias=False), (torch.zeros(4, 8),), {}, grad=False)
    assert problem_of(program, MESH, with_kernels=True).fusion == NOTHING_FUSED
