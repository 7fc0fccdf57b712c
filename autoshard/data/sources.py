"""Sources of batches: a dataset with indices, or a stream. A source yields this rank's rows, collated, batch by batch.

torch's `DataLoader` reads ahead, in worker processes, and pins memory. Its iterator runs ahead of the user, so a source
yields with each batch the numbers that say where the batch ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from autoshard.data.rows import RankRows, order_of

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]
"""Function that takes samples, and returns a pytree of tensors, whose first dim is the samples."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the data: `samples` of epoch `epoch` are read."""

    epoch: int = 0
    samples: int = 0


class Loaded(NamedTuple):
    """A batch, as a named tuple, because torch pins the tensors in tuples.

    Args:
        count: samples of the batch on all ranks.
        rows: this rank's samples, collated.
        position: the stream's own state behind the batch; None if it has none, or has ended.
    """

    count: int
    rows: Any
    position: Any = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source reads, for each epoch alike.

    Args:
        rows: the rows of each batch that this rank loads.
        collate: makes a batch of samples.
        shuffle: read in another random order in each epoch.
        seed: seed of the random order, and of the workers.
        drop_last: leave out a last batch of fewer samples.
        options: further arguments of `DataLoader`.
    """

    rows: RankRows
    collate: Collate
    shuffle: bool
    seed: int
    drop_last: bool
    options: Mapping[str, Any]

    def takes(self, count: int) -> bool:
        """Whether a batch of `count` samples is yielded: a whole batch, or without `drop_last` a smaller batch."""
        return count == self.rows.batch or (count > 0 and not self.drop_last)

    def worker_seed(self, place: Place) -> int:
        """Return the seed from which workers make theirs, for an iteration that begins at `place`."""
        numbers = np.random.SeedSequence((self.seed, place.epoch, place.samples))
        return int(numbers.generate_state(1, np.uint64)[0])


class BatchSource(Protocol):
    """Yields the batches of an epoch."""

    @property
    def length(self) -> int | None:
        """The number of samples of an epoch; None if it is unknown."""
        ...

    def read(self, reading: Reading, place: Place, position: Any) -> Iterator[Loaded]:
        """Yield the batches from `place` to the end of its epoch.

        `position` is `Loaded.position` of the batch before `place`; None if there is none.
        """
        ...


@runtime_checkable
class Indexed(Protocol):
    """A dataset whose samples have indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class KnowsPosition(Protocol):
    """A stream that can say where it is, and go on from there."""

    def state_dict(self) -> Any:
        """Return the position behind the samples that have been read."""

    def load_state_dict(self, state: Any) -> Any:
        """Set the position at which the next iteration begins."""


@runtime_checkable
class KnowsEpoch(Protocol):
    """A stream with another order in each epoch."""

    def set_epoch(self, epoch: int) -> Any:
        """Set the epoch of the next iteration."""


class IndexedSource:
    """The batches of a dataset with indices."""

    def __init__(self, dataset: Indexed) -> None:
        self._dataset = dataset
        self._batches: _Batches | None = None
        self._loader: DataLoader[Any] | None = None
        self._generator = torch.Generator()

    @property
    def length(self) -> int:
        return len(self._dataset)

    def read(self, reading: Reading, place: Place, position: Any) -> Iterator[Loaded]:
        """Yield batches; see `BatchSource`. One `DataLoader` serves all epochs, so that its workers may persist."""
        if self._loader is None or self._batches is None or self._batches.reading != reading:
            self._batches = _Batches(reading, self.length)
            self._loader = DataLoader(
                self._dataset,  # type: ignore[arg-type]
                batch_sampler=self._batches,
                collate_fn=reading.collate,
                generator=self._generator,
                **reading.options,
            )
        self._batches.place = place
        self._generator.manual_seed(reading.worker_seed(place))
        for count, rows in zip(self._batches.counts(), self._loader, strict=True):
            yield Loaded(count, rows)


