"""A loader gives each sample of an epoch once, in one order, however a run stops and on whichever
ranks it continues."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset, default_collate

import autoshard
from autoshard import AutoshardError, CheckpointError, Checkpoints, Mesh, P
from autoshard.data import Loader, RankRows
from autoshard.data.rows import order_of
from autoshard.data.sources import IndexedSource, Reading, StreamSource
from autoshard.runtime.micro_batches import CutBatch
from tests.runtime.processes import checked_once, report, shared_folder

WIDTH = 3


class Numbers(IterableDataset[int]):
    """A stream of the numbers below a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class Resumed(Numbers):
    """A stream that can continue from its position, and records the numbers that are read."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.next, self.read = 0, list[int]()

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            self.read.append(self.next - 1)
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def made(
    length: int,
    rows: RankRows,
    *,
    kind: type[Numbers] | None = None,
    shuffle: bool = True,
    workers: int = 0,
    **more: Any,
) -> Loader:
    """The loader of one rank, without processes."""
    source: Any = IndexedSource(range(length)) if kind is None else StreamSource(kind(length), None)
    options = {"num_workers": workers}
    return Loader(source, Reading(rows, default_collate, shuffle, 7, more.get("drop_last", False), options))


@st.composite
def layouts(draw: st.DrawFn, batch: int | None = None) -> list[RankRows]:
    """The rows of each rank, for a batch of some micro-batches that some ranks share."""
    size, parts, pieces = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)))
    return [RankRows(size * parts * pieces, parts, (pieces,), (place,)) for place in range(pieces)]


def samples_of(batches: list[Any]) -> list[int]:
    """The samples of a batch, joined from all ranks' parts without copies."""
    if not isinstance(batches[0], CutBatch):
        return torch.cat(batches).tolist()
    found = []
    for number, copies in enumerate(batches[0].copies):
        samples = torch.cat([batch.parts[number] for batch in batches])
        found += [] if copies == 0 else samples[::copies].tolist()
    return found


def read(loaders: list[Loader], rows: list[RankRows], most: int | None = None) -> list[int]:
    """The samples of an epoch, or of its first `most` batches, joined from all ranks in order."""
    found: list[int] = []
    for number, batches in enumerate(zip(*loaders, strict=True)):
        whole = rows[0].batch if rows[0].micro_batches > 1 else None
        if whole and not isinstance(batches[0], CutBatch):  # the step cuts it
            found += samples_of([_cut(batch, rows[0].micro_batches) for batch in batches])
        else:
            found += samples_of(list(batches))
        if number + 1 == most:
            break
    return found


def _cut(batch: torch.Tensor, parts: int) -> CutBatch:
    return CutBatch(batch.chunk(parts), (1,) * parts)


@given(length=st.integers(1, 40), first=layouts(), then=layouts(), data=st.data())
def test_a_run_goes_on_where_it_stopped(
    length: int, first: list[RankRows], then: list[RankRows], data: st.DataObject
) -> None:
    """A run that stops anywhere and continues with other ranks, micro-batches and workers reads each sample of the
    epoch once."""
    kind = data.draw(st.sampled_from([None, None, Numbers, Resumed]))
    workers = data.draw(st.sampled_from([0, 0, 0, 2 if kind is None else 1]))
    shuffle = kind is None and data.draw(st.booleans())
    loaders = [made(length, rows, kind=kind, shuffle=shuffle, workers=workers) for rows in first]
    epoch = data.draw(st.integers(0, 2))
    for loader in loaders:
        loader.set_epoch(epoch)
    stop = data.draw(st.integers(1, 1 + length // first[0].batch))
    found = read(loaders, first, stop)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states), "the place is the same on all ranks"
    if states[0]["epoch"] == epoch:
        workers = data.draw(st.sampled_from([0, 0, 0, 2 if kind is None else 1]))
        loaders = [made(length, rows, kind=kind, shuffle=not shuffle, workers=workers) for rows in then]
        for loader in loaders:
            loader.load_state_dict(copy.deepcopy(states[0]))
        assert loaders[0].epoch == epoch
        found += read(loaders, then)
    assert found == order_of(length, epoch, shuffle=shuffle, seed=7).tolist()
    assert read(loaders, then if states[0]["epoch"] == epoch else first) == (
        order_of(length, epoch + 1, shuffle=shuffle, seed=7).tolist()
    )


def test_what_workers_have_read_ahead_is_not_consumed() -> None:
    """The loader's position is behind the last batch that it gave, although workers have read ahead."""
    loader = made(20, RankRows(2), shuffle=False, workers=2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert loader.state_dict()["samples"] == 6


def test_workers_that_persist_serve_all_epochs() -> None:
    """An iteration that was broken off continues with the same workers."""
    options = {"num_workers": 2, "persistent_workers": True}
    reading = Reading(RankRows(2, repeats=False), default_collate, False, 0, False, options)
    loader = Loader(IndexedSource(range(7)), reading)
    assert [batch.tolist() for _, batch in zip(range(2), loader, strict=False)] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in loader] == [[4, 5], [6]]
    assert torch.cat(list(loader)).tolist() == list(range(7))


def test_a_stream_goes_on_from_its_own_position() -> None:
    """A stream with a position continues there, and the next epoch begins at its start."""
    loader = made(10, RankRows(2), kind=Resumed)
    batches = iter(loader)
    next(batches), next(batches)
    again = Resumed(10)
    other = Loader(StreamSource(again, None), loader._reading)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[4, 5], [6, 7], [8, 9]]
    assert again.read == list(range(4, 10))
    assert torch.cat(list(other)).tolist() == list(range(10))


