"""`PerProgram`: a table of values that are made once for each program, and freed with the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from autoshard.runtime.executable import Executable

Made = TypeVar("Made")


class PerProgram(Generic[Made]):
    """A table from programs to values. An entry is dropped when no other object holds its program.

    A value must not refer to its program, or neither is ever freed. A copy of the table starts empty.
    """

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Executable, Made] = WeakKeyDictionary()

    def get(self, executable: Executable) -> Made | None:
        """Return the value of a program; None if there is none yet."""
        return self._made.get(executable)

    def get_or_make(self, executable: Executable, make: Callable[[], Made]) -> Made:
        """Return the value of a program; if it has none, call `make` and keep its result."""
        found = self._made.get(executable)
        if found is None:
            found = self._made[executable] = make()
        return found

    def keep(self, executable: Executable, made: Made) -> None:
        """Set the value of a program."""
        self._made[executable] = made

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProgram, ()
