"""Tensors with value-dependent shapes are traced at the example's size under a guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import TraceError
from autoshard.ir.program import InputKind
from autoshard.tracing import check_guards, trace

Select = Callable[[Tensor, Tensor], Tensor]


def _where(x: Tensor, mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask)
    return x[rows, columns]


def _unique(x: Tensor, mask: Tensor) -> Tensor:
    numbers, inverse, counts = torch.unique(mask.sum(1), return_inverse=True, return_counts=True)
    return x[inverse] * numbers[inverse].view(-1, 1) + counts.sum() + numbers.shape[0]


def _of_runs(x: Tensor, runs: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
    weights = (runs.reshape(len(counts), -1).sum(1) + 1) * counts
    return x * weights[inverse].view(-1, 1) + counts.shape[0]


SELECTIONS: dict[str, Select] = {
    "index by a mask": lambda x, mask: x[mask],
    "index by a mask of rows": lambda x, mask: x[mask[:, 0]],
    "nonzero": lambda x, mask: x.flatten()[mask.flatten().nonzero().squeeze(1)],
    "where": _where,
    "masked_select": lambda x, mask: torch.masked_select(x, mask),
    "masked_select, broadcast": lambda x, mask: torch.masked_select(x, mask[:, :1]),
    "unique": _unique,
    "unique_consecutive": lambda x, mask: _of_runs(x, *torch.unique_consecutive(mask.sum(1), True, True)),
    "unique_consecutive, rows": lambda x, mask: _of_runs(x, *torch.unique_consecutive(mask[:, :2], True, True, 0)),
    "unique, columns": lambda x, mask: _of_runs(x.T, *torch.unique(mask.T[:, :2].long(), True, True, True, 0)),
    "bincount": lambda x, mask: x.mean() * torch.bincount(mask.sum(1)).float(),
    "bincount of bytes": lambda x, mask: x.mean() * torch.bincount(mask.sum(1).byte() + 251).float(),
    "bincount, weighted": lambda x, mask: x.mean() * torch.bincount(mask.sum(1), x[:, 0].detach().double(), 4).float(),
    "repeat_interleave": lambda x, mask: x.repeat_interleave(mask.sum(1), dim=0),
}


class Selects(nn.Module):
    """A model whose loss sums the weighted elements that a mask selects."""

    def __init__(self, select: Select) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.select = select

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        chosen = self.select(x * self.weight, mask)
        return (chosen * torch.arange(1.0, chosen.shape[0] + 1).view(-1, *[1] * (chosen.dim() - 1))).sum()


def _inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator), torch.rand(4, 6, generator=generator) < 0.5


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_sharded_selection_equals_one_device(name: str) -> None:
    """Loss and gradient of each selection equal one device's for masks of different counts."""
    model = Selects(SELECTIONS[name])
    sharded = autoshard.compile(model, autoshard.Mesh({"data": 2}))
    for seed in range(3):
        x, mask = _inputs(seed)
        expected = torch.autograd.grad(model(x, mask), model.weight)[0]
        model.weight.grad = None
        loss = sharded(x, mask)
        loss.backward()
        torch.testing.assert_close(loss, model(x, mask))
        torch.testing.assert_close(model.weight.grad, expected)


def test_the_count_is_guarded() -> None:
    """A mask that selects as many elements as the example's fits the program, and a mask that selects more does not."""
    x, mask = _inputs()
    program = trace(Selects(SELECTIONS["index by a mask"]), (x, mask), {})
    assert [slot.kind for slot in program.inputs_of(InputKind.INPUT)] == [InputKind.INPUT] * 2
    assert check_guards(program, (x, mask.flip(0)))
    assert not check_guards(program, (x, torch.ones_like(mask)))


def test_without_values_the_call_is_refused() -> None:
    """A selection by a mask on the meta device is refused, because its count is unknown."""
    x, mask = _inputs()
    with pytest.raises(TraceError, match="shape depends on values"):
        trace(Selects(SELECTIONS["where"]), (x, mask.to("meta")), {})


def test_text_and_lists_of_scalars_are_read() -> None:
    """A scalar that an f-string reads, and a scalar in a list for `torch.tensor`, are guarded."""
    model, x = Reads(), torch.arange(4.0)
    program = trace(model, (x,), {})
    assert len(program.guards) == 2
    assert check_guards(program, (x,))
    assert not check_guards(program, (x + 1,))


class Reads(nn.Module):
    """A model whose input selects a layer by name, and gives a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer_{index}": nn.Linear(4, 4) for index in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.tensor([x[0].long()])
        return (self.layers[f"layer_{x[2].long()}"](x) + shift).sum()
