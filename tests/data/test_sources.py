"""Streams that know their position, at the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset, default_collate

from autoshard.data import Loader, RankRows
from autoshard.data.sources import Reading, StreamSource


class Anew(IterableDataset[int]):
    """A stream that starts from the beginning after its end, like `torchdata.nodes.Loader`."""

    next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 5:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_stream_that_begins_anew_does_not_repeat_an_epoch() -> None:
    """A state saved after a short last batch is the end of the epoch, although the stream has started from the
    beginning again."""
    reading = Reading(RankRows(2, repeats=False), default_collate, False, 0, False, {})
    loader, again = (Loader(StreamSource(Anew(), None), reading) for _ in range(2))
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4]]
    again.load_state_dict(loader.state_dict())
    assert list(again) == []
    assert [batch.tolist() for batch in again] == [[0, 1], [2, 3], [4]]
