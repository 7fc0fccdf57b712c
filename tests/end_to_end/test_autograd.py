"""Autograd treats a compiled call as a call on one device, checked on the simulator and on two processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autoshard
from autoshard import Mesh, P
from tests.end_to_end.training import assert_close, whole
from tests.runtime.processes import on_processes

PAIR = Mesh({"data": 2})
SPLIT = {"up.weight": P("data"), "down.weight": P(None, "data")}
"""Constraints that split parameters, so that a rank's pieces differ from the user's whole parameters."""


class Net(nn.Module):
    """Two linear layers with a layer norm and a scale, which return a loss and the scaled output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.tanh(self.norm(self.up(x)))) * self.scale
        return y.square().mean(), y


class Penalised(nn.Module):
    """A model whose loss contains the gradient of its output with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.detach().clone().requires_grad_()
        loss, y = self.net(z)
        (gradient,) = torch.autograd.grad(y.sum(), z, create_graph=True)
        return loss + gradient.square().sum()


class Detaching(nn.Module):
    """A model that returns detached outputs, an output that requires grad, its input, and perhaps a loss."""

    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.net, self.with_loss = Net(), with_loss

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, y = self.net(x)
        return (y.detach(), y, y.detach().square(), x, *([loss] if self.with_loss else []))


class Spectrum(nn.Module):
    """A module with a complex output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.net(x)[1])


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(item.grad) for name, item in model.named_parameters() if item.grad is not None}


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def compiled(model: nn.Module, **options: Any) -> autoshard.ShardedModule:
    sharded = autoshard.compile(model, PAIR, **options)
    assert isinstance(sharded, autoshard.ShardedModule)
    return sharded


def compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, name)


def beside_one_device(use: Callable[[nn.Module], Any], make: Callable[[], nn.Module] = Net, **options: Any) -> None:
    """Check that `use` returns equal values and leaves equal gradients in a plain and in a compiled model."""
    plain = make()
    sharded = compiled(make(), **options)
    expected, found = use(plain), use(sharded)
    compare(gradients(sharded), gradients(plain))
    if isinstance(expected, torch.Tensor):
        assert_close(whole(found), expected.detach(), "result")
    else:
        assert found == expected


def is_refused(loss: torch.Tensor) -> bool:
    """Return whether `loss.backward()` raises because a tensor was modified in place."""
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def check_two_backwards() -> None:
    """With `retain_graph=True`, a second backward of the loss and of another output equals one device."""

    def use(model: nn.Module) -> None:
        loss, y = model(data())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (loss + y.sum()).backward(retain_graph=True)
        y.sum().backward()

    beside_one_device(use, constraints=SPLIT)


def check_backward_of_some() -> None:
    """`backward(inputs=...)` gives gradients to the named parameters alone, as on one device."""

    def use(model: nn.Module) -> None:
        loss, _ = model(data())
        loss.backward(inputs=[model.get_parameter("up.weight"), model.get_parameter("scale")])

    beside_one_device(use, constraints=SPLIT)


def check_accumulation() -> None:
    """Gradients of several calls add up, after gradients were set to None and to zero."""

    def use(model: nn.Module) -> None:
        for step in range(4):
            model((step + 1) * data())[0].backward()
            if step == 0:
                model.zero_grad(set_to_none=False)
            elif step == 1:
                model.get_parameter("up.weight").grad = None

    beside_one_device(use, constraints=SPLIT)


def check_gradients_from_before() -> None:
    """Gradients that parameters have before compilation are kept, and the next backward adds to them."""
    plain, model = Net(), Net()
    for network in (plain, model):
        network(data())[0].backward()
    sharded = compiled(model, constraints=SPLIT)
    for network in (plain, sharded):
        network(data())[0].backward()
    compare(gradients(sharded), gradients(plain))


def check_gradient_penalty() -> None:
    """Gradients of a loss that contains gradients with respect to an input and a parameter equal one device."""

    def use(model: nn.Module) -> torch.Tensor:
        for _ in range(2):
            z = data().requires_grad_()
            loss, y = model(z)
            weight = model.get_parameter("down.weight")
            by_z, by_weight = torch.autograd.grad(y.sigmoid().sum(), (z, weight), create_graph=True)
            by_weight = by_weight.full_tensor() if isinstance(by_weight, DTensor) else by_weight
            (loss + by_z.square().sum() + by_weight.square().sum()).backward()
        return gradient_of(z)

    beside_one_device(use, constraints=SPLIT)


def check_gradient_penalty_with_loss_fn() -> None:
    """A loss computed by `loss_fn` can be differentiated twice, as on one device."""

    def use(model: nn.Module) -> torch.Tensor:
        z, target = data().requires_grad_(), torch.ones(4, 4)
        loss = model(z, target) if isinstance(model, autoshard.ShardedModule) else F.mse_loss(model(z), target)
        (gradient,) = torch.autograd.grad(loss, z, create_graph=True)
        gradient.square().sum().backward()
        return gradient_of(z)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 4))

    beside_one_device(use, make, loss_fn=F.mse_loss)


def check_third_derivative() -> None:
    """Three nested gradients of an output, and a backward through them, equal one device."""

    def use(model: nn.Module) -> torch.Tensor:
        z = data().requires_grad_()
        value = model(z)[1].sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, z, create_graph=True)
            value = gradient.square().sum()
        value.backward()
        return gradient_of(z)

    beside_one_device(use)


def check_gradient_inside_the_model() -> None:
    """A model whose forward calls `torch.autograd.grad(..., create_graph=True)` trains as on one device."""

    def use(model: nn.Module) -> torch.Tensor:
        loss = model(data())
        loss.backward()
        return loss

    beside_one_device(use, Penalised)


