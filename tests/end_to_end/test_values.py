"""Models whose Python branches depend on values of parameters or of activations equal one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Mesh
from tests.end_to_end.training import assert_close, plain_step, whole
from tests.runtime.processes import on_processes

PAIR = Mesh({"data": 2})


class Branches(nn.Module):
    """A model that branches on the sign of the sum of its first layer's output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.up(x))
        if hidden.sum() > 0:
            return self.down(hidden).square().mean()
        return self.down(hidden.tanh()).abs().mean()


class Experts(nn.Module):
    """A mixture that gathers the rows of each expert, and adds the results back.

    Args:
        skips: leave out experts without rows, by a Python branch.
        hit: loop over the experts with rows, as transformers' models do.
    """

    def __init__(self, *, skips: bool = False, hit: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.skips, self.hit = nn.Linear(8, 3, bias=False), skips, hit
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number in self._numbers(chosen):
            tokens, place = torch.where(chosen == number)
            if self.skips and tokens.numel() == 0:
                continue
            out = out.index_add(0, tokens, self.experts[number](rows[tokens]) * weights[tokens, place, None])
        return (rows + out).square().mean()

    def _numbers(self, chosen: Tensor) -> list[int]:
        if not self.hit:
            return list(range(3))
        counts = nn.functional.one_hot(chosen, 3).sum((0, 1))
        return [int(number[0]) for number in counts.greater(0).nonzero()]


def batches(count: int, *shape: int) -> list[Tensor]:
    """Return drawn batches of one shape."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def train(model: nn.Module, data: Sequence[Tensor]) -> list[Tensor]:
    """Train by SGD; return the loss of each step, and then the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [plain_step(model, optimizer, x) for x in data]
    return [whole(tensor) for tensor in (*losses, *model.parameters())]


def assert_all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that each tensor is close to the one at the same place."""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(mine, theirs, f"value {number}")


def check_a_branch_that_flips() -> None:
    """If steps take both branches, training equals one device, and each branch is compiled once."""
    data = batches(8, 4, 8)
    sharded: Any = autoshard.compile(Branches(), PAIR)
    assert_all_close(train(sharded, data), train(Branches(), data))
    assert len(sharded.programs) == 2


def check_a_traced_step() -> None:
    """A traced training step takes the branch of the current parameters, as one device does."""
    data, model, reference = batches(8, 4, 8), Branches(), Branches()
    step: Any = autoshard.compile(model, PAIR, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert step.is_traced
    losses = [step(x) for x in data]
    assert_all_close([*losses, *(whole(p) for p in step.sharded.parameters())], train(reference, data))
    assert len(step.sharded.programs) == 2


def check_a_branch_in_bfloat16() -> None:
    """In bfloat16, a second call on the same input takes the same branch and compiles nothing."""
    (x,) = batches(1, 4, 8)
    sharded: Any = autoshard.compile(Branches(), PAIR, precision="bf16")
    assert torch.equal(whole(sharded(x)), whole(sharded(x)))
    assert len(sharded.programs) == 1


def check_experts() -> None:
    """A mixture whose experts get new numbers of rows at each step equals one device with one program."""
    data = batches(10, 2, 8, 8)
    sharded: Any = autoshard.compile(Experts(), PAIR)
    assert_all_close(train(sharded, data), train(Experts(), data))
    assert len(sharded.programs) == 1


CHECKS: dict[str, Callable[[], None]] = {
    "a branch that flips": check_a_branch_that_flips,
    "a traced step": check_a_traced_step,
    "a branch in bfloat16": check_a_branch_in_bfloat16,
    "experts": check_experts,
}


@pytest.mark.parametrize("name", CHECKS)
def test_in_one_process(name: str) -> None:
    """The check passes if all ranks are simulated in this process."""
    CHECKS[name]()


test_on_two_processes = on_processes(CHECKS, ranks=2, sample=2)


def test_a_branch_on_what_dropout_gives() -> None:
    """A branch on values behind dropout takes the same way on one and on two ranks, call by call."""
    (x,) = batches(1, 4, 8)
    found: list[list[Tensor]] = []
    for mesh in (Mesh({"data": 1}), PAIR):
        torch.manual_seed(7)
        model = Branches(dropout=0.9)
        torch.manual_seed(7)
        sharded: Any = autoshard.compile(model, mesh)
        found.append([whole(sharded(x)) for _ in range(8)])
        assert len(sharded.programs) == 2, "eight masks go both ways"
        for program in sharded.programs:
            assert program.phased.lowered.traced.guards
    assert_all_close(*found)


def test_parameters_changed_by_hand_are_seen() -> None:
    """After a parameter changes in place, the next call takes the branch that one device takes."""
    (x,) = batches(1, 4, 8)
    model = Branches()
    sharded: Any = autoshard.compile(model, PAIR)
    for bias in (5.0, -5.0, 5.0):
        with torch.no_grad():
            model.up.bias.fill_(bias)
        assert_close(sharded(x), copy.deepcopy(model)(x), f"loss with bias {bias}")
    assert len(sharded.programs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["skips", "hit"])
def test_experts_that_python_chooses(how: str) -> None:
    """With a Python loop over experts with rows, training equals one device, with a program for each set of experts."""
    data = batches(10, 2, 8, 8)
    data[4] = data[4][:1, :1].expand(2, 8, 8).clone()  # all tokens go to two experts
    sharded: Any = autoshard.compile(Experts(**{how: True}), PAIR)
    assert_all_close(train(sharded, data), train(Experts(**{how: True}), data))
    assert len(sharded.programs) == 2


@pytest.mark.slow
def test_experts_with_dropout() -> None:
    """With the same seed, training of experts with dropout on two ranks equals one rank."""
    data, found = batches(4, 2, 8, 8), []
    for mesh in (Mesh({"data": 1}), PAIR):
        torch.manual_seed(3)
        sharded: Any = autoshard.compile(Experts(dropout=0.5), mesh)
        found.append(train(sharded, data))
        assert len(sharded.programs) == 1
    assert_all_close(*found)


class Attends(nn.Module):
    """A model that branches on values behind attention by hand, with transposed heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).view(2, -1, 2, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = nn.functional.dropout(torch.matmul(query, key.transpose(3, 2)).softmax(-1), 0.2, self.training)
        hidden = torch.matmul(weights, value).transpose(1, 2).contiguous().view(2, -1, 8)
        return hidden.square().mean() if hidden.sum() > 0 else hidden.abs().mean()


def test_a_branch_behind_attention() -> None:
    """Repeated calls of a model that branches behind attention find their programs again."""
    (x,) = batches(1, 2, 4, 8)
    sharded: Any = autoshard.compile(Attends(), PAIR)
    for _ in range(3):
        sharded(x).backward()
    assert 1 <= len(sharded.programs) <= 2
    guards = sharded.programs[0].phased.lowered.traced.guard_program
    assert torch.ops.aten.view.default not in {node.target for node in guards.graph.nodes}
