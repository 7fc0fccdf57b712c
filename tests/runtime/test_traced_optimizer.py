"""`describe_update` describes the update of torch's optimizers, by groups of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard import JoinedOptimizer
from autoshard.errors import TraceError
from autoshard.kernels.optimizers import ADAM_HYPER, SGD_HYPER
from autoshard.runtime.traced_optimizer import describe_update, names_of, why_untraced


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Slower(torch.optim.SGD):
    """An optimizer class of a user's own, derived from torch's."""


def test_which_optimizers_are_traced() -> None:
    """SGD, Adam, AdamW and Muon are traced, joined too; for others the reason names optimizer and cause."""
    model = _model()
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        assert why_untraced(kind(model.parameters(), lr=0.1)) is None
    muon = torch.optim.Muon([layer.weight for layer in model])
    adam = torch.optim.Adam([layer.bias for layer in model])
    assert why_untraced(JoinedOptimizer(muon, adam)) is None
    narrow = torch.optim.Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))], nesterov=False)
    assert "normalizes the momentum of bfloat16 parameters" in str(why_untraced(narrow))
    assert "RMSprop is none of" in str(why_untraced(JoinedOptimizer(torch.optim.RMSprop([model[0].bias]), muon)))
    assert str(why_untraced(Slower(model.parameters(), lr=0.1))).startswith("Slower is none of SGD, Adam, AdamW")
    assert "differentiable=True" in str(why_untraced(torch.optim.Adam(model.parameters(), differentiable=True)))
    complex_ = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert "complex parameters" in str(why_untraced(torch.optim.Adam([complex_])))


def test_groups_have_their_own_rules() -> None:
    """A group with momentum and a group without have different update operators, in the optimizer's order."""
    model = _model()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    update = describe_update(optimizer, names_of(model.named_parameters()), 2.0)
    assert [group.parameters for group in update.groups] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]
    assert [group.rule.operator for group in update.groups] == ["momentum_update", "sgd_update"]
    assert update.groups[0].rule.flags == (True, False)
    assert update.groups[0].rule.hyper == SGD_HYPER
    assert update.max_grad_norm == 2.0


def test_parameters_of_unequal_age_are_told_apart() -> None:
    """Parameters of one group with different step counts are described as two groups."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    names = names_of(model.named_parameters())
    assert len(describe_update(optimizer, names, None).groups) == 1
    model[0].weight.grad = torch.ones(2, 2)
    optimizer.step()
    found = describe_update(optimizer, names, None)
    assert [group.parameters for group in found.groups] == [("0.weight",), ("0.bias", "1.weight", "1.bias")]
    assert {group.rule.operator for group in found.groups} == {"amsgrad_update"}
    assert found.groups[0].rule.hyper == ADAM_HYPER
    assert found.groups[0].rule.state == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def test_adam_may_decouple_weight_decay() -> None:
    """Adam with `decoupled_weight_decay=True` has the flags of AdamW, and `maximize` is a flag too."""
    model = _model()
    names = names_of(model.named_parameters())
    flags = [
        describe_update(optimizer, names, None).groups[0].rule.flags
        for optimizer in (
            torch.optim.Adam(model.parameters()),
            torch.optim.Adam(model.parameters(), decoupled_weight_decay=True),
            torch.optim.AdamW(model.parameters(), maximize=True),
        )
    ]
    assert flags == [(False, False), (True, False), (True, True)]


def test_parameters_of_another_model_are_refused() -> None:
    """An optimizer over another model's parameters raises an error with their number."""
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    with pytest.raises(TraceError, match="holds 4 parameters in group 0 that are not the model's"):
        describe_update(optimizer, names_of(_model().named_parameters()), None)
