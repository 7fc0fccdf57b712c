"""Every rank makes the same thing, or every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from autoshard.errors import AutoshardError
from autoshard.runtime.engine import Engine

T = TypeVar("T")


def make_together(engine: Engine, step: str, make: Callable[[], T], facts: Callable[[T], Mapping[str, str]]) -> T:
    """Make an object on each rank. All ranks succeed with the same `facts`, or all ranks raise.

    Raises:
        RankMismatchError: on every rank, if only some ranks can, or the facts differ.
        AutoshardError: `make` raises it on every rank.
    """
    made: T | None = None
    failure: AutoshardError | None = None
    try:
        made = make()
    except AutoshardError as error:
        failure = error
    found = {} if made is None else facts(made)
    engine.agree(lambda: {step: "succeeded" if failure is None else f"failed ({failure})", **found})
    if made is None:
        assert failure is not None
        raise failure
    return made
