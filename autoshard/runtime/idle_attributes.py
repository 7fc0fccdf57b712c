"""Attributes that change from call to call and do not matter: numbers that are read, but not for tensors.

A call that logs `self.step` reads it, so each new value is traced again. Once three values gave the same program, other
ones are tried, small and large; where the program stays the same for all, the attribute is no longer looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autoshard.errors import AutoshardError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.program import Program
from autoshard.ir.python_guards import PythonGuards, PythonUse

_TRIED: dict[type, tuple[Any, ...]] = {
    int: (0, 1, -1, 2, 10**3, 10**6, 10**9),
    float: (0.0, 1.0, -1.0, 0.5, 1e-3, 1e3, 1e9),
}

Trace = Callable[[], Program]
"""Traces a call again."""


class Attribute(NamedTuple):
    """An attribute of an object, which has a title."""

    title: str
    holder: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others."""
        return id(self.holder), self.name


@dataclass(slots=True)
class IdleAttributes:
    """What is known of the attributes that one program's calls read.

    Args:
        idle: they make no difference.
        tried: they were looked into, and are kept alive.
        use: what traces read while values were tried: with another value a call may read other attributes.
    """

    idle: set[tuple[int, str]] = field(default_factory=set)
    tried: dict[tuple[int, str], Attribute] = field(default_factory=dict)
    use: PythonUse = field(default_factory=PythonUse)

    def guards(self, use: PythonUse, registered: Iterable[torch.Tensor]) -> PythonGuards:
        """The guards after a trace, without the attributes that make no difference."""
        return use.beside(self.use).guards(registered).without(self.idle)

    def look(self, states: Sequence[PythonGuards], expected: str, trace: Trace) -> Iterator[str]:
        """Try other values of numbers that differ in the last states of a program and now; says what was found.

        Args:
            states: for which traces gave the same program, newest last; now, a trace gave it too.
            expected: the fingerprint of the program.
            trace: traces the call, with the model as it is.
        """
        for item in list(_changing(states, self.tried)):
            self.tried[item.key] = item
            path = f"{item.title}.{item.name}".removeprefix(".")
            if self._is_idle(item, expected, trace):
                self.idle.add(item.key)
                yield (
                    f"{path} changes from call to call, and the program was the same for all values that were tried: "
                    "it is no longer looked at."
                )
            else:
                yield (
                    f"{path} changes from call to call, and the program depends on it: the call is traced anew for "
                    "each of its values. Pass it as a tensor, or make it a buffer."
                )

    def _is_idle(self, item: Attribute, expected: str, trace: Trace) -> bool:
        now = getattr(item.holder, item.name)
        try:
            for value in _TRIED[type(now)]:
                setattr(item.holder, item.name, value)
                program = trace()
                if fingerprint(program) != expected:
                    return False
                self.use = self.use.beside(program.python)
        except (AutoshardError, AttributeError, TypeError):
            return False  # the model does not take the value, or the object takes none
        finally:
            vars(item.holder)[item.name] = now
        return True


def _changing(states: Sequence[PythonGuards], tried: Collection[tuple[int, str]]) -> Iterator[Attribute]:
    """Numbers with a value of their own in each of the last two states and now."""
    if len(states) < 2 or any(state.of_another for state in states[-2:]):
        return
    before = {id(item.holder): item.found() for item in states[-2].namespaces}
    for namespace in states[-1].namespaces:
        for name, value in namespace.found().items():
            if type(value) not in _TRIED or (id(namespace.holder), name) in tried:
                continue
            values = [value, vars(namespace.holder).get(name), before.get(id(namespace.holder), {}).get(name)]
            if all(type(item) is type(value) for item in values) and len(set(values)) == len(values):
                yield Attribute(namespace.title, namespace.holder, name)
