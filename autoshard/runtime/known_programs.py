"""The programs that a module has compiled, by the key of their calls, up to a maximum number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from autoshard.runtime.executable import Executable


class KnownPrograms:
    """Programs by a key of the calls that they may serve, at most `most` of them.

    Beyond that, a program of the least recently used key is dropped, and the memory of its graphs, plan and kernels is
    freed. It is compiled a second time when its call returns.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._programs: OrderedDict[Hashable, list[Executable]] = OrderedDict()

    def __iter__(self) -> Iterator[Executable]:
        return (executable for known in self._programs.values() for executable in known)

    def __len__(self) -> int:
        return sum(map(len, self._programs.values()))

    def find(self, key: Hashable, serves: Callable[[Executable], bool]) -> Executable | None:
        """The most recently used program of a key for which `serves` is true; None if there is none."""
        known = self._programs.get(key, [])
        found = next((executable for executable in reversed(known) if serves(executable)), None)
        if found is not None:
            self._use(key, found)
        return found

    def of(self, key: Hashable) -> tuple[Executable, ...]:
        """The programs of a key."""
        return tuple(self._programs.get(key, ()))

    def add(self, key: Hashable, executable: Executable) -> None:
        """Add a program, unless it is known."""
        known = self._programs.setdefault(key, [])
        if all(item is not executable for item in known):
            known.append(executable)
        self._use(key, executable)
        while len(self) > self.most:
            self._forget_one()

    def for_a_copy(self) -> KnownPrograms:
        """The programs for a copy of their model."""
        copy = KnownPrograms(self.most)
        for key, known in self._programs.items():
            copy._programs[key] = [executable.for_a_copy() for executable in known]
        return copy

    def _use(self, key: Hashable, executable: Executable) -> None:
        known = self._programs[key]
        known.append(known.pop(next(i for i, item in enumerate(known) if item is executable)))
        self._programs.move_to_end(key)

    def _forget_one(self) -> None:
        key, known = next(iter(self._programs.items()))
        del known[0]
        if not known:
            del self._programs[key]
