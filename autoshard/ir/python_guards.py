"""Guards on Python values that a trace relied on, which later calls check before they run the program.

A model's code reads attributes (`self.scale`, `dropout.p`, a configuration), submodules, hooks and methods, and the
trace has their values built in. A guard remembers an object, a name and the value. The guard first compares the present
value by identity, which costs microseconds, and then by type and content.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.ir.python_values import (
    CONTAINERS,
    MEMORIES,
    MISSING,
    PLAIN,
    are_alike,
    as_array,
    is_container,
    is_record,
    items_of,
    slots_of,
)
from autoshard.ir.watched_numbers import Condition

_COMPARED_BYTES = 4 << 20
"""Most bytes of arrays and tensors that a call compares, in total; comparing them takes 0.25 ms."""

_SAMPLED = 2048
"""Number of sampled elements of an array or tensor that does not fit into the rest of `_COMPARED_BYTES`."""


@dataclass(frozen=True, slots=True)
class AttributeGuard:
    """Guard on an object's type, and on the values under some names in its `vars`.

    Args:
        title: name of the object for messages: "layers.0", or "" for the model itself.
        holder: the object: a module, a class, or an object with settings.
        names: names that the trace looked up.
        values: the found values, with `MISSING` for absent names.
    """

    title: str
    holder: Any
    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, title: str, holder: Any, names: Iterable[str]) -> AttributeGuard:
        """Return a guard on the present type of the object `holder`, and on its present values under `names`."""
        names = tuple(names)
        held = vars(holder)
        return cls(title, holder, type(holder), names, tuple(held.get(name, MISSING) for name in names))

    def found(self) -> dict[str, Any]:
        """Return the attributes' values at the trace, by attribute name."""
        return dict(zip(self.names, self.values, strict=True))

    def without(self, names: Collection[str]) -> AttributeGuard:
        """Return the guard without the attributes in `names`."""
        found = {name: value for name, value in self.found().items() if name not in names}
        return replace(self, names=tuple(found), values=tuple(found.values()))

    def holds(self) -> bool:
        """Whether the object has the same type and values as in the trace."""
        found = map(self.holder.__dict__.get, self.names, repeat(MISSING))
        if type(self.holder) is self.kind and all(map(is_, found, self.values)):
            return True
        return not self.changes()

    def changes(self) -> list[str]:
        """Return the paths of the attributes that have changed since the trace, such as "layers.0.scale"."""
        held = vars(self.holder)
        changed = [] if type(self.holder) is self.kind else ["__class__"]
        pairs = zip(self.names, self.values, strict=True)
        changed += [name for name, value in pairs if not are_alike(held.get(name, MISSING), value)]
        return [f"{self.title}.{name}".removeprefix(".") for name in changed]


@dataclass(frozen=True, slots=True)
class ContentGuard:
    """Guard on the items of a dict (keys, then values), list, set, deque, array of objects or object with slots.

    `title` is the path of the container for messages: "layers.0.sizes".
    """

    title: str
    holder: Any
    items: tuple[Any, ...]

    @classmethod
    def of(cls, title: str, holder: Any) -> ContentGuard:
        """Return a guard on the container's present content."""
        return cls(title, holder, items_of(holder))

    def holds(self) -> bool:
        """Whether the container has the same content as in the trace."""
        found = items_of(self.holder)
        return len(found) == len(self.items) and (
            all(map(is_, found, self.items)) or all(map(are_alike, found, self.items))
        )

    def changes(self) -> list[str]:
        """Return the container's title in a list if its content has changed since the trace, else an empty list."""
        return [] if self.holds() else [self.title]


