"""Formulas of a plan of specs at other sizes equal counts on the lowered program of these sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import sympy
import torch

import autoshard
from autoshard import FormulaError, P, PlanMismatchError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from autoshard.ir.reshard import ReshardStep
from autoshard.rules.attention import is_ring
from autoshard.rules.enumeration import Strategy
from autoshard.testing.decided_plans import greedy_plan
from autoshard.tracing import trace
from cost_models.hardware import Cluster
from passes.lowering.lower import Lower
from passes.lowering.lower_program import lower_program, prepare, prepare_for
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.split_phases import SplitPhases
from passes.questions.formulas import CountsOfPlan, PlanFormulas
from passes.strategies.enumerate_strategies import Site
from passes.strategies.price import StepPrice
from tests.passes.decoders import dense
from tests.passes.greedy_plans import most_recomputed_plan, most_split_plan
from tests.passes.questions import numeric_counts

MESH = Mesh({"data": 2, "model": 2})
TOKENS = torch.zeros(4, 8, dtype=torch.int64, device="meta")
REQUEST = Request(dense(3), (TOKENS, TOKENS), {}, grad=True)


def _laptop(mesh: Mesh) -> Cluster:
    return Cluster("cpu_laptop", nodes=1, devices_per_node=mesh.size)


def _traced(request: Request) -> Program:
    return trace(request.model, request.args, dict(request.kwargs), grad=request.grad)


def _formulas(request: Request, ratio: float = 2.0) -> PlanFormulas:
    return PlanFormulas(CountsOfPlan(_traced, request, _laptop, ratio))


PLAIN = LoweringOptions(with_overlap=False)


@cache
def _own_formulas() -> PlanFormulas:
    return _formulas(REQUEST)


def _program() -> Program:
    return _at(*TOKENS.shape)


@cache
def _at(batch: int, length: int) -> Program:
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return _traced(replace(REQUEST, args=(tokens, tokens)))


def _moved(plan: Plan, program: Program, mesh: Mesh) -> Plan:
    """Move a plan's specs to a program of other sizes on another mesh."""
    return replace(plan, mesh=mesh, program_digest=prepare(program).digest())


def _sent_bytes(plan: Plan, program: Program, moved: Plan) -> dict[str, float]:
    """Bytes that a program of other sizes sends, with the same reshard steps as at the plan's own sizes."""
    steps: dict[object, tuple[ReshardStep, ...]] = {}
    cost = StepPrice(_laptop(plan.mesh), plan.mesh)
    Lower(plan, cost, steps)(prepare_for(_program(), plan))
    return numeric_counts.sent_bytes(SplitPhases()(Lower(moved, cost, steps)(prepare_for(program, moved))))


@cache
def _any_plan(seed: int) -> Plan:
    return _drawn_plan(_program(), seed)


def _drawn_plan(program: Program, seed: int) -> Plan:
    """Draw a legal plan, in which each call may have any strategy but ring attention, which has no formulas."""
    random = Random(seed)
    return greedy_plan(program, MESH, lambda site, strategy: -_has_ring(site, strategy) or random.random())


def _has_ring(site: Site, strategy: Strategy) -> bool:
    return site.node is not None and is_ring(site.node.target, strategy.inputs)


def test_of_rings_there_is_no_formula() -> None:
    """A plan with ring attention has no formula for the FLOPs of a rank, but has one for the FLOPs of the model."""
    plan = replace(greedy_plan(_program(), MESH, lambda *call: float(_has_ring(*call))), formulas=_own_formulas())
    with pytest.raises(FormulaError, match="the pairing of key blocks between ranks"):
        plan.formula("rank_flops")
    assert plan.formula("step_flops")


def _value(plan: Plan, name: str, sizes: dict[str, int], **options: object) -> float:
    formula = plan.formula(name, fixed=("layers",), **options)  # type: ignore[arg-type]
    return _at_sizes(formula, sizes)


def _at_sizes(formula: sympy.Expr, sizes: dict[str, int]) -> float:
    value = formula.subs({sympy.Symbol(symbol): size for symbol, size in sizes.items()})
    assert not value.free_symbols
    return float(value)