def test_the_end_of_an_epoch_is_kept() -> None:
    """A run that stopped after the last batch resumes at the end of that epoch, and `set_epoch` to the same epoch
    keeps this position."""
    loader = made(4, RankRows(2))
    batches = iter(loader)
    next(batches), next(batches)
    again = made(4, RankRows(2))
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 0
    again.set_epoch(0)
    assert list(again) == []
    assert again.epoch == 1
    assert len(list(again)) == 2
    again.set_epoch(5)
    assert again.state_dict()["epoch"] == 5


def test_lengths() -> None:
    """The length counts the last batch unless `drop_last`, and a stream without a length raises TypeError."""
    assert len(made(10, RankRows(4))) == 3
    assert len(made(10, RankRows(4), drop_last=True)) == 2
    assert len(list(made(10, RankRows(4), drop_last=True))) == 2
    assert [len(batch) for batch in made(10, RankRows(4), kind=Numbers, drop_last=True)] == [4, 4]
    with pytest.raises(TypeError, match="has no length"):
        len(made(10, RankRows(4), kind=Numbers))


class Epochs(Numbers):
    """A stream whose first number is that of its epoch."""

    epoch = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(self.epoch, self.epoch + self.length)


class Regression(nn.Module):
    """A linear layer with the mean squared error as loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x)[:, 0] - y).square().mean()


class Table(TensorDataset):
    """Features and targets, and a record of the indices that are read."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        super().__init__(torch.randn(length, WIDTH, generator=generator), torch.randn(length, generator=generator))
        self.read = list[int]()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return dict(zip("xy", super().__getitem__(index), strict=True))


def compiled(axes: dict[str, int], parts: int = 1, optimizer: Any = torch.optim.AdamW) -> Any:
    model = Regression()
    return autoshard.compile(
        model,
        Mesh(axes),
        optimizer=optimizer(model.parameters(), lr=0.1),
        micro_batches=parts,
        constraints={"input:*": P("data")},
        time_budget_s=2,
    )


def alone(length: int, batch: int, epochs: int) -> list[float]:
    """The losses of training on one device."""
    model, table = Regression(), Table(length)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for epoch in range(epochs):
        for rows in order_of(length, epoch, shuffle=True, seed=3).split(batch):
            optimizer.zero_grad()
            loss = model(*(each[rows] for each in table.tensors))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def train(
    step: Any, loader: Loader, epochs: int, checkpoints: Checkpoints | None = None, most: int = 99
) -> list[float]:
    """Train to the end of `epochs`, or for `most` steps, and return the losses."""
    losses: list[float] = []
    while loader.epoch < epochs:
        for batch in loader:
            losses.append(float(step(**batch)))
            if checkpoints is not None:
                checkpoints.save(step, at=len(losses), data=loader)
            if len(losses) == most:
                return losses
    return losses


@pytest.mark.parametrize(("parts", "stop"), [(1, 3), (2, 4)])
def test_a_run_in_two_halves_trains_as_one_device(tmp_path: Any, parts: int, stop: int) -> None:
    """A run stopped within an epoch or at its end continues on another mesh, with the losses of one device."""
    expected = alone(15, 6, 2)
    checkpoints = Checkpoints(tmp_path)
    step = compiled({"data": 2}, parts)
    loader = autoshard.data.loader(Table(15), step, batch_size=6, seed=3)
    losses = train(step, loader, 2, checkpoints, stop)
    checkpoints.wait()
    step = compiled({"data": 3}, 3 - parts)
    loader = autoshard.data.loader(Table(15), step, batch_size=6, seed=99, num_workers=2)
    assert Checkpoints(tmp_path).load(step, data=loader) == stop
    losses += train(step, loader, 2)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_traced", [True, False])
