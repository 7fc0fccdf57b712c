"""Avoid a new trace for each value of a number of the model that changes from call to call, such as `self.step`.

When three values have given the same program, the call is traced with watched numbers in place of the attributes that
changed (`ir/watched_numbers.py`). A watched number records the conditions that Python evaluates on it. Later calls
check these conditions instead of the value. So a program serves every step for which `step % 10 == 5` is false.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.errors import AutoshardError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.program import Program
from autoshard.ir.python_guards import PythonGuards, PythonUse
from autoshard.ir.watched_numbers import KINDS, Attribute, Condition, watching

_VALUES = 3
"""A number with this many values counts as changing from call to call."""

Trace = Callable[[], Program]
"""Function that traces the present call again, and returns its program."""


@dataclass(slots=True)
class VaryingNumbers:
    """The numbers in attributes that one program's calls read, and that change from call to call.

    Keys are (`id` of the object, name of the attribute).

    Args:
        watched: numbers of which later calls check conditions.
        exact: numbers of which later calls check the values. Their objects are kept alive.
        conditions: the conditions that Python evaluated on the watched numbers in the last trace.
    """

    watched: dict[tuple[int, str], Attribute] = field(default_factory=dict)
    exact: dict[tuple[int, str], Attribute] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    def guards(self, use: PythonUse, registered: Iterable[torch.Tensor]) -> PythonGuards:
        """Return the checks that later calls make, after a trace that read the Python values `use`.

        A later call checks the conditions on watched numbers, and the values of everything else. `registered` are the
        model's parameters and buffers, which are not checked.
        """
        return replace(use.guards(registered).without(self.watched), conditions=self.conditions)

    def look(self, states: Sequence[PythonGuards], expected: str, trace: Trace) -> Iterator[str]:
        """Watch the numbers that have differed between traces with the same program; yield notes to log.

        Args:
            states: the guards of earlier traces that gave this program. The present trace gave it too.
            expected: the program's fingerprint.
            trace: traces the call with the present model.
        """
        new = {item.key: item for item in _changing(states, {*self.watched, *self.exact})}
        tried = {**self.watched, **new}
        found = _watch(tried.values(), expected, trace)
        if found is None and len(tried) > 1:
            tried = {key: item for key, item in tried.items() if _watch([item], expected, trace) is not None}
            found = _watch(tried.values(), expected, trace)
        self.conditions = found or ()
        by_value = {item.fixed.key for item in self.conditions if item.fixed is not None}
        taken = {} if found is None else tried
        for key, item in new.items():
            if key in taken and key not in by_value:
                yield (
                    f"{item.path} changes from call to call: from now on, a call is only traced if a comparison or a "
                    "conversion of the number gives another result, and not for each of its values."
                )
                continue
            yield (
                f"{item.path} changes from call to call, and the program depends on it: the call is traced for each of "
                "its values. Pass it as a tensor, or make it a buffer."
            )
        lost = {key: item for key, item in {**self.watched, **new}.items() if key not in taken}
        lost |= {key: item for key, item in new.items() if key in by_value}
        self.exact |= lost
        self.watched = {key: item for key, item in taken.items() if key not in lost}


def _watch(attributes: Collection[Attribute], expected: str, trace: Trace) -> tuple[Condition, ...] | None:
    """Return the conditions that Python evaluates on these numbers in a trace.

    Return None if the trace fails, needs their values, or gives another program than `expected`.
    """
    if not attributes:
        return ()
    try:
        with watching(attributes) as watch:
            is_same = fingerprint(trace()) == expected
    except (AutoshardError, AttributeError, TypeError):
        return None
    return watch.conditions if is_same and not watch.is_exhausted and not watch.asks_for_types else None


def _changing(states: Sequence[PythonGuards], known: Collection[tuple[int, str]]) -> Iterator[Attribute]:
    """Yield the attributes, except `known`, that have at least three values in the remembered states and now."""
    found: dict[tuple[int, str], tuple[Attribute, set[Any]]] = {}
    for guard in (item for state in states if not state.of_another for item in state.attribute_guards):
        now = vars(guard.holder)
        for name, value in guard.found().items():
            item = Attribute(guard.title, guard.holder, name, type(value))
            if item.key not in known and type(value) in KINDS and type(now.get(name)) is type(value):
                found.setdefault(item.key, (item, {now[name]}))[1].add(value)
    for item, values in found.values():
        if len(values) >= _VALUES:
            yield item
