"""Programs for Inductor contain only operators that Inductor can compile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard import Mesh
from autoshard.kernels.fusible import traced_through
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from tests.models import MODELS
from tests.passes.blocks import h100s

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
MESH = Mesh({"data": 1})


Tensors = tuple[torch.Tensor, ...]


def handed(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[set[str], Tensors, Tensors]:
    """The operators of the graph that a compiler gets, the compiled graph's results, and the original
    graph's results."""
    found: set[str] = set()

    def compiler(graph: fx.GraphModule, inputs: object) -> object:
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch.compiler.disable(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(traced_through(graph_module), backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    with torch.no_grad():
        return found, compiled(*inputs), graph_module(*inputs)


def examples(graph_module: fx.GraphModule) -> list[torch.Tensor]:
    """Random inputs of a graph, in the shapes and dtypes of its placeholders."""
    generator = torch.Generator().manual_seed(0)
    values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    drawn = [torch.randint(0, 2, value.shape, generator=generator) for value in values]
    return [item / 2 if value.is_floating_point() else item for item, value in zip(drawn, values, strict=True)]


@pytest.mark.parametrize(
    "name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow), pytest.param("bert", marks=pytest.mark.slow)]
)
def test_nothing_of_ours_is_left(name: str) -> None:
    """No operator of autoshard reaches the compiler, attention is torch's flash kernel, and results do not change,
    forward and backward."""
    model, batch = MODELS[name]()
    program = trace(model, (), {key: item for key, item in batch.items() if key != "attention_mask"})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    phased = lower_program(program, plan, h100s(MESH), LoweringOptions(saves_least=True))
    inputs = examples(phased.forward)
    for phase, kernel in ((phased.forward, f"{FLASH}.default"), (phased.backward, f"{FLASH}_backward.default")):
        operators, results, expected = handed(phase, inputs)
        assert kernel in operators
        assert not [name for name in operators if name.startswith("autoshard")]
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        inputs = [*expected[len(phased.forward_outputs) :], torch.ones(())]


def test_dropout_is_drawn_where_it_is_used() -> None:
    """A program with dropout has no operator of autoshard for the compiler, and its result equals the original graph's
    bit for bit."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    program = trace(model, (torch.randn(2, 4),))
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    forward = lower_program(program, plan, h100s(MESH), LoweringOptions(saves_least=True)).forward
    operators, results, expected = handed(forward, examples(forward))
    assert not [name for name in operators if name.startswith("autoshard")]
    assert torch.equal(results[0], expected[0])