def _check(plan: Plan, batch: int, length: int, mesh: Mesh) -> None:
    program = _at(batch, length)
    moved = _moved(plan, program, mesh)
    try:
        phased = lower_program(program, moved, _laptop(mesh), PLAIN)
    except PlanMismatchError:
        assert mesh != plan.mesh, "a plan's own mesh admits its strategies"
        return
    plan = replace(plan, formulas=_own_formulas())
    sizes = {"batch": batch, "sequence": length, **dict(mesh.axes)}
    assert _value(plan, "step_flops", sizes) == numeric_counts.flops(program.graph)
    assert _value(plan, "rank_flops", sizes) == numeric_counts.flops(phased.lowered.graph_module.graph)
    assert _value(plan, "parameters", sizes) == numeric_counts.parameters(program)
    assert _value(plan, "parameter_bytes", sizes) == numeric_counts.parameter_bytes(phased)
    assert _value(plan, "optimizer_bytes", sizes) == 2 * numeric_counts.parameter_bytes(phased)
    assert _value(plan, "gradient_bytes", sizes) == numeric_counts.gradient_bytes(phased)
    assert _value(plan, "tokens", sizes) == batch * length
    if not batch % 4 and not length % 4:  # else the lowered program keeps the padding of a reshard with what it keeps
        assert _value(plan, "activation_bytes", sizes) == numeric_counts.saved_bytes(phased)
    sent = _sent_bytes(plan, program, moved)
    for axis in mesh.axis_names:
        assert _value(plan, f"communication_bytes_{axis}", sizes) == sent.get(axis, 0)
    assert _value(plan, "communication_bytes", sizes) == sum(sent.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("batch", "length", "shape"), [(4, 8, (2, 2)), (12, 16, (2, 2)), (16, 16, (4, 2))])
def test_formulas_of_any_plan_equal_counting(seed: int, batch: int, length: int, shape: tuple[int, int]) -> None:
    """Formulas of drawn plans equal counts, at their own and larger sizes, on their own and a larger mesh."""
    _check(_any_plan(seed), batch, length, Mesh(dict(zip(MESH.axis_names, shape, strict=True))))


@pytest.mark.slow
def test_gradients_follow_their_specs_where_a_larger_mesh_needs_larger_inputs() -> None:
    """On a larger mesh, which the plan's own inputs are too small for, gradient bytes still equal the count."""
    request = replace(REQUEST, model=dense(2))
    plan = replace(_drawn_plan(_traced(request), 1), formulas=_formulas(request))
    tokens = torch.zeros(16, 16, dtype=torch.int64, device="meta")
    program, mesh = _traced(replace(request, args=(tokens, tokens))), Mesh({"data": 4, "model": 2})
    phased = lower_program(program, _moved(plan, program, mesh), _laptop(mesh), PLAIN)
    sizes = {"batch": 16, "sequence": 16, **dict(mesh.axes)}
    assert _value(plan, "gradient_bytes", sizes) == numeric_counts.gradient_bytes(phased)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("batch", "length"), [(4, 8), (6, 7), (5, 9)])
def test_formulas_are_exact_where_splits_are_uneven(batch: int, length: int) -> None:
    """For sizes that the mesh does not divide, formulas contain ceilings and equal counts."""

    def prefers(_: Site, strategy: Strategy) -> float:
        specs = (*strategy.inputs, *strategy.outputs)
        return sum(spec.dim_of("data") == 1 for spec in specs)

    plan = greedy_plan(_program(), MESH, prefers)
    _check(plan, batch, length, MESH)
    plan = replace(plan, formulas=_own_formulas())
    assert plan.formula("rank_flops", fixed=("layers",)).has(sympy.ceiling)
    sizes = {"batch": 4 * batch, "sequence": 4 * length, **dict(MESH.axes)}
    assert _value(plan, "communication_bytes", sizes, even=True) == _value(plan, "communication_bytes", sizes)


def test_the_predicted_step_uses_these_flops_and_bytes() -> None:
    """At the plan's own sizes, formulas give the prediction's ratio of HFU to MFU and its parameter memory."""
    plan = replace(most_split_plan(_program(), MESH), formulas=_own_formulas())
    sizes = {"batch": 4, "sequence": 8, **dict(MESH.axes)}
    assert plan.predicted.mfu is not None
    assert plan.predicted.hfu is not None
    ratio = _value(plan, "rank_flops", sizes) * MESH.size / _value(plan, "step_flops", sizes)
    assert float(ratio) == pytest.approx(plan.predicted.hfu / plan.predicted.mfu)
    assert _value(plan, "parameter_bytes", sizes) == plan.predicted.memory_breakdown["parameters"]