class _Batches(Sampler[list[int]]):
    """The indices of this rank's samples, batch by batch, from `place` to the end of its epoch."""

    def __init__(self, reading: Reading, length: int) -> None:
        self.reading, self._length = reading, length
        self.place = Place()

    def counts(self) -> list[int]:
        """Return the number of samples of each batch on all ranks."""
        batch, left = self.reading.rows.batch, max(0, self._length - self.place.samples)
        return [count for count in (*[batch] * (left // batch), left % batch) if self.reading.takes(count)]

    def __len__(self) -> int:
        return len(self.counts())

    def __iter__(self) -> Iterator[list[int]]:
        start, own = self.place.samples, dict[int, list[int]]()
        order = order_of(self._length, self.place.epoch, shuffle=self.reading.shuffle, seed=self.reading.seed)
        for count in self.counts():
            if count not in own:
                own[count] = self.reading.rows.of(count)
            yield order[start : start + count][own[count]].tolist()
            start += count


class StreamSource:
    """The batches of a stream. Each rank reads the whole stream, and collates only its rows."""

    def __init__(self, stream: Iterable[Any], length: int | None) -> None:
        self._stream, self._length = stream, length
        self._begin = copy.deepcopy(stream.state_dict()) if isinstance(stream, KnowsPosition) else None

    @property
    def length(self) -> int | None:
        return self._length

    def read(self, reading: Reading, place: Place, position: Any) -> Iterator[Loaded]:
        """Yield batches; see `BatchSource`."""
        if isinstance(self._stream, KnowsEpoch):
            self._stream.set_epoch(place.epoch)
        generator = torch.Generator().manual_seed(reading.worker_seed(place))
        batches = _StreamBatches(self._stream, reading, place.samples, self._begin, position)
        yield from DataLoader(batches, batch_size=None, collate_fn=_unchanged, generator=generator, **reading.options)


class _StreamBatches(IterableDataset[Loaded]):
    """Reads a stream from a place on, in this process or in a worker.

    Args:
        stream: the whole stream.
        reading: see `Reading`.
        samples: number of samples that are read already.
        begin: the stream's own position at the beginning; None if it has none.
        position: the stream's own position behind these samples; None if it is unknown.
    """

    def __init__(self, stream: Iterable[Any], reading: Reading, samples: int, begin: Any, position: Any) -> None:
        self._stream, self._reading, self._samples = stream, reading, samples
        self._begin, self._position = begin, position

    def __iter__(self) -> Iterator[Loaded]:
        rows, collate = self._reading.rows, self._reading.collate
        samples = self._from_place()
        while self._reading.takes(len(batch := list(islice(samples, rows.batch)))):
            has_ended = len(batch) < rows.batch  # the stream's position may be the beginning of the next epoch
            position = None if has_ended else self._position_now()
            yield Loaded(len(batch), collate([batch[row] for row in rows.of(len(batch))]), position)

    def _from_place(self) -> Iterator[Any]:
        skipped = self._samples if self._position is None else 0
        start = self._begin if self._position is None else self._position
        if isinstance(self._stream, KnowsPosition) and start is not None:
            self._stream.load_state_dict(copy.deepcopy(start))
        return islice(iter(self._stream), skipped, None)

    def _position_now(self) -> Any:
        """Return a copy of the stream's state, because reading changes the state; None for a stream without a state."""
        return copy.deepcopy(self._stream.state_dict()) if isinstance(self._stream, KnowsPosition) else None


def _unchanged(value: T) -> T:
    return value


def batches_in(length: int, reading: Reading) -> int:
    """Return the number of batches of an epoch of `length` samples."""
    whole, left = divmod(length, reading.rows.batch)
    return whole + reading.takes(left)


def first_samples(dataset: Indexed, count: int) -> Sequence[Any]:
    """Return `count` samples as an example, from the first on, and again from the first where the dataset ends."""
    return [dataset[index % len(dataset)] for index in range(count)]