@dataclass(frozen=True, slots=True)
class MemoryGuard:
    """Guard on the numbers in an array, a bytearray or a tensor.

    Args:
        title: path of the array or tensor for messages.
        form: shape and type of an array; for a tensor its version counter and the address of its memory.
        read: returns the bytes to compare: all, a sample, or none where the memory cannot be read.
        found: bytes that `read` returned in the trace.
        alias: keeps the memory of a tensor alive, so that no other tensor gets its address.
    """

    title: str
    holder: Any
    form: tuple[Any, ...]
    read: Callable[[], bytes]
    found: bytes
    alias: torch.Tensor | None

    @classmethod
    def of(cls, title: str, holder: Any, room: int) -> MemoryGuard:
        """Return a guard on all present numbers if they fit into `room` bytes, else on a sample."""
        alias = holder.detach() if isinstance(holder, torch.Tensor) else None
        read = _reader_of(holder, room)
        return cls(title, holder, _form_of(holder), read, read(), alias)

    def holds(self) -> bool:
        """Whether the compared numbers are the same as in the trace."""
        return _form_of(self.holder) == self.form and self.read() == self.found

    def changes(self) -> list[str]:
        """Return the title in a list if the compared numbers have changed since the trace, else an empty list."""
        return [] if self.holds() else [self.title]


def _form_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        has_memory = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        return (0 if value.is_inference() else value._version, value.data_ptr() if has_memory else 0)
    return (value.dtype, value.shape) if isinstance(value, np.ndarray) else (len(value),)