def test_axes_that_no_larger_mesh_has_are_told_apart() -> None:
    """Formulas are right on larger meshes, also for a bias of two elements that only two ranks can split."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
    constraints = {
        "0.weight": P("model", "data"),
        "0.bias": P("data"),
        "1.weight": P("data", "model"),
        "1.bias": P("model"),
    }
    given = {"example_inputs": (torch.zeros(8, 64),), "loss_fn": lambda x: x.sum(), "precision": None}
    plan = autoshard.plan(model, MESH, constraints=constraints, **given)
    mesh = Mesh({"data": 8, "model": 4})
    found = sum(4 * math.prod(item.spec.local_shape(item.shape, mesh)) for item in plan.parameters.values())
    assert _at_sizes(plan.formula("parameter_bytes"), dict(mesh.axes)) == found
    assert _at_sizes(plan.formula("gradient_bytes"), {"batch": 8, **dict(mesh.axes)}) == found


def test_layers_are_a_symbol_where_blocks_are_alike() -> None:
    """Formulas of a model of three blocks give the parameters and FLOPs of models of two and five blocks."""
    shallow = replace(most_split_plan(_program(), MESH), formulas=_own_formulas())
    for depth in (2, 5):
        program = _traced(replace(REQUEST, model=dense(depth)))
        for name, wanted in (
            ("parameters", numeric_counts.parameters(program)),
            ("step_flops", numeric_counts.flops(program.graph)),
        ):
            formula = shallow.formula(name)
            sizes = {"batch": 4, "sequence": 8, "layers": depth}
            assert _at_sizes(formula, sizes) == wanted


@pytest.mark.slow
def test_blocks_that_a_plan_treats_differently_are_refused() -> None:
    """If a plan gives equal blocks different specs, a formula needs a fixed number of layers."""
    deep = Request(dense(5), REQUEST.args, {}, grad=True)
    program = _traced(deep)
    plan = replace(most_split_plan(program, MESH), formulas=_formulas(deep, 0.0))
    slot = next(slot.node for slot in prepare(program).inputs if slot.name == "layers.2.wide.weight")
    assert plan.nodes[slot].outputs[0] != P()
    nodes = {**plan.nodes, slot: replace(plan.nodes[slot], outputs=(P(),))}
    parameter = replace(plan.parameters["layers.2.wide.weight"], spec=P())
    plan = replace(plan, nodes=nodes, parameters={**plan.parameters, "layers.2.wide.weight": parameter})
    with pytest.raises(FormulaError, match=r"does not treat all blocks alike.*fixed=\('layers',\)"):
        plan.formula("parameter_bytes")
    assert "layers" not in map(str, plan.formula("parameter_bytes", fixed=("layers",)).free_symbols)


@pytest.mark.slow
def test_what_is_recomputed_counts_once_in_a_step_and_again_on_ranks() -> None:
    """The FLOPs of ranks include recomputation, and equal the program's. The FLOPs of the model exclude it."""
    plan = most_recomputed_plan(_program(), MESH)
    phased = lower_program(_program(), plan, _laptop(MESH))
    plan, sizes = replace(plan, formulas=_own_formulas()), {"batch": 4, "sequence": 8, **dict(MESH.axes)}
    assert _value(plan, "step_flops", sizes) == numeric_counts.flops(_program().graph)
    assert _value(plan, "rank_flops", sizes) == numeric_counts.flops(phased.lowered.graph_module.graph)


class _Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_blocks_without_a_count_are_blocks_too() -> None:
    """If only the last block communicates, the bytes do not grow with the number of blocks."""
    constraints = {f"layers.{n}.weight": P("model", None) if n == 3 else P() for n in range(4)}
    given = {"example_inputs": (torch.zeros(8, 8),), "constraints": constraints, "precision": None}
    plan = autoshard.plan(_Stack(), Mesh({"model": 2}), **given)
    formula = plan.formula("communication_bytes")
    assert formula == plan.formula("communication_bytes", fixed=("layers",)) != 0
