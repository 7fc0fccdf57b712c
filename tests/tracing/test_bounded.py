"""Programs whose sizes depend on values serve all sizes if the rules can handle padding, and otherwise one size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard import Mesh
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.tracing import check_guards, trace
from passes.driver.planner import Planner
from tests.passes.greedy_plans import most_uneven_plan
from tests.tracing.running import assert_equals_eager

ROWS, WIDTH = 7, 4

Use = Callable[["Uses", Tensor, Tensor], Tensor]


class Uses(nn.Module):
    """A model whose loss uses the rows of a product that a mask selects."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.table, self.use = nn.Embedding(ROWS, WIDTH), use

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.norm, self.table):
            x = x + 0.0 * sum(parameter.sum() for parameter in layer.parameters())
        return self.use(self, self.first(x), mask)


def _experts(model: Uses, x: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for chosen, layer in ((mask, model.second), (~mask, model.norm)):
        (rows,) = torch.where(chosen)
        out = out.index_add(0, rows, layer(x[rows]).tanh())
    return out.square().mean()


def _pairs(model: Uses, x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask]
    return (rows @ model.second(rows).T).tanh().sum()


def _nested(model: Uses, x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask]
    return rows[rows.sum(1) > 0].square().sum() + rows.sum()


def _written(model: Uses, x: Tensor, mask: Tensor) -> Tensor:
    (rows,) = mask.nonzero(as_tuple=True)
    out = torch.zeros_like(x).index_put((rows,), model.second(x[rows]), accumulate=True)
    return (out * x).sum()


BOUNDED: dict[str, Use] = {
    "sum": lambda model, x, mask: model.second(x[mask]).square().sum(),
    "mean": lambda model, x, mask: model.second(x[mask]).square().mean(),
    "mean of rows": lambda model, x, mask: model.second(x[mask]).mean(0).square().sum(),
    "sum of columns, then mean": lambda model, x, mask: model.norm(x[mask]).sum(1, keepdim=True).square().mean(),
    "number of rows": lambda model, x, mask: x[mask].sum() / x[mask].shape[0] + x.sum() * x[mask].numel(),
    "elements": lambda model, x, mask: x[mask[:, None] & (x > 0)].square().sum(),
    "masked_select": lambda model, x, mask: x.masked_select(mask[:, None]).square().sum(),
    "softmax of rows": lambda model, x, mask: (x[mask].softmax(-1) * x[mask]).sum(),
    "cross-entropy": lambda model, x, mask: F.cross_entropy(model.second(x[mask]), torch.arange(ROWS)[mask] % WIDTH),
    "embedding": lambda model, x, mask: (model.table(torch.arange(ROWS)[mask]) * x[mask]).sum(),
    "experts": _experts,
    "pairs": _pairs,
    "nested": _nested,
    "written": _written,
}
"""Uses of rows whose number is not known, in one program."""

GUARDED: dict[str, Use] = {
    "concatenated": lambda model, x, mask: torch.cat([x[mask], x[~mask]]).square().sum(),
    "in order": lambda model, x, mask: x[mask].cumsum(0).square().sum(),
    "softmax over rows": lambda model, x, mask: (x[mask].softmax(0) * x[mask]).sum(),
    "variance": lambda model, x, mask: x[mask].var(0).sum(),
    "the last row": lambda model, x, mask: x[mask][-1].square().sum(),
    "turned round": lambda model, x, mask: (x[mask].flip(0) * x[mask]).sum(),
    "merged with another dim": lambda model, x, mask: x[mask].T.reshape(-1).cumsum(0).sum(),
    "a tensor of the number": lambda model, x, mask: (x * torch.full((WIDTH,), x[mask].shape[0])).sum() + x[mask].sum(),
    "squeezed": lambda model, x, mask: x[mask.nonzero().squeeze()].square().sum(),
    "beside rows of a known number": lambda model, x, mask: (x[mask] * x[:3] if len(x[mask]) < 4 else x[mask]).sum(),
    "returned": lambda model, x, mask: x[mask],
}
"""Uses of bounded rows that need the exact number, with one program for each number."""


def _inputs(count: int, *, nan: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs of which `count` rows are selected. The first row is never selected, and may be NaN."""
    generator = torch.Generator().manual_seed(count)
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[1 + torch.randperm(ROWS - 1, generator=generator)[:count]] = True
    x = torch.randn(ROWS, WIDTH, generator=generator)
    if nan:
        x[0] = float("nan")
    return x, mask


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BOUNDED)
def test_one_program_for_all_numbers_of_rows(name: str) -> None:
    """Loss and gradients equal eager's for no row, some rows, and all rows but the first, in one program without
    guards."""
    model = Uses(BOUNDED[name])
    program = trace(model, _inputs(3))
    assert not program.guards
    for count in (3, 1, 0, 6):
        if count or ("mean" not in name and name not in ("number of rows", "cross-entropy")):
            assert_equals_eager(program, model, _inputs(count))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", BOUNDED)
def test_values_are_not_needed(name: str) -> None:
    """A mask on the meta device gives the same program as a mask with values."""
    x, mask = _inputs(3)
    assert trace(Uses(BOUNDED[name]), (x, mask.to("meta"))).text() == trace(Uses(BOUNDED[name]), (x, mask)).text()


@pytest.mark.parametrize("name", [name for name in BOUNDED if name not in ("number of rows", "experts", "written")])
def test_rows_that_are_not_selected_are_not_seen(name: str) -> None:
    """A NaN in the first, unselected row, which padding repeats, reaches neither loss nor gradients.

    In the eager model the NaN reaches only the gradient of the row's own source.
    """

    class FromOutside(Uses):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.use(self, x, mask)

    model = FromOutside(BOUNDED[name])
    program = trace(model, _inputs(3))
    assert not program.guards
    for count in (2, 5):
        assert_equals_eager(program, model, _inputs(count, nan=True))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BOUNDED)
def test_split_rows_equal_one_device(name: str) -> None:
    """With bounded dims split unevenly over two ranks, loss and gradient equal one device's for each number of rows."""
    model, mesh = Uses(BOUNDED[name]), Mesh({"data": 2})
    plan = most_uneven_plan(trace(model, _inputs(3)), mesh)
    sharded = ShardedModule(model, SimulatorEngine(mesh), Planner(fixed=plan))
    for count in (3, 1, 6):
        x, mask = _inputs(count)
        expected = torch.autograd.grad(model(x, mask), model.first.weight)[0]
        model.first.weight.grad = None
        loss = sharded(x, mask)
        loss.backward()
        torch.testing.assert_close(loss, model(x, mask), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.first.weight.grad, expected, rtol=1e-4, atol=1e-5)
    assert len(sharded.programs) == 1


@pytest.mark.parametrize("name", GUARDED)
def test_what_needs_the_number_is_guarded(name: str) -> None:
    """A program that needs the number of rows serves the example's number alone."""
    model = Uses(GUARDED[name])
    program = trace(model, _inputs(3))
    assert_equals_eager(program, model, _inputs(3))
    assert check_guards(program, _inputs(3), dict(model.named_parameters()))
    assert not check_guards(program, _inputs(4), dict(model.named_parameters()))


def test_a_comparison_is_guarded_and_the_size_is_not() -> None:
    """When Python compares the number of rows, each outcome of the comparison has a program, which serves all
    numbers with that outcome."""

    def use(model: Uses, x: Tensor, mask: Tensor) -> Tensor:
        rows = x[mask]
        return rows.square().mean() if rows.shape[0] > 2 else rows.abs().sum()

    model = Uses(use)
    state = dict(model.named_parameters())
    for few, many, example in ((1, 4, 3), (6, 2, 1)):
        program = trace(model, _inputs(example))
        assert [guard.value for guard in program.guards] == [True]
        assert check_guards(program, _inputs(many), state)
        assert not check_guards(program, _inputs(few), state)
        assert_equals_eager(program, model, _inputs(many))


def test_no_rows_are_selected_from_none() -> None:
    """A mask without elements is indexed without an operator of unknown size, and the program equals eager."""
    model, args = Uses(lambda model, x, mask: x[:0][mask[:0]].sum() + x.sum()), _inputs(3)
    program = trace(model, args)
    assert torch.ops.aten.nonzero.default not in {node.target for node in program.graph.nodes}
    assert_equals_eager(program, model, args)
