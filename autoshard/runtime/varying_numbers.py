"""Numbers of a model that change from call to call: calls are compared by what Python does with them.

A call that logs `self.step` reads it, so each new value is traced again. Once three values gave the same program, the
call is traced with watched numbers in place of such attributes (`ir/watched_numbers.py`). The conditions that they note
take the place of their values among the guards: `step % 10 == 5` is false.
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
"""A number with as many values changes from call to call."""

Trace = Callable[[], Program]
"""Traces a call again."""


@dataclass(slots=True)
class VaryingNumbers:
    """The numbers that calls of one program read.

    Args:
        watched: they change, and Python's use of them is guarded.
        exact: they change, and are compared by value; they are kept alive.
        conditions: what the last trace did with those that are watched.
    """

    watched: dict[tuple[int, str], Attribute] = field(default_factory=dict)
    exact: dict[tuple[int, str], Attribute] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    def guards(self, use: PythonUse, registered: Iterable[torch.Tensor]) -> PythonGuards:
        """The guards after a trace, with conditions in place of the values of watched numbers."""
        return replace(use.guards(registered).without(self.watched), conditions=self.conditions)

    def look(self, states: Sequence[PythonGuards], expected: str, trace: Trace) -> Iterator[str]:
        """Watch the numbers that differ in the last states of a program and now; says what was found.

        Args:
            states: for which traces gave the same program, newest last; now, a trace gave it too.
            expected: the fingerprint of the program.
            trace: traces the call, with the model as it is.
        """
        new = {item.key: item for item in _changing(states, {*self.watched, *self.exact})}
        asked = {**self.watched, **new}
        found = _watch(asked.values(), expected, trace)
        if found is None and len(asked) > 1:
            asked = {key: item for key, item in asked.items() if _watch([item], expected, trace) is not None}
            found = _watch(asked.values(), expected, trace)
        self.conditions = found or ()
        by_value = {item.fixed.key for item in self.conditions if item.fixed is not None}
        taken = {} if found is None else asked
        for key, item in new.items():
            if key in taken and key not in by_value:
                yield (
                    f"{item.path} changes from call to call: a call is now traced anew where a comparison or a "
                    "conversion of it gives another result, and not for each of its values."
                )
                continue
            yield (
                f"{item.path} changes from call to call, and the program depends on it: the call is traced anew for "
                "each of its values. Pass it as a tensor, or make it a buffer."
            )
        lost = {key: item for key, item in {**self.watched, **new}.items() if key not in taken}
        lost |= {key: item for key, item in new.items() if key in by_value}
        self.exact |= lost
        self.watched = {key: item for key, item in taken.items() if key not in lost}


def _watch(attributes: Collection[Attribute], expected: str, trace: Trace) -> tuple[Condition, ...] | None:
    """Conditions that a trace puts on numbers; None where the trace does not take watched numbers."""
    if not attributes:
        return ()
    try:
        with watching(attributes) as watch:
            is_same = fingerprint(trace()) == expected
    except (AutoshardError, AttributeError, TypeError):
        return None
    return watch.conditions if is_same and not watch.is_exhausted and not watch.asks_for_types else None


def _changing(states: Sequence[PythonGuards], known: Collection[tuple[int, str]]) -> Iterator[Attribute]:
    """Numbers with three values in the remembered states and now."""
    found: dict[tuple[int, str], tuple[Attribute, set[Any]]] = {}
    for namespace in (item for state in states if not state.of_another for item in state.namespaces):
        now = vars(namespace.holder)
        for name, value in namespace.found().items():
            item = Attribute(namespace.title, namespace.holder, name, type(value))
            if item.key not in known and type(value) in KINDS and type(now.get(name)) is type(value):
                found.setdefault(item.key, (item, {now[name]}))[1].add(value)
    for item, values in found.values():
        if len(values) >= _VALUES:
            yield item