def check_changed_parameters() -> None:
    """After a parameter changes in place, backward raises for the same parameters as on one device."""

    def use(model: nn.Module) -> dict[str, bool]:
        refused = {}
        for name, parameter in model.named_parameters():
            loss, _ = model(data())
            with torch.no_grad():
                parameter.mul_(1.0)
            refused[name] = is_refused(loss)
            model.zero_grad()
        assert refused["down.weight"]
        assert not refused["up.weight"]
        assert not refused["down.bias"]
        return refused

    beside_one_device(use)
    beside_one_device(use, constraints=SPLIT)


def check_changed_inputs() -> None:
    """If an input changes in place after the forward, backward raises an error that names the input."""
    sharded = compiled(Net(), constraints=SPLIT)
    x = data()
    loss, _ = sharded(x)
    x.add_(1)
    with pytest.raises(autoshard.ChangedInPlaceError, match="input 'input:0' was changed in place"):
        loss.backward()


def check_hooks() -> None:
    """Hooks on parameters run as on one device, also those registered before compilation, until they are removed."""
    plain, model = Net(), Net()
    calls: dict[str, list[str]] = {"plain": [], "sharded": []}

    def register(network: nn.Module, kind: str, when: str) -> list[Any]:
        def double(gradient: torch.Tensor) -> torch.Tensor:
            calls[kind].append(f"hook {when}")
            return gradient * 2

        def clear(parameter: torch.Tensor) -> None:
            calls[kind].append(f"after {when}")
            gradient_of(parameter).mul_(3)

        handles = [network.get_parameter("up.weight").register_hook(double)]
        handles += [network.get_parameter("down.weight").register_hook(double)]
        return [*handles, network.get_parameter("down.weight").register_post_accumulate_grad_hook(clear)]

    first = {
        "plain": register(plain, "plain", "before compile"),
        "sharded": register(model, "sharded", "before compile"),
    }
    sharded = compiled(model, constraints=SPLIT)
    networks = {"plain": plain, "sharded": sharded}
    for kind, network in networks.items():
        register(network, kind, "before the first call")
        network(data())[0].backward()
        network.zero_grad()
        for handle in first[kind]:
            handle.remove()
        register(network, kind, "after it")
        network(data())[0].backward()
    assert sorted(calls["sharded"]) == sorted(calls["plain"])
    compare(gradients(sharded), gradients(plain))


def check_inference_first() -> None:
    """Training after a first call in `torch.inference_mode` equals one device."""

    def use(model: nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            made = data() * 2
            first = model(made)[1]
            assert first.is_inference()
        with torch.no_grad():
            second = model(data())[1]
        assert not second.requires_grad
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(data())[0].backward()
            optimizer.step()
        with torch.inference_mode():
            third = model(data())[1]
        return torch.stack([first, second.detach(), third]).clone()

    beside_one_device(use, constraints=SPLIT)


def check_detached_outputs() -> None:
    """Outputs require grad exactly where they do on one device, with and without a loss."""

    def use(model: nn.Module) -> list[bool]:
        return [output.requires_grad for output in model(data())]

    beside_one_device(use, make=lambda: Detaching(with_loss=True))
    beside_one_device(use, make=lambda: Detaching(with_loss=False))


class WithUnused(Net):
    """A `Net` with a layer that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def check_hooks_on_unused_parameters() -> None:
    """Hooks run only for parameters that get a gradient, in a backward from the loss or another output."""

    def use(model: nn.Module) -> list[list[str]]:
        ran: list[list[str]] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: ran[-1].append(name) if gradient.numel() else None)
        for number in (0, 1):
            ran.append([])
            model(data())[number].sum().backward()
            ran[-1].sort()
        return ran

    beside_one_device(use, make=WithUnused)


def check_complex_outputs() -> None:
    """A complex output requires grad, and its gradient reaches the parameters."""

    def use(model: nn.Module) -> bool:
        spectrum = model(data())
        spectrum.abs().sum().backward()
        return spectrum.requires_grad

    beside_one_device(use, make=Spectrum)


CHECKS = {name.removeprefix("check_"): item for name, item in globals().items() if name.startswith("check_")}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_simulator(name: str) -> None:
    """The check passes if all ranks are simulated in this process."""
    CHECKS[name]()


def test_a_call_on_other_values_of_parameters() -> None:
    """`torch.func.functional_call` computes with the given tensors and gives them gradients, from the first call on."""
    model = nn.Linear(6, 2)
    sharded, start = compiled(copy.deepcopy(model)), torch.full((2, 6), 0.5, requires_grad=True)
    for _ in range(2):
        found, expected = (
            torch.func.functional_call(item, {"weight": start * 2, "bias": torch.zeros(2)}, data()).square().mean()
            for item in (sharded, model)
        )
        assert_close(found, expected, "loss")
        assert_close(*(torch.autograd.grad(loss, start)[0] for loss in (found, expected)), "gradient")
    assert_close(sharded(data()), model(data()), "parameters of its own")


_SLOW = [
    "backward_of_some",
    "gradients_from_before",
    "gradient_penalty_with_loss_fn",
    "third_derivative",
    "changed_inputs",
]

test_on_two_processes = on_processes(CHECKS, ranks=2, deadline_s=200, slow=_SLOW, sample=4)


def test_more_than_gradients_of_gradients_is_refused_in_other_precisions() -> None:
    """In bfloat16, the first derivative works, and a backward through it raises an error that names the alternative."""
    sharded = compiled(Net(), precision="bf16")
    z = data().requires_grad_()
    (gradient,) = torch.autograd.grad(sharded(z)[0], z, create_graph=True)
    with pytest.raises(autoshard.NotAvailableError, match=r"create_graph=True.*inside the model's forward"):
        gradient.sum().backward()
