"""Ranks exchange messages over the store of their process group."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from autoshard.runtime.agreement.control_channel import ControlChannel


@pytest.fixture
def channel() -> Iterator[ControlChannel]:
    """Yield a channel of one rank over a `TCPStore`, as under `torchrun`."""
    store = dist.TCPStore("localhost", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield ControlChannel([0])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [0, 1, 4 * 2**20, 4 * 2**20 + 1, 20 * 2**20])
def test_a_message_has_any_size(channel: ControlChannel, size: int) -> None:
    """Messages of any size, also above the store's limit, arrive at each of three turns."""
    for turn in range(3):
        value = bytes([turn]) * size
        assert channel.exchange(value, "say much") == [value]


def test_many_turns_leave_few_keys(channel: ControlChannel) -> None:
    """The number of keys in the store does not grow with the number of turns."""
    sizes = []
    for _ in range(5):
        channel.exchange(b"0", "say little")
        sizes.append(channel._store.num_keys())
    assert sizes[1:] == sizes[1:2] * 4


def test_what_comes_a_moment_later_is_waited_for(channel: ControlChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for a key checks the store again until the key is there."""
    answers = iter([False, False, True])
    monkeypatch.setattr(channel, "_store", SimpleNamespace(check=lambda keys: next(answers)))
    assert channel._has_come("verdict")
