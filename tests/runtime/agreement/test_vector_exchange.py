"""Every rank gets the numbers of all ranks; threads stand for the processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from autoshard.errors import LostRankError
from autoshard.runtime.agreement import vector_exchange
from autoshard.runtime.agreement.vector_exchange import LENGTH, VectorExchange, connect


class Turns:
    """The messages of all ranks at one turn, and a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier, self.said = Barrier(size), [b""] * size


class Channel:
    """A fake `ControlChannel` for threads, whose rank numbers differ from their positions."""

    timeout_s = 0.2

    def __init__(self, turns: Turns, place: int) -> None:
        self._turns, self._place = turns, place
        self.ranks = tuple(2 * index for index in range(len(turns.said)))
        self.rank = self.ranks[place]

    def exchange(self, value: bytes, what: str, timeout_s: float | None = None) -> list[bytes]:
        self._turns.said[self._place] = value
        self._turns.barrier.wait(10.0)
        said = [*self._turns.said]
        self._turns.barrier.wait(10.0)
        return said


def numbers(place: int, turn: int) -> tuple[int, ...]:
    return tuple((-1) ** item * (2**62 + 100 * place + 10 * turn) + item for item in range(LENGTH))


def take_a_turn(vectors: VectorExchange) -> None:
    vectors.post(numbers(0, 0), lambda: "run a call")
    vectors.collect(lambda: "run a call")


def on_all(size: int, work: Callable[[Channel], Any]) -> list[Any]:
    """Run `work` in a thread for each rank, and return the results."""
    turns = Turns(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda place: work(Channel(turns, place)), range(size)))


@pytest.fixture(autouse=True)
def _on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_exchange, "_store_host", lambda: "localhost")


def made(channel: Channel) -> VectorExchange:
    found = connect(channel)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_rank_hears_all_numbers_in_the_order_of_ranks(size: int) -> None:
    """Each rank gets the numbers of all ranks, in the order of ranks, at each of three turns."""

    def work(channel: Channel) -> list[Any]:
        vectors, found = made(channel), []
        for turn in range(3):
            vectors.post(numbers(channel.ranks.index(channel.rank), turn), str)
            found.append(vectors.collect(str))
        return found

    expected = [[numbers(place, turn) for place in range(size)] for turn in range(3)]
    assert on_all(size, work) == [expected] * size


def test_a_rank_that_comes_late_is_missed_and_told() -> None:
    """If one of two ranks comes late to a turn, both raise `LostRankError`."""

    def work(channel: Channel) -> str:
        vectors = made(channel)
        if channel.rank == 0:
            time.sleep(3 * channel.timeout_s)
        with pytest.raises(LostRankError, match="when it was to run a call") as caught:
            take_a_turn(vectors)
        return str(caught.value)

    assert [text.partition(" lost")[0] for text in on_all(2, work)] == ["Rank 0", "Rank 2"]


def test_ranks_that_cannot_reach_each_other_have_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank cannot connect to another, `connect` returns None on every rank."""
    right = vector_exchange._call

    def call(address: str, port: int, token: bytes, number: int) -> socket.socket:
        if number == 1:
            raise ConnectionRefusedError
        return right(address, port, token, number)

    monkeypatch.setattr(vector_exchange, "_call", call)
    monkeypatch.setattr(vector_exchange, "_CONNECT_S", 0.2)
    assert on_all(3, connect) == [None] * 3  # type: ignore[arg-type]


def test_ranks_that_were_heard_are_left_where_another_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of two expected ranks does not connect, the connection of the other is closed."""
    monkeypatch.setattr(vector_exchange, "_CONNECT_S", 0.2)
    server, token = vector_exchange._listen(), b"t" * 32
    with server, vector_exchange._call("localhost", server.getsockname()[1], token, 0) as heard:
        with pytest.raises(TimeoutError):
            vector_exchange._answer(server, token, 2)
        assert heard.recv(1) == b""


def test_who_does_not_know_the_token_is_left_out() -> None:
    """A connection that sends a wrong token, or nothing, is ignored, and the rank with the token connects."""
    server, token = vector_exchange._listen(), b"t" * 32
    port = server.getsockname()[1]
    with server, socket.create_connection(("localhost", port)) as one:
        one.sendall(b"GET / HTTP/1.1\r\n" + b" " * 17)
        with socket.create_connection(("localhost", port)):
            pass
        with vector_exchange._call("localhost", port, token, 0) as right:
            (heard,) = vector_exchange._answer(server, token, 1).values()
            with heard:
                assert heard.getpeername()[1] == right.getsockname()[1]
