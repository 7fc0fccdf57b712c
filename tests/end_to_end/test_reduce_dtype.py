"""With `reduce_dtype="bf16"`, gradients travel between ranks in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autoshard
from autoshard import Mesh, NotAvailableError, P
from tests.end_to_end.training import plain_step, whole
from tests.models import Perceptron
from tests.runtime.processes import on_processes

MESH = Mesh({"data": 4})
network = partial(Perceptron, 64, 256, activation=F.gelu)
LAYOUTS = {
    "data": {"*.weight": P(), "*.bias": P(), "input:*": P("data")},
    "ZeRO-3": {"*.weight": P("data"), "*.bias": P(), "input:*": P("data")},
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4096, 64, generator=generator), torch.randn(4096, 64, generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(*batch()).backward()
    found: list[tuple[str, Any]] = list(model.named_parameters())
    return {name: whole(item.grad) for name, item in found}


def narrow(mesh: Any, layout: str, **options: Any) -> Any:
    constraints = LAYOUTS[layout]
    return autoshard.compile(
        network(),
        mesh,
        constraints=constraints,
        options=autoshard.Options(reduce_dtype="bf16"),
        **options,
    )


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Check that float32 gradients differ from the wanted ones by bfloat16 rounding, and by more than float32's."""
    for name, want in wanted.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], want, rtol=2**-7, atol=2**-8 * float(want.abs().max()))
    assert any(not torch.allclose(found[name], want, rtol=1e-5, atol=1e-7) for name, want in wanted.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_device_to_their_rounding(layout: str) -> None:
    """On simulated ranks, gradients equal one device but for bfloat16 rounding, in both layouts."""
    compare(gradients(narrow(MESH, layout)), gradients(network()))


def test_training_follows_one_device() -> None:
    """The losses of five training steps with two micro-batches equal one device to 0.1 %."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wanted = [plain_step(model, optimizer, *batch()).item() for _ in range(5)]
    other = network()
    options: dict[str, Any] = {"micro_batches": 2, "options": autoshard.Options(reduce_dtype="bf16")}
    step = autoshard.compile(
        other, MESH, optimizer=torch.optim.SGD(other.parameters(), lr=0.5), constraints=LAYOUTS["data"], **options
    )
    assert [step(*batch()).item() for _ in range(5)] == pytest.approx(wanted, rel=1e-3)


def check_bits_are_the_simulators() -> None:
    """Gradients on four processes equal those on simulated ranks bit by bit."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    for layout in LAYOUTS:
        found, simulated = gradients(narrow(mesh, layout)), gradients(narrow(MESH, layout))
        for name, item in found.items():
            torch.testing.assert_close(item, simulated[name], rtol=0, atol=0)


test_processes_compute_what_the_simulator_does = on_processes({"bits": check_bits_are_the_simulators}, slow=["bits"])


@pytest.mark.parametrize("given", ["f16", "bfloat16", torch.bfloat16, 16])
def test_other_types_are_refused(given: Any) -> None:
    """Other values of `reduce_dtype` raise an error that says why float16 is not allowed."""
    with pytest.raises(NotAvailableError, match="In 'f16' small gradients would vanish"):
        autoshard.compile(network(), MESH, options=autoshard.Options(reduce_dtype=given))


@pytest.mark.parametrize("prepare", [nn.Module.bfloat16, nn.Module.double, lambda model: model.requires_grad_(False)])
def test_a_model_without_gradients_of_float32_is_refused(prepare: Callable[[nn.Module], nn.Module]) -> None:
    """`reduce_dtype` raises for a model of another type and for a frozen model, which have no float32 gradients."""
    with pytest.raises(NotAvailableError, match="is for gradients of float32 parameters, and this model trains"):
        autoshard.compile(prepare(network()), MESH, options=autoshard.Options(reduce_dtype="bf16"))
