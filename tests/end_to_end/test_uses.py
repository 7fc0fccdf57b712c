"""For each use in a table, a compiled model computes one device's numbers, or raises the stated error."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable

import pytest

import autoshard
from tests.end_to_end import uses
from tests.end_to_end.uses.use import Use, one_device, sharded
from tests.runtime.processes import on_processes

MODULES = [
    importlib.import_module(f"{uses.__name__}.{module.name}")
    for module in pkgutil.iter_modules(uses.__path__)
    if module.name != "use"
]
TABLE: tuple[Use, ...] = tuple(use for module in MODULES for use in module.USES)


def outcome(use: Use) -> str:
    """Return "equal", or the message of the error that refuses the use; raise if the numbers differ."""
    expected = use.script(one_device)
    if use.refused is not None:
        with pytest.raises(autoshard.AutoshardError, match=use.refused) as refusal:
            use.script(sharded)
        return str(refusal.value)
    found = use.script(sharded)
    assert len(found) == len(expected), f"{use.name}: {len(found)} numbers for {len(expected)}"
    for mine, one in zip(found, expected, strict=True):
        same = math.isclose(mine, one, rel_tol=use.tolerance, abs_tol=use.tolerance) or (mine != mine and one != one)
        assert same, f"{use.name}: {mine} for {one}; all: {found} for {expected}"
    return "equal"


class _Check:
    """A check of one use, which processes find in the table by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        outcome(next(use for use in TABLE if use.name == self.name))


ON_PROCESSES: dict[str, Callable[[], None]] = {use.name: _Check(use.name) for use in TABLE if use.processes}

test_two_ranks = on_processes(ON_PROCESSES, ranks=2, sample=20)


@pytest.mark.sample(20)
@pytest.mark.parametrize("use", [use for use in TABLE if not use.processes], ids=lambda use: use.name)
def test_simulated(use: Use) -> None:
    """On two simulated ranks, a use computes the numbers of one device or raises the stated error."""
    outcome(use)


def test_names_are_unique() -> None:
    """No two uses of the table have the same name."""
    assert len({use.name for use in TABLE}) == len(TABLE)