def _reader_of(value: Any, room: int) -> Callable[[], bytes]:
    if isinstance(value, (bytearray, array.array)):
        step = 1 if len(value) * memoryview(value).itemsize <= room else -(-len(value) // _SAMPLED)
        return lambda: bytes(memoryview(value)[::step])  # a kept view would stop the array from growing
    elements = as_array(value)
    if elements is None:
        return bytes
    return (elements if elements.nbytes <= room else _spread(elements)).tobytes


def _spread(elements: NDArray[Any]) -> NDArray[Any]:
    """Return a view of about `_SAMPLED` elements of an array, at even distances along its dims."""
    for dim in range(elements.ndim):
        if elements.size > _SAMPLED:
            step = min(elements.shape[dim], -(-elements.size // _SAMPLED))
            elements = elements[(*[slice(None)] * dim, slice(None, None, step))]
    return elements


@dataclass(frozen=True, slots=True)
class PythonGuards:
    """All Python values that a trace relied on. Each must be unchanged for a later call to run the same program.

    Args:
        attribute_guards: guards on the attributes that the trace read, one for each object.
        content_guards: guards on the containers among these attributes.
        empties: containers that were empty; `empty_titles` has their titles.
        memory_guards: guards on arrays, and on tensors that are neither parameters, buffers nor inputs.
        conditions: conditions on numbers whose use the trace recorded, such as `x > 2`, in place of comparing the
            numbers.
        settings: attributes that a call sets when the guards hold, each as (object, name, value).
        of_another: whether the guards were made for another model, of which the called model is a copy. Such guards
            never hold.
    """

    attribute_guards: tuple[AttributeGuard, ...] = ()
    content_guards: tuple[ContentGuard, ...] = ()
    empties: tuple[Any, ...] = ()
    empty_titles: tuple[str, ...] = ()
    memory_guards: tuple[MemoryGuard, ...] = ()
    conditions: tuple[Condition, ...] = ()
    settings: tuple[tuple[Any, str, Any], ...] = ()
    of_another: bool = False

    def hold(self) -> bool:
        """Whether all guarded values are as in the trace, so that a new trace would give the same program."""
        return (
            not self.of_another
            and not any(self.empties)
            and all(item.holds() for item in self.attribute_guards)
            and all(item.holds() for item in self.content_guards)
            and all(item.holds() for item in self.memory_guards)
            and all(item.holds() for item in self.conditions)
        )

    def without(self, attributes: Collection[tuple[int, str]]) -> PythonGuards:
        """Return the guards without the given attributes, each a pair (`id` of its object, name)."""
        holders = {holder for holder, _ in attributes}
        return replace(
            self,
            attribute_guards=tuple(
                item.without({name for holder, name in attributes if holder == id(item.holder)})
                if id(item.holder) in holders
                else item
                for item in self.attribute_guards
            ),
        )

    def changes(self) -> Sequence[str]:
        """Return the paths of all values that have changed since the trace, such as "layers.0.dropout.p"."""
        found = [name for item in (*self.attribute_guards, *self.content_guards) for name in item.changes()]
        found += [title for title, held in zip(self.empty_titles, self.empties, strict=True) if held]
        found += [name for item in (*self.memory_guards, *self.conditions) for name in item.changes()]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class PythonUse:
    """Python values that a trace read and set.

    Args:
        names: for each object, its title (a path such as "layers.0"), the object, and the names that the trace looked
            up in its `vars`.
        containers: dicts, lists and sets that the trace read as a whole, each as (its title, the container).
        settings: attributes that the call sets to plain values, each as (object, name, value).
        notes: sentences for the user about effects that a compiled call does not have.
        counting: paths of attributes that every call changes without effect on the result. They have no guards.
    """

    names: tuple[tuple[str, Any, tuple[str, ...]], ...] = ()
    containers: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[Any, str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    counting: frozenset[str] = frozenset()

    def guards(self, registered: Iterable[torch.Tensor]) -> PythonGuards:
        """Return guards on the present values of everything that the trace read.

        Tensors in `registered` get no guard, because the program takes them as inputs.
        """
        collected = _Collected({id(tensor) for tensor in registered}, self.counting)
        for title, holder, names in self.names:
            collected.add(title, holder, names)
        for title, value in self.containers:
            collected.open(title, value)
        return replace(collected.guards(), settings=self.settings)


class _Collected:
    def __init__(self, registered: set[int], counting: frozenset[str]) -> None:
        self._seen = registered
        self._counting = counting
        self._attributes: list[AttributeGuard] = []
        self._contents: list[ContentGuard] = []
        self._empties: list[tuple[str, Any]] = []
        self._memories: list[MemoryGuard] = []
        self._room = _COMPARED_BYTES

    def add(self, title: str, holder: Any, names: Iterable[str]) -> None:
        """Add guards on the values under `names` in the object's `vars`, and on the content of these values."""
        guard = AttributeGuard.of(title, holder, self._without_counting(title, names))
        self._attributes.append(guard)
        for name, value in zip(guard.names, guard.values, strict=True):
            self.open(f"{title}.{name}".removeprefix("."), value)

    def open(self, title: str, value: Any) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if is_container(value):
            self._open_container(title, value)
        elif isinstance(value, (torch.Tensor, *MEMORIES)):
            self._memories.append(MemoryGuard.of(title, value, self._room))
            self._room -= len(self._memories[-1].found)
        elif is_record(value):
            self._open_record(title, value)

    def _open_container(self, title: str, value: Any) -> None:
        if not isinstance(value, (tuple, frozenset)):
            if isinstance(value, CONTAINERS) and not value:
                self._empties.append((title, value))
                return
            self._contents.append(ContentGuard.of(title, value))
        for item in value.values() if isinstance(value, Mapping) else items_of(value):
            self.open(title, item)

    def _open_record(self, title: str, value: Any) -> None:
        if hasattr(value, "__dict__"):
            self.add(title, value, vars(value))
        slots = slots_of(value)
        guarded = self._without_counting(title, slots)
        if slots and len(guarded) == len(slots):
            self._contents.append(ContentGuard.of(title, value))
        for name in guarded:
            self.open(f"{title}.{name}", slots[name])

    def _without_counting(self, title: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if f"{title}.{name}".removeprefix(".") not in self._counting]

    def guards(self) -> PythonGuards:
        titles, empties = zip(*self._empties, strict=True) if self._empties else ((), ())
        attributes, contents = tuple(self._attributes), tuple(self._contents)
        return PythonGuards(attributes, contents, empties, titles, tuple(self._memories))
