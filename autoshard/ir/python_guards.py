"""Python values that a trace relied on, besides tensors: they are checked before a later call runs its program.

Code of a model reads attributes (`self.scale`, `dropout.p`, a configuration), submodules, hooks and methods, and the
trace has them built in. A guard remembers who held what, and compares by identity first, so that a check costs
microseconds; values that are no longer the same object are compared by type and value.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import is_
from typing import Any

import torch

MISSING = enum.Enum("Missing", "NAME").NAME  # type: ignore[attr-defined]
"""Stands for the value of a name that a namespace does not have."""

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, slice, range, types.EllipsisType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of values that are compared by type and value."""

CONTAINERS = (dict, list, set, tuple)


@dataclass(frozen=True, slots=True)
class Namespace:
    """The type of an object, and what its `vars` held under some names.

    Args:
        title: the object in the user's words: "layers.0", or "" for the model itself.
        holder: the object: a module, a class, or what holds settings.
        names: the names that were looked up.
        values: what was found, `MISSING` where there was nothing.
    """

    title: str
    holder: Any
    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, title: str, holder: Any, names: Iterable[str]) -> Namespace:
        """Look up the values that the object holds now."""
        names = tuple(names)
        held = vars(holder)
        return cls(title, holder, type(holder), names, tuple(held.get(name, MISSING) for name in names))

    def found(self) -> dict[str, Any]:
        """Names to what was found."""
        return dict(zip(self.names, self.values, strict=True))

    def without(self, names: Collection[str]) -> Namespace:
        """The same, without some names."""
        found = {name: value for name, value in self.found().items() if name not in names}
        return replace(self, names=tuple(found), values=tuple(found.values()))

    def holds(self) -> bool:
        """Whether the object still holds the same."""
        found = map(self.holder.__dict__.get, self.names, repeat(MISSING))
        if type(self.holder) is self.kind and all(map(is_, found, self.values)):
            return True
        return not self.changes()

    def changes(self) -> list[str]:
        """The names under which the object holds something else."""
        held = vars(self.holder)
        changed = [] if type(self.holder) is self.kind else ["__class__"]
        pairs = zip(self.names, self.values, strict=True)
        changed += [name for name, value in pairs if not are_alike(held.get(name, MISSING), value)]
        return [f"{self.title}.{name}".removeprefix(".") for name in changed]


@dataclass(frozen=True, slots=True)
class Content:
    """What a dict, list or set held.

    Args:
        title: who holds it in the user's words: "layers.0.sizes".
        holder: the container.
        items: keys and values of a dict, elements of others.
    """

    title: str
    holder: Any
    items: tuple[Any, ...]

    @classmethod
    def of(cls, title: str, holder: Any) -> Content:
        """Take down the content of the container now."""
        return cls(title, holder, _items(holder))

    def holds(self) -> bool:
        """Whether the container still holds the same."""
        found = _items(self.holder)
        return len(found) == len(self.items) and (
            all(map(is_, found, self.items)) or all(map(are_alike, found, self.items))
        )

    def changes(self) -> list[str]:
        """The container, if it holds something else."""
        return [] if self.holds() else [self.title]


