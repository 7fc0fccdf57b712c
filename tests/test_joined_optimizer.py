"""Several optimizers joined as one, with the groups and the state of all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autoshard import JoinedOptimizer, Mesh, NotAvailableError, TraceError, compile


def _joined(layer: nn.Linear) -> JoinedOptimizer:
    return JoinedOptimizer(torch.optim.Muon([layer.weight]), torch.optim.AdamW([layer.bias], lr=0.1))


def _step(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    layer(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_is_that_of_each() -> None:
    """A joined step equals a step of each optimizer, and a schedule of one part changes the joined group."""
    layer = nn.Linear(4, 4)
    other = copy.deepcopy(layer)
    joined = _joined(layer)
    muon, adamw = torch.optim.Muon([other.weight]), torch.optim.AdamW([other.bias], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(joined.optimizers[1], 1)
    for _ in range(2):
        _step(layer, joined)
        other(torch.ones(3, 4)).square().mean().backward()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        schedule.step()
        adamw.param_groups[0]["lr"] *= 0.1
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)
    assert joined.param_groups[1]["lr"] == pytest.approx(0.001)
    assert joined.state.keys() == {layer.weight, layer.bias}


def test_state_dicts_go_on() -> None:
    """A state dict loaded into another joined optimizer, or copied with it, continues with equal updates."""
    layer = nn.Linear(4, 4)
    joined = _joined(layer)
    _step(layer, joined)
    other = copy.deepcopy(layer)
    loaded = _joined(other)
    loaded.load_state_dict(copy.deepcopy(joined.state_dict()))
    third, copied = copy.deepcopy((other, loaded))
    for model, optimizer in ((layer, joined), (other, loaded), (third, copied)):
        _step(model, optimizer)
        assert torch.equal(layer.weight, model.weight)
        assert torch.equal(layer.bias, model.bias)
        assert all(item.state is optimizer.state for item in optimizer.optimizers)
        groups = [group for item in optimizer.optimizers for group in item.param_groups]
        assert all(one is two for one, two in zip(groups, optimizer.param_groups, strict=True))


def test_groups_are_added_to_a_part() -> None:
    """A group that one part gets after some steps is trained by compiled steps. Without a part, adding a group is
    refused."""
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        layer = nn.Linear(4, 4)
        joined = JoinedOptimizer(torch.optim.Muon([layer.weight]), kind([layer.bias]))
        last = nn.Parameter(torch.ones(4))
        model = _Scaled(layer, last)
        step = compile(model, Mesh({"data": 2}), optimizer=joined, verify=False)
        step(torch.ones(2, 4))
        assert torch.equal(last, torch.ones(4))
        with pytest.raises(NotAvailableError, match="does not say which optimizer"):
            joined.add_param_group({"params": [last]})
        joined.optimizers[1].add_param_group({"params": [last], "lr": 0.5})
        step(torch.ones(2, 4))
        assert not torch.isclose(last, torch.ones(4)).any()
        assert [group["lr"] for group in joined.state_dict()["param_groups"]][2] == 0.5


class _Scaled(nn.Module):
    def __init__(self, layer: nn.Linear, last: nn.Parameter) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.last).square().mean()


def test_joined_optimizers_may_be_joined() -> None:
    """The parts of a joined optimizer become parts of the new one."""
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    joined = JoinedOptimizer(_joined(layer), torch.optim.SGD(other.parameters()))
    assert [type(item).__name__ for item in joined.optimizers] == ["Muon", "AdamW", "SGD"]


def test_wrong_parts_are_refused() -> None:
    """Parts that share a parameter, mix named and plain parameters, or are no optimizers are refused, and so is no
    part."""
    layer = nn.Linear(4, 4)
    with pytest.raises(TraceError, match="Give each parameter to one of the optimizers"):
        JoinedOptimizer(torch.optim.Muon([layer.weight]), torch.optim.AdamW(layer.parameters()))
    with pytest.raises(TraceError, match=r"Make all optimizers with named_parameters\(\)"):
        JoinedOptimizer(torch.optim.Muon([("weight", layer.weight)]), torch.optim.AdamW([layer.bias]))
    with pytest.raises(TraceError, match="JoinedOptimizer: 'adamw' is no torch optimizer"):
        JoinedOptimizer(torch.optim.Muon([layer.weight]), "adamw")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="JoinedOptimizer: None is no torch optimizer"):
        JoinedOptimizer()
