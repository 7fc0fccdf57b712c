"""Assignment through a mask equals one device, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.ir.program import Program
from autoshard.tracing import trace

Assign = Callable[["Assigns", Tensor, Tensor], Tensor]
MESHES = (autoshard.Mesh({"data": 2}), autoshard.Mesh({"data": 2, "model": 2}))


class Assigns(nn.Module):
    """A loss of a tensor [2, 6, 4] after an assignment, whose values come from the parameters `token`
    [4] and `rows`."""

    def __init__(self, assign: Assign) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.rows = nn.Linear(4, 4), nn.Linear(4, 4)
        self.token = nn.Parameter(torch.randn(4))
        self.assign = assign

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.assign(self, self.hidden(x), mask)
        return (h * torch.linspace(0.5, 1.5, h.numel()).view_as(h)).square().mean() + self.token.square().sum()


def _item(h: Tensor, index: Any, value: Tensor | float) -> Tensor:
    h = h.clone()
    h[index] = value
    return h


def _all_rows(model: Assigns, h: Tensor, mask: Tensor) -> Tensor:
    return model.rows(h)[mask]


ONE_VALUE: dict[str, Assign] = {
    "a number": lambda model, h, mask: _item(h, mask, 2),
    "infinity, then a number": lambda model, h, mask: _item(_item(h, mask, float("-inf")), mask, 0.5),
    "a token": lambda model, h, mask: _item(h, mask, model.token),
    "a token [1, 1, 4]": lambda model, h, mask: _item(h, mask, model.token[None, None]),
    "a scalar": lambda model, h, mask: _item(h, mask, model.token[0]),
    "of all dims": lambda model, h, mask: _item(h, mask[..., None] & (torch.arange(4) > 1), model.token[0]),
    "behind a slice": lambda model, h, mask: _item(h, (slice(None), mask[0]), model.token),
    "behind an ellipsis": lambda model, h, mask: _item(h, (..., torch.arange(4) > 1), model.token[:1]),
    "beside a number": lambda model, h, mask: _item(h, (1, mask[1]), model.token),
    "beside None": lambda model, h, mask: _item(h, (None, mask), model.token),
    "in front of a slice": lambda model, h, mask: _item(h, (mask, slice(1, 3)), model.token[:2]),
    "one value for each sample": lambda model, h, mask: _item(h, (slice(None), mask[0]), h[:, :1]),
    "of bytes": lambda model, h, mask: _item(h, mask[:, None].expand(2, 1, 6)[:, 0].bool(), model.token),
    "index_put": lambda model, h, mask: torch.index_put(h, (mask,), model.token),
}
"""A mask of the input, and values that are equal at all places, so that no value is read."""

ROWS: dict[str, Assign] = {
    "rows": lambda model, h, mask: _item(h, mask, _all_rows(model, h, mask)),
    "rows [mask, :]": lambda model, h, mask: _item(h, (mask, slice(None)), h[mask, :] + model.rows(h[mask])),
    "rows of a slice": lambda model, h, mask: _item(h, (mask, slice(1, 3)), _all_rows(model, h, mask)[:, 1:3]),
    "two masks": lambda model, h, mask: _item(h, (mask[:, 0], mask[:1].any(0)), model.token),
    "a mask made inside": lambda model, h, mask: _item(h, mask.long() * 3 == 3, _all_rows(model, h, mask)),
    "index_put of rows": lambda model, h, mask: torch.index_put(h, (mask,), _all_rows(model, h, mask)),
    "index_put_ added": lambda model, h, mask: h.clone().index_put_((mask,), _all_rows(model, h, mask), True),
    "masked_scatter": lambda model, h, mask: h.masked_scatter(mask[..., None], _all_rows(model, h, mask)),
    "added in place": lambda model, h, mask: _add_in_place(h, mask, _all_rows(model, h, mask)),
}
"""Values with a row for each place of the mask."""


def _add_in_place(h: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    h = h.clone()
    h[mask] += rows
    return h


def _inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 6, generator=generator) < 0.5
    mask[0, :2] = True
    mask[0, 2] = mask[1, 0] = False
    return torch.randn(2, 6, 4, generator=generator), mask


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*ONE_VALUE, *ROWS])
def test_assignment_through_a_mask_equals_one_device(name: str) -> None:
    """Loss and all gradients equal one device's on each mesh, for masks of different values."""
    for mesh in MESHES:
        model = Assigns((ONE_VALUE | ROWS)[name])
        sharded = autoshard.compile(model, mesh)
        for seed in range(2):
            inputs = _inputs(seed)
            expected = model(*inputs)
            gradients = torch.autograd.grad(expected, [*model.parameters()], allow_unused=True, materialize_grads=True)
            model.zero_grad()
            loss = sharded(*inputs)
            loss.backward()
            torch.testing.assert_close(loss, expected)
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            torch.testing.assert_close(found, list(gradients))


@pytest.mark.parametrize("name", ONE_VALUE)
def test_one_value_for_all_places_reads_no_mask(name: str) -> None:
    """An assignment of one value to all places has no guard and no `index_put`, also for a mask on the meta device."""
    x, mask = _inputs(0)
    program = trace(Assigns(ONE_VALUE[name]), (x.to("meta"), mask.to("meta")), {})
    assert not program.guards
    assert not _calls(program, "index_put")


def test_a_mask_of_another_shape_is_refused_as_by_torch() -> None:
    """A mask that does not broadcast is refused."""
    x, mask = _inputs(0)
    with pytest.raises(Exception, match="mask"):
        trace(Assigns(ONE_VALUE["a token"]), (x, mask[:, :1]), {})


def test_the_tensor_itself_changes() -> None:
    """An assignment through a transposed view becomes a `where` of the tensor."""
    program = trace(Assigns(_by_view), _inputs(0), {})
    assert _calls(program, "where")


def _by_view(model: Assigns, h: Tensor, mask: Tensor) -> Tensor:
    h = h.clone()
    h.transpose(0, 1)[mask.T] = model.token
    assert h.requires_grad
    return h


def _calls(program: Program, name: str) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if f".{name}." in str(node.target)]