@dataclass(frozen=True, slots=True)
class PythonGuards:
    """All that a trace relied on in Python.

    Args:
        namespaces: objects and what they held under the names that were read.
        contents: containers among these values, and what they held.
        empties: containers that held nothing, each with its title.
        versions: tensors that are neither parameters, buffers nor inputs, each with its title and its version.
        settings: see `PythonUse`; what a call sets when these guards hold.
        of_another: they are on another model than the one that is called, of which it is a copy: they do not hold.
    """

    namespaces: tuple[Namespace, ...] = ()
    contents: tuple[Content, ...] = ()
    empties: tuple[Any, ...] = ()
    empty_titles: tuple[str, ...] = ()
    versions: tuple[tuple[str, torch.Tensor, int], ...] = ()
    settings: tuple[tuple[Any, str, Any], ...] = ()
    of_another: bool = False

    def hold(self) -> bool:
        """Whether a program that was traced under these guards is what a trace would give now."""
        return (
            not self.of_another
            and not any(self.empties)
            and all(item.holds() for item in self.namespaces)
            and all(item.holds() for item in self.contents)
            and all(tensor._version == version for _, tensor, version in self.versions)
        )

    def without(self, attributes: Collection[tuple[int, str]]) -> PythonGuards:
        """The same, without some attributes: `id` of an object, and a name."""
        holders = {holder for holder, _ in attributes}
        return replace(
            self,
            namespaces=tuple(
                item.without({name for holder, name in attributes if holder == id(item.holder)})
                if id(item.holder) in holders
                else item
                for item in self.namespaces
            ),
        )

    def changes(self) -> Sequence[str]:
        """The names of what changed, in the user's words: `layers.0.dropout.p`."""
        found = [name for item in (*self.namespaces, *self.contents) for name in item.changes()]
        found += [title for title, held in zip(self.empty_titles, self.empties, strict=True) if held]
        found += [title for title, tensor, version in self.versions if tensor._version != version]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class PythonUse:
    """What a trace read and set in Python.

    Args:
        names: for each object its title, itself and the names that were looked up in it.
        containers: dicts, lists and sets that were read as a whole, with their titles.
        settings: attributes that the call sets to plain values: object, name and value.
        notes: sentences for the user: what a compiled call does not do.
    """

    names: tuple[tuple[str, Any, tuple[str, ...]], ...] = ()
    containers: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[Any, str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def beside(self, other: PythonUse) -> PythonUse:
        """The same, and what another trace read."""
        names = {id(holder): (title, holder, found) for title, holder, found in self.names}
        for title, holder, found in other.names:
            mine = names.get(id(holder), (title, holder, ()))[2]
            names[id(holder)] = (title, holder, tuple(dict.fromkeys((*mine, *found))))
        containers = {id(item[1]): item for item in (*self.containers, *other.containers)}
        return replace(self, names=tuple(names.values()), containers=tuple(containers.values()))

    def guards(self, registered: Iterable[torch.Tensor]) -> PythonGuards:
        """Guards on what is there now; `registered` are tensors that the program takes as inputs."""
        collected = _Collected({id(tensor) for tensor in registered})
        for title, holder, names in self.names:
            collected.add(title, holder, names)
        for title, value in self.containers:
            collected.open(title, value)
        return replace(collected.guards(), settings=self.settings)


class _Collected:
    """Guards on what was read: the values themselves, and what containers and records among them hold."""

    def __init__(self, registered: set[int]) -> None:
        self._seen = registered
        self._namespaces: list[Namespace] = []
        self._contents: list[Content] = []
        self._empties: list[tuple[str, Any]] = []
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    def add(self, title: str, holder: Any, names: Iterable[str]) -> None:
        """Guard what an object holds under some names."""
        namespace = Namespace.of(title, holder, names)
        self._namespaces.append(namespace)
        for name, value in zip(namespace.names, namespace.values, strict=True):
            self.open(f"{title}.{name}".removeprefix("."), value)

    def open(self, title: str, value: Any) -> None:
        """Guard what a container, a record or a tensor holds; other values hold nothing that could change."""
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._versions.append((title, value, value._version))
        elif isinstance(value, CONTAINERS):
            self._open_container(title, value)
        elif is_record(value):
            self.add(title, value, vars(value))

    def _open_container(self, title: str, value: Any) -> None:
        if not isinstance(value, tuple):
            if not value:
                self._empties.append((title, value))
                return
            self._contents.append(Content.of(title, value))
        for item in value.values() if isinstance(value, dict) else value:
            self.open(title, item)

    def guards(self) -> PythonGuards:
        """The guards on all that was added."""
        titles, empties = zip(*self._empties, strict=True) if self._empties else ((), ())
        return PythonGuards(tuple(self._namespaces), tuple(self._contents), empties, titles, tuple(self._versions))


def are_alike(found: Any, value: Any) -> bool:
    """Whether two values are the same object, or plain ones (containers of them too) of equal type and value."""
    if found is value:
        return True
    if type(found) is not type(value):
        return False
    if isinstance(value, (float, complex)):
        return repr(found) == repr(value)  # NaN is NaN, and -0.0 is not 0.0
    if isinstance(value, PLAIN):
        return bool(found == value)
    if isinstance(value, types.MethodType):
        return bool(found.__func__ is value.__func__ and found.__self__ is value.__self__)
    if isinstance(value, CONTAINERS):
        one, two = _items(found), _items(value)
        return len(one) == len(two) and all(map(are_alike, one, two))
    return False


def is_record(value: Any, depth: int = 4) -> bool:
    """Whether an object only holds settings: plain values, functions and types, containers of them, other records."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or not held or isinstance(value, (type, torch.nn.Module, _CALLABLE)):
        return False
    return depth > 0 and all(_is_setting(item, depth - 1) for item in held.values())


def _is_setting(value: Any, depth: int) -> bool:
    if isinstance(value, (*PLAIN, type, _CALLABLE)):
        return True
    if isinstance(value, CONTAINERS):
        return depth > 0 and all(_is_setting(item, depth - 1) for item in _items(value))
    return is_record(value, depth)


_CALLABLE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


def _items(container: Any) -> tuple[Any, ...]:
    if isinstance(container, Mapping):
        return (*container.keys(), *container.values())
    return tuple(container)
