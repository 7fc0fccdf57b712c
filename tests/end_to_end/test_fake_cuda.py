"""A compiled training step on CUDA waits for no value and moves nothing between devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import P, PartitionSpec
from tests.end_to_end.fake_cuda import DeviceUse, fake_world
from tests.end_to_end.layouts import FULLY_SHARDED, TENSOR
from tests.models import bert, gpt2, llama, mixtral, vit

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")

Made = tuple[nn.Module, dict[str, Any]]


def made(build: Callable[..., Made], **options: Any) -> Made:
    """Return a model and its batch without padding; floating-point inputs are bfloat16."""
    model, batch = build(**options)
    batch = {name: item for name, item in batch.items() if name != "attention_mask"}
    return model, {name: item.bfloat16() if item.is_floating_point() else item for name, item in batch.items()}


MODELS: dict[str, Callable[[], Made]] = {
    **{item.__name__: partial(made, item) for item in (gpt2, llama, bert, mixtral)},
    "vit": partial(made, vit, size=16),
}
DATA: dict[str, PartitionSpec] = {"input:*": P("data")}
SHARDED: dict[str, dict[str, PartitionSpec]] = {
    **FULLY_SHARDED,
    "vit": {"*_proj.weight": P("data", "model"), "*.fc[12].weight": P("data", "model")},
    "mixtral": {"model.embed_tokens.weight": P(("data", "model")), "*_proj*": P("data", "model")},
}
TENSOR_PARALLEL: dict[str, dict[str, PartitionSpec]] = {
    **TENSOR,
    "vit": {
        "*.[qkv]_proj.weight": P("model"),
        "*.o_proj.weight": P(None, "model"),
        "*.fc1.weight": P("model"),
        "*.fc2.weight": P(None, "model"),
    },
    "mixtral": {
        "*.self_attn.[qkv]_proj.weight": P("model"),
        "*.self_attn.o_proj.weight": P(None, "model"),
        "*.experts.gate_up_proj": P(None, "model"),
        "*.experts.down_proj": P(None, None, "model"),
    },
}
ON_TWO = {"data": {"data": 2, "model": 1}, "sharded": {"data": 2, "model": 1}, "tensor": {"data": 1, "model": 2}}
ON_FOUR = {"data": 2, "model": 2}
BATCH = 4096
"""Batch size so large that every plan splits the work; fake tensors take no memory."""


def _constraints(name: str, layout: str) -> dict[str, PartitionSpec]:
    parameters = {"data": {}, "sharded": SHARDED[name], "tensor": TENSOR_PARALLEL[name]}[layout]
    return {**({} if layout == "tensor" else DATA), **parameters}


def _use(name: str, sizes: dict[str, int], layout: str, made: Made | None = None, **options: Any) -> DeviceUse:
    """Return the device use of a later training step of a model on a mesh of the given axis sizes."""
    model, batch = made or MODELS[name]()
    batch = {key: torch.empty((BATCH, *item.shape[1:]), dtype=item.dtype) for key, item in batch.items()}
    with fake_world(sizes) as world:
        return world.use_of(world.step(model, constraints=_constraints(name, layout), **options), batch)


def _assert_free(use: DeviceUse) -> None:
    assert not use.waits
    assert not use.moves
    assert not use.large_on_cpu
    assert any(name.startswith("_c10d_functional") for name in use.operators)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ON_TWO)
def test_a_step_waits_for_nothing(layout: str) -> None:
    """A step of GPT-2 on two ranks never waits for a device, and runs torch's fused kernels."""
    use = _use("gpt2", ON_TWO[layout], layout)
    _assert_free(use)
    flash = "aten._scaled_dot_product_flash_attention"
    assert {flash, f"{flash}_backward", "aten._fused_adamw_", "aten.native_layer_norm"} <= use.operators.keys()
    assert not use.operators.keys() & {"aten.bmm", "aten._softmax"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{"optimizer": torch.optim.AdamW, "max_grad_norm": 1.0}, {"optimizer": torch.optim.SGD}]
)
def test_no_seed_norm_or_count_of_steps_is_read(options: dict[str, Any]) -> None:
    """Dropout's seed, the gradient norm and the step count are never read from the device."""
    _assert_free(_use("gpt2", ON_TWO["data"], "data", gpt2(dropout=0.1), **options))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, ON_FOUR], ids=["2", "4"])
@pytest.mark.parametrize("layout", ON_TWO)
@pytest.mark.parametrize("name", MODELS)
def test_no_model_waits(name: str, layout: str, sizes: dict[str, int] | None) -> None:
    """A step of each model under each layout, on two and four ranks, never waits for a device."""
    use = _use(name, sizes or ON_TWO[layout], layout)
    _assert_free(use)
    assert "aten._scaled_dot_product_flash_attention_backward" in use.operators


def test_what_waits_is_seen() -> None:
    """`DeviceUse` counts a read value as a wait, copies between devices as moves, and a large CPU tensor."""
    with fake_world({"data": 2}) as world:
        x = world.on_cuda(torch.zeros(()))
        with world.fakes, DeviceUse() as use:
            torch.ops.aten._local_scalar_dense(x)
            x.cpu()
            torch.zeros(128).to(x.device)
    assert (len(use.waits), len(use.moves), len(use.large_on_cpu)) == (1, 2, 1)
