"""`KnownPrograms`: a cache of the programs that a module has compiled, by the keys of the calls that they serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from autoshard.runtime.executable import Executable


class KnownPrograms:
    """A cache of at most `most` programs, by the keys of calls (`key_of`). A key may have several programs.

    If a program is added beyond `most`, a program of the least recently used key is dropped. The memory of its graphs,
    plan and kernels is freed. The next call that needs the dropped program compiles it again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._programs: OrderedDict[Hashable, list[Executable]] = OrderedDict()

    def __iter__(self) -> Iterator[Executable]:
        return (executable for known in self._programs.values() for executable in known)

    def __len__(self) -> int:
        return sum(map(len, self._programs.values()))

    def find(self, key: Hashable, serves: Callable[[Executable], bool]) -> Executable | None:
        """Return the most recently used program of a key for which `serves` is true; None if there is none."""
        known = self._programs.get(key, [])
        found = next((executable for executable in reversed(known) if serves(executable)), None)
        if found is not None:
            self._use(key, found)
        return found

    def of(self, key: Hashable) -> tuple[Executable, ...]:
        """Return all programs of a key, the most recently used last."""
        return tuple(self._programs.get(key, ()))

    def add(self, key: Hashable, executable: Executable) -> None:
        """Add a program under a key, unless the key has it, and mark it as the most recently used."""
        known = self._programs.setdefault(key, [])
        if all(item is not executable for item in known):
            known.append(executable)
        self._use(key, executable)
        while len(self) > self.most:
            self._forget_one()

    def for_a_copy(self) -> KnownPrograms:
        """Return a cache with the same programs for a copy of the model (`Executable.for_a_copy`)."""
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
