"""Programs before the overlap passes, and a check that changed programs compute the same bits."""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from tests.passes.blocks import blocks_program, h100s
from tests.passes.families import FAMILIES
from tests.passes.layouts import LAYOUTS, MESH, lowered_under, plan_of, planning_of, planning_on, program_of
from tests.passes.mutant_runs import run_of
from tests.passes.mutants import Place


@cache
def plain(family: str, layout: str) -> PhasedProgram:
    """Return the program of a family under a layout, with every wait directly behind its collective."""
    return lowered_under(LAYOUTS[layout], program_of(family, layout), planning_of(family, layout), with_overlap=False)


@cache
def plain_on(mesh: Mesh, layout: str, family: str, reduce_dtype: torch.dtype | None = None) -> PhasedProgram:
    """Return `plain` on another mesh, with float32 gradients sent in a narrower type if given."""
    program = program_of(family, layout)
    planning = planning_of(family, layout) if mesh == MESH else planning_on(mesh, program)
    return lowered_under(LAYOUTS[layout], program, planning, with_overlap=False, reduce_dtype=reduce_dtype)


@cache
def of_one_batch(family: str, layout: str) -> PhasedProgram:
    """Return `plain` for a step of one batch, whose forward and backward gather parameters."""
    return lower_program(
        program_of(family, layout), plan_of(family, layout), options=LoweringOptions(with_overlap=False)
    )


@cache
def fully_sharded() -> PhasedProgram:
    """Lowered blocks on four ranks that each hold a quarter of every weight, without overlap."""
    mesh, constraints = Mesh({"x": 4}), {"*.up.weight": P("x"), "*.down.weight": P("x"), "input:0": P("x")}
    program = blocks_program(batch=256, length=512, hidden=1024, count=3)
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(constraints=constraints, with_baselines=False))
    return lower_program(program, plan, h100s(mesh), LoweringOptions(with_overlap=False))


@cache
def gathered_blocks() -> PhasedProgram:
    """Lowered blocks on four ranks that each hold a quarter of every weight.

    The batch is so large that weights are gathered rather than activations.
    """
    mesh = Mesh({"x": 4})
    constraints = {"*.weight": P("x"), "*.bias": P("x"), "input:0": P("x")}
    program = blocks_program(batch=2**18, length=1, hidden=1024, count=6)
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(constraints=constraints, with_baselines=False))
    return lower_program(program, plan, h100s(mesh), LoweringOptions(with_overlap=False))


def calls(graph_module: fx.GraphModule) -> list[str]:
    """List the calls of a phase, in order."""
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def differ(family: str, layout: str, made: PhasedProgram) -> list[str]:
    """Return the results of a step of two micro-batches whose bits differ from the plain program."""
    torch.manual_seed(0)
    _, examples = FAMILIES[family]()
    phased = plain(family, layout)
    run = run_of(phased, examples)
    pairs = zip(*(run.numbers(Place.PHASES, item, phased.lowered.traced) for item in (phased, made)), strict=True)
    return [f"{index}: {one} is {other}" for index, (one, other) in enumerate(pairs) if not _is_same(one, other)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and torch.equal(one.isnan(), other.isnan())
