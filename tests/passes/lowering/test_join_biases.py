"""A matrix product and the addition of its bias become one `addmm` if nothing else reads the product."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

import autoshard
from autoshard import Mesh, P, VerificationError
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import PhasedProgram
from passes.verification.verify_phases import verify_phases

aten = torch.ops.aten


class Layers(nn.Module):
    """Two linear layers with biases. Another call reads the product of the first layer before its bias is added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 2048), nn.Linear(2048, 4)

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.first.weight.t()
        return self.second(torch.tanh(product + self.first.bias) * product).square().mean()


def _phased(
    mesh: Mesh, constraints: dict[str, P] | None = None, backend: str = "auto"
) -> tuple[PhasedProgram, Tensor, Tensor]:
    """The program of a call, its loss, and the loss of one device."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 8)
    expected = model(x).detach()
    sharded = autoshard.compile(model, mesh, constraints=constraints, backend=backend)
    loss = sharded(x).detach()
    return sharded.program.phased, loss, expected  # type: ignore[union-attr]


def _counts(graph_module: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in graph_module.graph.nodes)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_bias_goes_along(backend: str) -> None:
    """The second layer becomes one `addmm`.

    The first layer, whose product is read twice, stays, and the loss is the model's.
    """
    phased, loss, expected = _phased(Mesh({"data": 1}), backend=backend)
    counts = _counts(phased.forward)
    assert (counts[aten.addmm.default], counts[aten.mm.default]) == (1, 1)
    torch.testing.assert_close(loss, expected)


def test_a_product_that_is_summed_first_stays() -> None:
    """If each rank has a partial sum of a product, the bias is added to the total, so that no `addmm` is made."""
    phased, loss, expected = _phased(
        Mesh({"model": 2}), {"first.weight": P("model"), "second.weight": P(None, "model")}
    )
    assert _counts(phased.forward)[aten.addmm.default] == 0
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("wrong", [(1, 2, 0), (0, 1, 1)])
def test_wrong_joins_do_not_verify(wrong: tuple[int, int, int]) -> None:
    """An `addmm` with exchanged operands is refused by `verify_phases`."""
    phased, *_ = _phased(Mesh({"data": 1}))
    verify_phases(phased)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in phased.forward.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
        if node.target is aten.addmm.default:
            copies[node].args = tuple(copies[node].args[index] for index in wrong)
    with pytest.raises(VerificationError):
        verify_phases(replace(phased, forward=lazy_module(phased.forward, graph)))
