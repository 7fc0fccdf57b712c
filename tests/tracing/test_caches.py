"""Models whose code keeps tensors in a `functools.lru_cache`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MaskFormerConfig, MaskFormerModel

import autoshard


def _cached_where_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a cached one, like the positions of transformers' models."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


@functools.lru_cache
def _positions(length: int) -> Tensor:
    return torch.arange(float(length))


@_cached_where_eager
def _wrapped_positions(length: int) -> Tensor:
    return torch.arange(float(length))


class _Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Direct(_Positioned):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * _positions(x.shape[-1])).square().mean()


class Wrapped(_Positioned):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * _wrapped_positions(x.shape[-1])).square().mean()


class Method(_Positioned):
    @_cached_where_eager
    def positions(self, length: int) -> Tensor:
        return torch.arange(float(length))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.positions(x.shape[-1])).square().mean()


class Static(_Positioned):
    @staticmethod
    @functools.lru_cache
    def positions(length: int) -> Tensor:
        return torch.arange(float(length))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.positions(x.shape[-1])).square().mean()


@pytest.mark.parametrize("kind", [Direct, Wrapped, Method, Static])
@pytest.mark.parametrize("was_called", [False, True])
def test_a_cached_tensor_is_neither_kept_from_nor_for_a_trace(kind: type[nn.Module], was_called: bool) -> None:
    """It equals one device, and the user's own model computes as before."""
    model, x = kind(), torch.randn(4, 4)
    expected = model(x).item() if was_called else None
    loss = autoshard.compile(model, autoshard.Mesh({"data": 2}))(x)
    after = model(x).item()
    assert loss.item() == pytest.approx(after)
    assert expected in (None, after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_maskformer_equals_one_device() -> None:
    """Its positions are cached: outputs and gradients of a sharded call."""
    stages = [f"stage{number}" for number in range(1, 5)]
    swin = {"model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "window_size": 4}
    decoder = {"model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 8}
    config = MaskFormerConfig(
        fpn_feature_size=32,
        mask_feature_size=32,
        backbone_config={**swin, "image_size": 64, "patch_size": 2, "out_features": stages},
        decoder_config={
            **decoder, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        },
    )  # fmt: skip
    model = MaskFormerModel(config).eval()
    sharded: Any = autoshard.compile(model, autoshard.Mesh({"data": 2}), time_budget_s=2.0)
    for _ in range(2):
        images = torch.randn(4, 3, 64, 64)
        expected = model(pixel_values=images).transformer_decoder_last_hidden_state
        found = sharded(pixel_values=images).transformer_decoder_last_hidden_state
        torch.testing.assert_close(found, expected)
        gradients = []
        for output in (found, expected):
            model.zero_grad()
            output.square().mean().backward()
            named = model.named_parameters()
            gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None and p.grad.any()})
        largest = max(float(gradient.abs().max()) for gradient in gradients[1].values())
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * largest)
