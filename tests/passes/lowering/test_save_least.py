"""For a compiler with fusion, the backward recomputes pointwise values, so that the forward saves fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard import Mesh, P
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.request import CompiledProgram
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.executable import Executable
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.save_least import computed_again
from passes.verification.verify_phases import verify_phases
from tests.models import MODELS
from tests.passes.blocks import h100s

MESH = Mesh({"data": 2})


def phases(name: str) -> tuple[Any, Any, PhasedProgram, PhasedProgram]:
    """Return a model, its batch, and its phases before and after the pass."""
    model, batch = MODELS[name](2)
    program = trace(model, (), batch)
    options = PlanOptions(constraints={"input:*": P("data")}, with_baselines=False)
    plan = plan_program(program, MESH, h100s(MESH), options)
    found = [lower_program(program, plan, h100s(MESH), LoweringOptions(saves_least=least)) for least in (False, True)]
    return model, batch, found[0], found[1]


def saved_bytes(phased: PhasedProgram) -> int:
    """Bytes that the forward saves for the backward, without the inputs of the program."""
    nodes = {node.name: node for node in phased.lowered.graph_module.graph.nodes}
    values = [nodes[name].meta["val"] for name in phased.saved if nodes[name].op != "placeholder"]
    return sum(value.numel() * value.element_size() for value in values)


@pytest.mark.parametrize(
    ("name", "most"), [("gpt2", 0.85), ("llama", 0.7), pytest.param("bert", 0.85, marks=pytest.mark.slow)]
)
def test_less_is_saved(name: str, most: float) -> None:
    """The pass reduces the saved bytes to at most the share `most`, and every gradient keeps its bits."""
    model, batch, whole, least = phases(name)
    verify_phases(least)
    assert saved_bytes(least) <= most * saved_bytes(whole)
    first, second = (_gradients(model, batch, phased) for phased in (whole, least))
    for key, gradient in first.items():
        torch.testing.assert_close(second[key], gradient, rtol=0.0, atol=0.0)


def _gradients(model: Any, batch: Any, phased: PhasedProgram) -> dict[str, torch.Tensor]:
    executable = Executable(CompiledProgram(phased), SimulatorEngine(MESH, torch.device("cpu")))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = list(batch.values())
    tensors = [held[s.slot.name] if s.slot.name in held else inputs.pop(0) for s in executable.inputs]
    with torch.no_grad():
        _, saved = executable.run_forward(tensors)
        ones = {slot.slot.name: torch.ones(slot.shape) for slot in executable.tangents}
        return executable.run_backward(saved, ones, held)


def test_products_and_reductions_are_not_computed_again() -> None:
    """A pointwise chain is recomputed from the matrix product at its start, and the product is not recomputed."""
    graph = torch.fx.Graph()
    aten = torch.ops.aten
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    wide = graph.call_function(aten.exp.default, (graph.call_function(aten.sin.default, (product,)),))
    total = graph.call_function(aten.sum.dim_IntList, (wide, [1]))
    shifted = graph.call_function(aten.add.Tensor, (total, 1.0))
    graph.output((shifted,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4) if node in (total, shifted) else torch.empty(4, 4)
    nodes = list(graph.nodes)[:-1]
    assert computed_again(nodes, set(nodes), {wide}) == {wide, wide.args[0]}
    assert computed_again(nodes, set(nodes), {product}) == set()
