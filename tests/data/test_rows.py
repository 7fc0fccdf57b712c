"""The rows of all ranks make up the batch, and a short last batch trains as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.data import RankRows
from autoshard.data.rows import batch_of as common_rows
from autoshard.ir.loss_weights import full_parts
from tests.end_to_end.test_micro_batches import CLASSES, COUNTED, OPTIMIZERS, PLAIN, WIDTH, Model, branching

PARTS, BATCH = 4, 16


@given(size=st.integers(1, 24), parts=st.integers(1, 5), data=st.data())
def test_micro_batches_hold_each_row_once(size: int, parts: int, data: st.DataObject) -> None:
    """The micro-batches of a batch of any count have one size and hold each row once, with copies to fill them."""
    rows = RankRows(size * parts, parts)
    count = data.draw(st.integers(1, rows.batch))
    runs = rows.runs(count)
    assert [row for run in runs for row in range(run.start, run.stop)] == list(range(count))
    if parts > 1:
        assert {(run.stop - run.start) * run.copies for run in runs} == {size}
        assert full_parts([run.copies for run in runs]) * size == pytest.approx(count)
    if count == rows.batch:
        assert all(run.copies == 1 for run in runs)
        assert len(runs) == parts


@given(
    pieces=st.lists(st.integers(1, 3), max_size=2),
    size=st.integers(1, 4),
    parts=st.integers(1, 3),
    data=st.data(),
)
def test_ranks_together_have_the_rows_of_the_batch(
    pieces: list[int], size: int, parts: int, data: st.DataObject
) -> None:
    """The ranks' pieces join to each micro-batch, also when a short batch leaves ranks without rows of their own."""
    places: list[tuple[int, ...]] = [()]
    for each in pieces:
        places = [(*place, number) for place in places for number in range(each)]
    ranks = [RankRows(size * len(places) * parts, parts, tuple(pieces), place) for place in places]
    alone = RankRows(size * len(places) * parts, parts)
    count = data.draw(st.integers(1, alone.batch))
    for run in alone.runs(count):
        assert [place for rank in ranks for place in rank.places(run)] == list(alone.places(run))
    assert all(rank.of(count) for rank in ranks)


def batch_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and targets. Some targets are zero, and counted losses leave them out."""
    torch.manual_seed(count)
    return torch.randn(count, WIDTH), torch.arange(1, count + 1) % CLASSES


def compare(model: nn.Module, counts: list[int], optimizer: str, axes: dict[str, int], parts: int = PARTS) -> None:
    """Losses and parameters of steps on batches of these counts equal one device's."""
    alone, make = copy.deepcopy(model), OPTIMIZERS[optimizer]
    stepping, rows = make(alone.parameters()), RankRows(BATCH, parts)
    step = autoshard.compile(
        model, autoshard.Mesh(axes), optimizer=make(model.parameters()), micro_batches=parts, time_budget_s=2
    )
    for count in counts:
        batch = batch_of(count)
        stepping.zero_grad()
        expected = alone(*batch)
        expected.backward()
        stepping.step()
        loaded: Any = tuple(each[rows.of(count)] for each in batch)
        torch.testing.assert_close(step(*rows.whole(loaded, count, "")), expected.detach(), rtol=1e-5, atol=1e-6)
    held = dict(step.sharded.named_parameters())
    for name, value in alone.named_parameters():
        torch.testing.assert_close(held[name].detach(), value.detach(), rtol=1e-4, atol=1e-5)
    assert {common_rows(program) for program in step.sharded.programs} == {BATCH // parts}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [*PLAIN, *COUNTED])
def test_a_short_batch_weighs_its_rows_alike(name: str) -> None:
    """Losses that are sums, means or quotients train as on one device, for 15 rows and 1 row of 16 in four
    micro-batches."""
    compare(Model({**PLAIN, **COUNTED}[name]), [16, 15, 1], "sgd", {"data": 2})


@pytest.mark.parametrize("name", ["sum", "mean", "ignored"])
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_a_batch_that_fills_one_program_with_copies(name: str, optimizer: str) -> None:
    """Without micro-batches, 8, 4 and 1 rows of 16 are copied to fill the program, and train as on one device."""
    compare(Model({**PLAIN, **COUNTED}[name]), [16, 8, 4, 1], optimizer, {"data": 2}, parts=1)


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_short_batches_of_other_optimizers(optimizer: str) -> None:
    """Short batches train as on one device, with a traced optimizer and with one that takes its own step."""
    compare(Model(COUNTED["ignored"]), [16, 11, 4], optimizer, {"data": 2})


def test_a_short_batch_branches_as_one_device_does() -> None:
    """A condition on the number of rows has its outcome on one device, or the short batch is refused."""
    counting = branching(lambda y: (y > 0).sum() > 1)
    compare(Model(counting), [16, 15, 6], "sgd", {"data": 2})
    with pytest.raises(autoshard.NotAvailableError, match="no part of this batch is known to take the branches"):
        compare(Model(counting), [16, 1], "sgd", {"data": 2}, parts=1)


def test_a_short_batch_in_pipeline_stages() -> None:
    """Short batches in pipeline stages train as on one device."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    compare(Deep(layers), [16, 15, 3], "adamw", {"pipeline": 2})


class Deep(nn.Module):
    """A model of layers, with the mean cross-entropy over targets that are not zero."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), y, ignore_index=0)
