"""Models of transformers on four Gloo processes train as on one device."""

from __future__ import annotations

from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Mesh, P
from tests.benchmarks.live_memory import peak_bytes_of
from tests.end_to_end.layouts import layouts
from tests.end_to_end.training import assert_close, assert_equal, train, whole
from tests.models import MODELS, Inputs, odd
from tests.runtime.dispatch import RecordDispatch
from tests.runtime.processes import on_processes

SQUARE = Mesh({"data": 2, "model": 2})


@cache
def compiled(name: str, layout: str, layers: int) -> tuple[autoshard.ShardedModule, Inputs]:
    """Return a compiled model and its inputs; cached, so that several checks of a process share it."""
    model, inputs = MODELS[name](layers)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return autoshard.compile(model, mesh, constraints=layouts(name)[layout]), inputs


def check_training(name: str, layout: str, layers: int = 1) -> None:
    """Loss, gradients, and parameters after three steps of AdamW equal one device."""
    sharded, inputs = compiled(name, layout, layers)
    found = train(sharded, inputs)
    plain, _ = MODELS[name](layers)
    assert_equal(found, train(plain, inputs))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())


def check_dropout() -> None:
    """With the same seed, gradients through dropout equal those on a mesh of one rank."""
    results = []
    for mesh, constraints in (
        (Mesh({"data": 1, "model": 1}), {}),
        (SQUARE, {"input:*": P("data"), "0.weight": P("model")}),
    ):
        sharded = autoshard.compile(nn.Sequential(*small(), nn.Dropout(0.2)), mesh, constraints=constraints)
        torch.manual_seed(7)
        sharded(batch()).square().sum().backward()
        results.append([whole(item.grad) for item in sharded.parameters()])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, "gradient")


def check_memory() -> None:
    """The measured peak of a step is within 5 % of the plan's; a second backward needs `retain_graph`."""
    sharded, inputs = compiled("gpt2", "data and tensor", 1)
    sharded.zero_grad()
    sharded(**inputs)["loss"].backward()
    expected = {name: whole(item.grad) for name, item in sharded.named_parameters()}
    held = [*sharded.parameters(), *sharded.buffers(), *inputs.values()]

    def step() -> None:
        sharded.zero_grad()
        sharded(**inputs)["loss"].backward()

    predicted = sharded.plan.predicted.peak_memory_bytes
    assert abs(peak_bytes_of(step, held) / predicted - 1) < 0.05
    sharded.zero_grad()
    loss = sharded(**inputs)["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    for name, item in sharded.named_parameters():
        assert_close(whole(item.grad), 2 * expected[name], name)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def check_a_new_shape_gathers_nothing() -> None:
    """Compiling for another batch size gathers no parameter, and the output equals one device."""
    sharded = autoshard.compile(small(), SQUARE, constraints={"0.weight": P("model"), "2.weight": P("data")})
    x = batch()
    sharded(x)
    with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("gathered")):
        sharded.compile_for(torch.cat([x, x]))
    assert_close(sharded(torch.cat([x, x]))[: len(x)], small()(x), "output")


def check_uneven() -> None:
    """Vocabulary, batch and heads that four ranks do not divide train as one device, in torch's chunk sizes."""
    model, inputs = odd()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
    constraints = {"transformer.wte.weight": P("model"), "transformer.h.*.weight": P("model"), "input:*": P("model")}
    sharded = autoshard.compile(model, mesh, constraints=constraints)
    found = train(sharded, inputs)
    plain, _ = odd()
    assert_equal(found, train(plain, inputs))
    weight = sharded.get_parameter("transformer.wte.weight")
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] == (11 if dist.get_rank() == 3 else 12)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))


def batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def check_only_local_operators_and_collectives_run() -> None:
    """Forward and backward call no operator on DTensors, except autograd's detach of gradients."""
    sharded, inputs = compiled("gpt2", "data and tensor", 1)
    sharded.zero_grad()
    with RecordDispatch() as recorded:
        sharded(**inputs)["loss"].backward()
    assert any("_c10d_functional" in name for name in recorded.local)
    assert set(recorded.on_dtensors) <= {"aten.detach.default"}, recorded.on_dtensors


CHECKS = {
    "gpt2": partial(check_training, "gpt2", "chosen"),
    "gpt2 data and tensor": partial(check_training, "gpt2", "data and tensor"),
    "llama data and tensor": partial(check_training, "llama", "data and tensor", layers=2),
    "bert data and tensor": partial(check_training, "bert", "data and tensor"),
    "llama fully sharded": partial(check_training, "llama", "fully sharded"),
    "uneven": check_uneven,
    "a new shape": check_a_new_shape_gathers_nothing,
    "memory": check_memory,
    "dropout": check_dropout,
    "no dtensor dispatch": check_only_local_operators_and_collectives_run,
}

_SLOW = ["gpt2 data and tensor", "bert data and tensor", "llama fully sharded", "uneven"]
test_on_four_processes = on_processes(CHECKS, deadline_s=500, slow=_SLOW, sample=5)
