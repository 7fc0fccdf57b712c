"""`AUTOSHARD_VERIFY=each-pass` names the pass that changed the results of its program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

import autoshard
from autoshard import Mesh, NotAvailableError, VerificationError
from autoshard.cluster import local_cluster
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.lower import Lower
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.split_phases import SplitPhases
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_fan_outs import InsertFanOuts
from passes.verification.verify_passes import verify_pass
from tests.models import Perceptron
from tests.passes.mutants import Place, mutate
from tests.passes.mutations import copy_of, drop_collective, scale_value

MESH = Mesh({"x": 2})
layers = partial(Perceptron, activation=torch.relu)


def compile_layers() -> Any:
    """Compile a model with split weights and inputs, whose plan has collectives."""
    constraints = {"*weight": autoshard.P("x"), "input:0": autoshard.P("x")}
    return autoshard.compile(layers(), MESH, example_inputs=(torch.ones(4, 8),), constraints=constraints)


def scaled(program: Any) -> Any:
    """The program with one scaled value."""
    module = copy_of(program.graph_module)
    assert scale_value(module.graph, Random(3), MESH)
    return replace(program, graph_module=module)


def without_collective(lowered: Any) -> Any:
    """The lowered program without one of its collectives."""
    module = copy_of(lowered.graph_module)
    assert drop_collective(module.graph, Random(0), MESH)
    return replace(lowered, graph_module=module)


def with_kept_exchanged(phased: Any) -> Any:
    """The phased program with two exchanged values between its phases."""
    return next(
        found.phased for seed in range(9) if (found := mutate(phased, Place.PHASES, "exchange_kept", Random(seed)))
    )


def with_result_scaled(fused: Any) -> Any:
    """The program with kernels, with its first result doubled."""
    module = copy_of(fused.graph_module)
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        doubled = module.graph.call_function(torch.ops.aten.mul.Scalar, (output.args[0][0], 2))
    doubled.meta = dict(output.args[0][0].meta)
    output.args = ((doubled, *output.args[0][1:]),)
    return replace(fused, graph_module=torch.fx.GraphModule(module, module.graph))


FAULTS = {
    "canonicalize": (Canonicalize, scaled),
    "insert_fan_outs": (InsertFanOuts, scaled),
    "lower": (Lower, without_collective),
    "split_phases": (SplitPhases, with_kept_exchanged),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_pass_that_goes_wrong_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error about a pass that returns a wrong program names this pass."""
    kind, spoil = FAULTS[name]
    right = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, program: spoil(right(self, program)))
    monkeypatch.setenv("AUTOSHARD_VERIFY", "each-pass")
    with pytest.raises(VerificationError, match=rf"^passes\.\w+\.{name} changed the results of its program"):
        compile_layers()


def test_kernels_that_go_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel pass that doubles a result is named, and right Triton kernels are accepted."""
    program = trace(layers(), (torch.ones(4, 8),), {})
    plan = plan_program(program, MESH, local_cluster(MESH), PlanOptions())
    lower_program(program, plan, options=LoweringOptions(with_kernels=True, on_pass=verify_pass))
    right = FuseKernels.__call__
    monkeypatch.setattr(FuseKernels, "__call__", lambda self, lowered: with_result_scaled(right(self, lowered)))
    with pytest.raises(VerificationError, match=r"^passes\.lowering\.fuse_kernels changed the results"):
        lower_program(program, plan, options=LoweringOptions(with_kernels=True, on_pass=verify_pass))


def test_passes_that_are_right_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering checks each of its passes in order, and accepts right passes."""
    seen: list[str] = []

    def watched(rewrite: Any, before: Any, after: Any) -> None:
        seen.append(type(rewrite).__name__)
        verify_pass(rewrite, before, after)

    program = trace(layers(), (torch.ones(4, 8),), {})
    plan = plan_program(program, MESH, local_cluster(MESH), PlanOptions())
    lower_program(program, plan, options=LoweringOptions(on_pass=watched))
    assert seen == [
        "Canonicalize",
        "JoinGelu",
        "InsertFanOuts",
        "InsertRecompute",
        "Lower",
        "SplitPhases",
        "Hoist",
        "JoinBiases",
        "SelectKernels",
        "NameCommunicators",
        "KeepRows",
        "WaitLate",
        "StartSoon",
        "StartAhead",
        "BucketCollectives",
        "StartAhead",
        "WaitInTurn",
    ]
    monkeypatch.setenv("AUTOSHARD_VERIFY", "each-pass")
    compile_layers()


def test_an_unknown_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown value of `AUTOSHARD_VERIFY` is refused, and the error names the known value."""
    monkeypatch.setenv("AUTOSHARD_VERIFY", "always")
    with pytest.raises(NotAvailableError, match="AUTOSHARD_VERIFY='always' is unknown; set it to 'each-pass'"):
        compile_layers()