def test_a_given_plan_runs_a_last_batch(is_traced: bool) -> None:
    """A plan for batches of eight runs a last batch of five, with the loss and update of one device."""
    optimizer = torch.optim.AdamW if is_traced else torch.optim.NAdam
    options = {"example_inputs": (torch.ones(8, WIDTH), torch.ones(8)), "time_budget_s": 2}
    model = Regression()
    plan = autoshard.compile(model, Mesh({"data": 2}), optimizer=optimizer(model.parameters()), **options).plan
    model, other, table = Regression(), Regression(), Table(13)
    step = autoshard.compile(model, Mesh({"data": 2}), optimizer=optimizer(model.parameters(), lr=0.1), plan=plan)
    loader = autoshard.data.loader(table, step, batch_size=8, shuffle=False)
    alone = optimizer(other.parameters(), lr=0.1)
    for _ in range(2):
        for batch, rows in zip(loader, torch.arange(13).split(8), strict=True):
            alone.zero_grad()
            expected = other(*(each[rows] for each in table.tensors))
            expected.backward()
            alone.step()
            torch.testing.assert_close(step(**batch), expected.detach(), rtol=1e-5, atol=1e-6)
    assert len(step.sharded.programs) == 1


def test_a_last_batch_that_no_plan_runs_is_refused_at_once() -> None:
    """If the loss mixes samples, a loader whose last batch is short is refused for a given plan, unless `drop_last`."""

    def mixing(output: torch.Tensor) -> torch.Tensor:
        return output.std()

    model, batch = nn.Linear(4, 2), torch.randn(8, 4)
    options = {"loss_fn": mixing, "constraints": {"input:*": P("data")}, "example_inputs": (batch,)}
    step = autoshard.compile(model, Mesh({"data": 2}), optimizer=torch.optim.SGD(model.parameters()), **options)
    with pytest.raises(AutoshardError, match=r"the last batch of an epoch has 3 samples.*std.*pass drop_last=True"):
        autoshard.data.loader(torch.randn(11, 4), step, batch_size=8)
    assert len(list(autoshard.data.loader(torch.randn(11, 4), step, batch_size=8, drop_last=True))) == 1
    free = autoshard.compile(
        model, Mesh({"data": 2}), optimizer=torch.optim.SGD(model.parameters()), loss_fn=mixing, time_budget_s=2
    )
    losses = [float(free(each)) for each in autoshard.data.loader(torch.randn(11, 4), free, batch_size=8)]
    assert len(losses) == 2


def train_stages(axes: dict[str, int], length: int, batch: int) -> None:
    """Two epochs in pipeline stages have the losses of one device, also for the short last batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    other, table = copy.deepcopy(model), TensorDataset(torch.randn(length, WIDTH), torch.randn(length, 1))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss
    step = autoshard.compile(model, Mesh(axes), optimizer=optimizer, micro_batches=2, loss_fn=loss_fn)
    loader = autoshard.data.loader(table, step, batch_size=batch, shuffle=False)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    rows = [*torch.arange(length).split(batch)] * 2
    for inputs, own in zip((*loader, *loader), rows, strict=True):
        optimizer.zero_grad()
        x, y = table[own]
        expected = loss_fn(other(x), y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(*inputs), expected.detach())


def test_a_pipeline_loads_whole_batches() -> None:
    """Pipeline stages train on batches of four and a last batch of three, with the losses of one device."""
    train_stages({"pipeline": 2}, 11, 4)


def test_batches_of_other_forms() -> None:
    """A collated mapping becomes a dict, a plain iterable is batched, and a stream's `set_epoch` is called for
    each epoch."""
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}))

    def words(samples: list[Any]) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({"input": torch.stack(samples)})

    (batch,) = autoshard.data.loader(torch.ones(3, 4), sharded, batch_size=4, collate_fn=words)
    assert type(batch) is dict
    assert sharded(**batch).shape == (3, 2)
    stream = [torch.ones(4), torch.zeros(4), torch.ones(4)]
    (batch,) = autoshard.data.loader(Items(stream), sharded, batch_size=4)
    assert sharded(batch).shape == (3, 2)
    epochs = autoshard.data.loader(Epochs(4), sharded, batch_size=4)
    assert [batch.tolist() for batch in (*epochs, *epochs)] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert len(epochs) == 1


class Items:
    """A plain iterable."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.fixture(scope="module")
