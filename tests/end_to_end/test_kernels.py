"""With kernels in Triton's interpreter, models have the loss and gradients of models without kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import autoshard
from autoshard import Mesh
from autoshard.kernels.generated.define import generated_kernel
from tests.models import gpt2, llama
from tests.passes.families import FAMILIES
from tests.passes.launches import fused_calls


class Mixture(nn.Module):
    """A residual block with an RMS norm and a router to the best two of three SwiGLU experts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.router = nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 3, bias=False)
        self.gates, self.ups = (nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(3)) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.enter(x)
        h = self.norm(x)
        scores = torch.softmax(self.router(h), dim=-1)
        scores = torch.where(scores > scores.amin(-1, keepdim=True), scores, 0.0)
        for index, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            x = x + scores[..., index : index + 1] * down(F.silu(gate(h)) * up(h))
        return x.square().mean()


def mixtral() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return a `Mixture` and its inputs."""
    torch.manual_seed(0)
    return Mixture(), (torch.randn(4, 6, 8),)


def vit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a vision transformer and its inputs."""
    return _family("vit")


def encoder_decoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a transformer with an encoder and a decoder, and its inputs."""
    return _family("encoder-decoder")


def _family(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.float(), tuple(item.float() if item.is_floating_point() else item for item in inputs)


EXPECTED: dict[Callable[[], tuple[nn.Module, Any]], set[str]] = {
    gpt2: {
        "bias_gelu",
        "bias_gelu_backward",
        "bias_add_layer_norm",
        "add_layer_norm_backward",
    },
    llama: {"gated", "gated_backward", "add_rms_norm", "add_rms_norm_backward", "rotary"},
    mixtral: {"gated", "gated_backward", "bias_add_rms_norm"},
    vit: {"bias_gelu"},
    encoder_decoder: {"bias_gelu"},
}


def _is_made(node: fx.Node) -> bool:
    """Return whether a node calls a generated kernel."""
    return generated_kernel(node.target) is not None


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_models_with_kernels_equal_models_without(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    """With `backend="triton"`, models call the expected kernels, and loss and gradients equal those of "auto"."""
    model, inputs = make()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    plan = autoshard.plan(model, Mesh({"x": 2}), example_inputs=inputs, precision="f32")
    losses, gradients, found = [], [], set()
    for backend in ("auto", "triton"):
        sharded = autoshard.compile(model, Mesh({"x": 2}), backend=backend, plan=plan)
        result = sharded(*args, **kwargs)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
        phased = sharded.programs[0].phased
        calls = fused_calls(phased.forward) + fused_calls(phased.backward)
        found = {name.removeprefix("autoshard.triton_").removesuffix(".default") for name in calls}
        generated = [
            node for phase in (phased.forward, phased.backward) for node in phase.graph.nodes if _is_made(node)
        ]
        assert bool(generated) == (backend == "triton")
    assert found >= EXPECTED[make]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)
