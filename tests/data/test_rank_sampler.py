"""The rows that a sampler gives each rank, without processes; tests/runtime/test_distributed.py has processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import autoshard
from autoshard import AutoshardError, Mesh
from autoshard.data import RankRows, RankSampler

MESH = Mesh({"data": 2})
ROWS = torch.arange(20.0)[:, None].expand(20, 4)


def total(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@given(
    length=st.integers(1, 60), rows=st.integers(1, 4), pieces=st.integers(1, 4), parts=st.integers(1, 3),
    shuffle=st.booleans(), epoch=st.integers(0, 3),
)  # fmt: skip
def test_ranks_together_draw_the_batches_of_one_device(
    length: int, rows: int, pieces: int, parts: int, shuffle: bool, epoch: int
) -> None:
    """The ranks' rows join to the micro-batches of one device, without repetition, and each rank has equally many."""
    batch = rows * pieces * parts
    ranks = [
        RankSampler(length, RankRows(batch, parts, (pieces,), (index,)), shuffle=shuffle, seed=7)
        for index in range(pieces)
    ]
    alone = RankSampler(length, RankRows(batch), shuffle=shuffle, seed=7)
    for each in (*ranks, alone):
        each.set_epoch(epoch)
    drawn = [list(each) for each in ranks]
    assert [len(each) for each in ranks] == list(map(len, drawn))
    joined = [row for start in range(0, len(drawn[0]), rows) for own in drawn for row in own[start : start + rows]]
    assert joined == list(alone)
    assert len(set(joined)) == len(joined) == length // batch * batch


def test_epochs_have_orders_of_their_own() -> None:
    """Each epoch has its own order, which is the same each time."""
    each = RankSampler(50, RankRows(10))
    first = list(each)
    assert list(each) == first
    each.set_epoch(1)
    assert list(each) != first
    assert sorted(each) == sorted(first)


@pytest.fixture(scope="module")
def sharded() -> Any:
    return autoshard.compile(nn.Linear(4, 2), MESH, example_inputs=(ROWS[:8],), loss_fn=None)


def test_without_processes_a_loader_gives_whole_batches(sharded: Any) -> None:
    """Without processes, the sampler gives whole batches, because all ranks are in this process."""
    rows = autoshard.data.sampler(ROWS, sharded, shuffle=False)
    batches = list(DataLoader(ROWS, batch_size=rows.batch_size, sampler=rows))  # type: ignore[arg-type]
    assert [batch[:, 0].tolist() for batch in batches] == [list(range(8)), list(range(8, 16))]
    assert rows.whole({"x": batches[0], "name": "first"})["x"] is batches[0]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [(ROWS[:7], "the dataset has 7 samples, and a batch 8 rows"), (iter(ROWS), "the dataset has no length")],
)
def test_datasets_without_a_batch_are_refused(sharded: Any, dataset: Any, words: str) -> None:
    """A dataset with fewer samples than a batch, or without a length, is refused."""
    with pytest.raises(AutoshardError, match=words):
        autoshard.data.sampler(dataset, sharded)


def test_what_is_no_part_of_a_batch_is_refused(sharded: Any) -> None:
    """A batch of another size, a plain module, and a model that is not compiled yet are refused."""
    rows = autoshard.data.sampler(ROWS, sharded)
    with pytest.raises(AutoshardError, match=r"shape=\[4, 4\] is no part of a batch, of which this rank has 8 rows"):
        rows.whole(ROWS[:4])
    with pytest.raises(AutoshardError, match="a Linear is not compiled"):
        autoshard.data.sampler(ROWS, nn.Linear(4, 2))  # type: ignore[arg-type]
    model = nn.Linear(4, 2)
    with pytest.raises(AutoshardError, match="nothing has been compiled yet"):
        autoshard.data.sampler(ROWS, autoshard.compile(model, MESH))


def test_a_step_of_micro_batches_loads_whole_batches(sharded: Any) -> None:
    """For a step of two micro-batches of four rows, the sampler's batches have eight rows."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    step = autoshard.compile(
        model, MESH, example_inputs=(ROWS[:8],), optimizer=optimizer, loss_fn=total, micro_batches=2
    )
    rows = autoshard.data.sampler(ROWS, step, shuffle=False)
    assert rows.batch_size == 8
    for batch in DataLoader(ROWS, batch_size=rows.batch_size, sampler=rows):  # type: ignore[arg-type]
        step(rows.whole(batch))


def test_pipelines_are_refused() -> None:
    """A step with pipeline stages is refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    step = autoshard.compile(
        model,
        Mesh({"pipeline": 2}),
        example_inputs=(ROWS[:8],),
        optimizer=torch.optim.SGD(model.parameters()),
        loss_fn=total,
        micro_batches=2,
    )
    with pytest.raises(AutoshardError, match="cuts the model into stages, which read inputs on meshes of their own"):
        autoshard.data.sampler(ROWS, step)