def sharded() -> Any:
    return autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), example_inputs=(torch.ones(8, 4),))


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ([1], {"batch_size": 0}, "loader(batch_size=0): pass a whole number of at least 1"),
        ([1], {"seed": 0.5}, "loader(seed=0.5): pass a whole number of at least 0"),
        ([], {}, "the dataset has 0 samples, so an epoch would have no batch"),
        ([1], {"drop_last": True}, "the dataset has 1 samples, so an epoch would have no batch"),
        ([1], {"sampler": None}, "loader(sampler=...) is not known. The loader chooses the samples"),
        (iter([1]), {}, "a list_iterator is an iterator, which ends after one epoch"),
        (3, {}, "a int is no dataset. Pass a dataset with __getitem__ and __len__"),
        (Numbers(3), {"shuffle": True}, "a Numbers is read in its own order"),
        (Numbers(3), {"num_workers": 2}, "loader(num_workers=2): one worker reads an iterable dataset"),
        (Numbers(3), {"batch_size": 16}, "the step has no program of this batch size"),
    ],
)
def test_wrong_arguments_are_refused(sharded: Any, dataset: Any, options: dict[str, Any], words: str) -> None:
    """Each wrong argument is refused with its value."""
    with pytest.raises(AutoshardError, match=re.escape(words)):
        autoshard.data.loader(dataset, sharded, **{"batch_size": 8, **options})


def test_other_mistakes_are_refused(sharded: Any) -> None:
    """A plain model, micro-batches that do not divide a batch, and batches of another shape are refused."""
    with pytest.raises(AutoshardError, match="a Linear is not compiled"):
        autoshard.data.loader([1], nn.Linear(4, 2), batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(AutoshardError, match="the step has micro_batches=2, which must divide it"):
        autoshard.data.loader(Table(5), compiled({"data": 2}, 2), batch_size=3)
    wrong = autoshard.data.loader(torch.ones(8, 4), sharded, batch_size=8, collate_fn=lambda rows: torch.ones(2, 8))
    with pytest.raises(AutoshardError, match=r"shape=\[2, 8\] is no part of a batch, of which this rank has 8 rows"):
        next(iter(wrong))
    with pytest.raises(AutoshardError, match=r"set_epoch\(-1\): pass the number of an epoch"):
        wrong.set_epoch(-1)


def test_states_of_other_data_are_refused() -> None:
    """A state of another object, and a position within an epoch of another length, are refused."""
    loader = made(10, RankRows(4))
    with pytest.raises(CheckpointError, match="The state of a loader has no epoch, samples"):
        loader.load_state_dict({"last_epoch": 3})
    with pytest.raises(CheckpointError, match="saved behind sample 4 of an epoch of 12, but the dataset has 10"):
        loader.load_state_dict({**loader.state_dict(), "samples": 4, "length": 12})
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "length": 12})
    assert loader.epoch == 2


def check_each_rank_loads_its_rows() -> None:
    """Four ranks train as one device, also if a last batch leaves ranks without rows, and each reads
    its own rows only."""
    place = torch.distributed.get_rank()
    for length, parts, repeats, count in (
        (13, 1, False, 2 + (2, 2, 1, 1)[place]),
        (13, 1, True, 2 + 2 * 2),
        (13, 2, True, 2 + 2),
    ):
        step, table = compiled({"data": 4}, parts), Table(length)
        loader = autoshard.data.loader(table, step, batch_size=8, seed=3)
        reading = loader._reading
        loader = Loader(loader._source, replace(reading, rows=replace(reading.rows, repeats=repeats)))
        table.read.clear()
        losses = train(step, loader, 2)
        assert len(table.read) == 2 * count
        torch.testing.assert_close(losses, alone(length, 8, 2), rtol=1e-5, atol=1e-6)


def check_a_run_of_two_ranks_goes_on() -> None:
    """A run continues from a checkpoint on another mesh of four ranks, with the losses of one device."""
    with shared_folder() as folder:
        step = compiled({"data": 4})
        loader = autoshard.data.loader(Table(15), step, batch_size=8, seed=3)
        checkpoints = Checkpoints(folder)
        losses = train(step, loader, 2, checkpoints, 3)
        checkpoints.wait()
        step = compiled({"data": 2, "model": 2}, 2)
        loader = autoshard.data.loader(Table(15), step, batch_size=8, seed=3)
        assert checkpoints.load(step, data=loader) == 3
        losses += train(step, loader, 2)
        torch.testing.assert_close(losses, alone(15, 8, 2), rtol=1e-5, atol=1e-6)


def check_ranks_with_other_seeds() -> None:
    step = compiled({"data": 4})
    with pytest.raises(autoshard.RankMismatchError, match=r"'seed': 0.* on ranks \[0\].*'seed': 1.* on ranks \[1\]"):
        autoshard.data.loader(Table(9), step, batch_size=8, seed=torch.distributed.get_rank())


CHECKS = {
    "each rank loads its rows": check_each_rank_loads_its_rows,
    "a run goes on": check_a_run_of_two_ranks_goes_on,
    "a pipeline": partial(train_stages, {"pipeline": 2, "data": 2}, 23, 8),
    "other seeds": check_ranks_with_other_seeds,
}
outcomes = checked_once(CHECKS, ranks=4)


@pytest.mark.parametrize("name", CHECKS)
def test_four_processes(name: str, outcomes: dict[str, str]) -> None:
    """The check of this name passes on four Gloo processes."""
    report(outcomes, name)
