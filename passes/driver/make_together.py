"""Make an object on all ranks: every rank makes the same object, or every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from autoshard.errors import AutoshardError
from autoshard.runtime.engine import Engine

T = TypeVar("T")


def make_together(engine: Engine, step: str, make: Callable[[], T], facts: Callable[[T], Mapping[str, str]]) -> T:
    """Make an object on each rank, and return it. All ranks succeed with the same `facts`, or all ranks raise.

    Args:
        step: the name of the step in error messages, such as "tracing".
        facts: returns texts about the object by name, such as its digest. The texts must be equal on all ranks.

    Raises:
        RankMismatchError: on every rank, if `make` fails on some ranks only, or the facts differ.
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
