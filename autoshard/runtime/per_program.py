"""Things made once for each program that runs, and given back with the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from autoshard.runtime.executable import Executable

Made = TypeVar("Made")


class PerProgram(Generic[Made]):
    """Things made for programs, kept while `KnownPrograms`, or a caller, keeps the program.

    They must not refer to the program, or neither is ever given back. Copies of whoever holds them make them anew.
    """

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Executable, Made] = WeakKeyDictionary()

    def get(self, executable: Executable) -> Made | None:
        """The thing made for a program; None if there is none."""
        return self._made.get(executable)

    def get_or_make(self, executable: Executable, make: Callable[[], Made]) -> Made:
        """The thing made for a program; made now if there is none."""
        found = self._made.get(executable)
        if found is None:
            found = self._made[executable] = make()
        return found

    def keep(self, executable: Executable, made: Made) -> None:
        """Keep what was made for a program."""
        self._made[executable] = made

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProgram, ()
