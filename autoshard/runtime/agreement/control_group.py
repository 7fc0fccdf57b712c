"""`ControlGroup`: ranks compare facts, and all ranks raise the same error if the facts differ.

A fact is a named value, such as the shape of an input. Ranks that run different programs would hang, or compute wrong
values. So they compare each call before it runs.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from autoshard.errors import AutoshardError, LostRankError, RankMismatchError
from autoshard.ir.cost_errors import errors_of_ours
from autoshard.runtime.agreement.control_channel import TIMEOUT_S, ControlChannel
from autoshard.runtime.agreement.one_thread import OneThread
from autoshard.runtime.agreement.vector_exchange import LENGTH, VectorExchange, connect

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PieceFact:
    """The name of a fact that is compared only among the ranks that hold the same piece of a tensor.

    Args:
        name: the fact's name in messages.
        place: a text that is equal on ranks with the same piece, and differs on other ranks.
    """

    name: str
    place: str

    def __str__(self) -> str:
        return self.name


Facts = Mapping[str | PieceFact, str]
"""Name of a fact → its value as text, which ranks compare: for example the shape of an input."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """The message of a rank that raised an error, in place of its value. `error` is the error's text."""

    error: str


class ControlGroup:
    """A set of ranks that compare and share small Python values before they run programs.

    Args:
        ranks: ranks of the default process group.
        timeout_s: seconds without a message or a sign of life after which a rank is lost.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float = TIMEOUT_S) -> None:
        self.channel = ControlChannel(ranks, timeout_s)
        self.one_thread = OneThread()
        self._is_telling = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ControlGroup:
        """Return the group itself: copies of a model run on the same ranks."""
        return self

    @cached_property
    def vectors(self) -> VectorExchange | None:
        """A faster exchange of a few integers, over direct connections; None if ranks cannot connect.

        All ranks must read this property for the first time together, because the first read opens the connections.
        """
        found = connect(self.channel)
        if found is None and self.channel.rank == self.channel.ranks[0]:
            _LOGGER.warning(
                "ranks cannot open connections to each other, so they compare their calls through the store of the "
                "run, which takes milliseconds per call: to avoid them, pass Options(check='first')"
            )
        return found

    def agree(self, facts: Callable[[], Facts], action: str = "compile the same program") -> None:
        """Raise `RankMismatchError` on every rank if a fact's value differs between ranks.

        Args:
            facts: returns this rank's facts. A fact named by a `PieceFact` is compared among the ranks with an equal
                `PieceFact`.
            action: the next action of the ranks, for the error message if a rank is lost.
        """
        everyone = self.gather(dict(facts()), action)
        names = dict.fromkeys(name for theirs in everyone for name in theirs)
        differing = [name for name in names if len(set(_found(name, everyone))) > 1]
        if differing:
            raise RankMismatchError(
                f"Ranks disagree about {', '.join(map(str, differing[:_SHOWN]))}"
                f"{f' and {len(differing) - _SHOWN} more' if len(differing) > _SHOWN else ''}. "
                + "; ".join(self._describe(name, everyone) for name in differing[:_SHOWN])
                + ". Every rank must build the same model (same seed, or the same checkpoint). It must call the model "
                "in the same mode, with the same inputs (seed the shuffle alike) and hyperparameters. If ranks "
                "may differ in their last digits, pass Options(check='first')."
            )

    def share(self, compute: Callable[[], T], action: str = "take the first rank's plan") -> T:
        """Run `compute` on the first rank only; return its result, or raise its `AutoshardError`, on every rank.

        After any other error of `compute`, the other ranks raise `RankMismatchError`. `action` is the next action of
        the ranks, for error messages.
        """
        mine: Any = None
        if self.channel.rank == self.channel.ranks[0]:
            with self.telling_errors(), self.channel.showing_life(action):
                try:
                    with errors_of_ours():
                        mine = compute()
                except AutoshardError as error:
                    mine = error
        result = self.gather(mine, action)[0]
        if isinstance(result, AutoshardError):
            raise result
        return result

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Within the context, send an error of this rank to the other ranks, which then raise `RankMismatchError`."""
        if self._is_telling:
            yield
            return
        self._is_telling = True
        try:
            yield
        except (RankMismatchError, LostRankError):
            raise  # all ranks raise it
        except BaseException as error:
            self.channel.say(pickle.dumps(_Failed(f"{type(error).__name__}: {error}")))
            raise
        finally:
            self._is_telling = False

    @contextmanager
    def working(self, action: str) -> Iterator[None]:
        """Within the context, other ranks wait for this rank without a time limit, and fail if it fails.

        If this rank raises an error, the other ranks raise `RankMismatchError`, see `telling_errors`. `action` is the
        work of this rank, for messages.
        """
        with self.telling_errors(), self.channel.showing_life(action):
            yield

    def any(self, mine: bool, action: str, *, waits: bool = False) -> bool:
        """Return whether `mine` is true on any rank. All ranks get the same answer.

        Args:
            mine: this rank's answer.
            action: the next action of the ranks, for error messages.
            waits: whether ranks may work for long before they answer. The other ranks then wait as long as signs of
                life arrive.

        Raises:
            LostRankError: a rank does not answer within the time limit of the channel.
        """
        if len(self.channel.ranks) == 1:
            return mine
        if waits or self.vectors is None:
            return any(self.gather(mine, action))
        self.vectors.post((int(mine),) * LENGTH, lambda: action)
        return any(first for first, *_ in self.vectors.collect(lambda: action))

    def gather(self, value: T, action: str) -> list[T]:
        """Return the value of each rank, in the order of ranks. `action` is the next action, for error messages.

        Raises:
            RankMismatchError: a rank sent an error in place of a value (`telling_errors`).
        """
        everyone = [pickle.loads(said) for said in self.channel.exchange(pickle.dumps(value), action)]
        failed = {rank: said.error for rank, said in zip(self.channel.ranks, everyone, strict=True) if _is_failed(said)}
        if failed:
            rank, error = next(iter(failed.items()))
            raise RankMismatchError(
                f"Ranks {list(failed)} failed while the other ranks were to {action}. Rank {rank}: {error}"
            )
        return everyone

    def _describe(self, name: str | PieceFact, everyone: Sequence[Facts]) -> str:
        """Return a text such as `seed: 0 on ranks [0, 1], 1 on ranks [2]`, for the values of a fact.

        `everyone` has the facts of each rank.
        """
        holders: dict[str, list[int]] = {}
        for rank, theirs in zip(self.channel.ranks, everyone, strict=True):
            if name in theirs or not isinstance(name, PieceFact):
                holders.setdefault(theirs.get(name, "nothing"), []).append(rank)
        return f"{name}: " + ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())


_SHOWN = 4


def _is_failed(said: object) -> bool:
    return isinstance(said, _Failed)


def _found(name: str | PieceFact, everyone: Sequence[Facts]) -> list[str | None]:
    """Return the value of a fact on each rank. `everyone` has the facts of each rank.

    The value is None on a rank without the fact. For a `PieceFact`, ranks without it are left out.
    """
    return [theirs.get(name) for theirs in everyone if name in theirs or not isinstance(name, PieceFact)]
