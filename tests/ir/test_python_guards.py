"""Guards on Python values that a trace has read: they hold until a value changes."""

from __future__ import annotations

import array
from collections import Counter, OrderedDict, UserList, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.ir.python_guards import PythonGuards, PythonUse
from autoshard.ir.python_values import are_alike, is_record

NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "value", "alike"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (NAN, float("nan"), True),
        ([1, (2, "a")], [1, (2, "a")], True),
        ({"a": 1}, {"a": True}, False),
        (torch.float32, torch.float16, False),
        (object(), object(), False),
        (torch.ones(1), torch.ones(1), False),
        ("".join(["a", "b"]).__len__, "ab".__len__, False),
    ],
)
def test_values_are_compared_by_type_and_value(found: Any, value: Any, alike: bool) -> None:
    """Plain values and their containers are compared by type and value, other objects by identity."""
    assert are_alike(found, value) is alike


def test_what_a_record_holds_is_guarded_in_depth() -> None:
    """Settings in nested objects and lists are guarded, and so are plain tensors, dicts and None. Parameters, and
    objects with other contents, are not."""
    settings = SimpleNamespace(inner=SimpleNamespace(sizes=[1, {"a": 2}]))
    other = SimpleNamespace(data=object(), count=0)
    holder = SimpleNamespace(settings=settings, other=other, table=torch.ones(2), weight=torch.ones(2), hooks={})
    guards = PythonUse((("model", holder, ("settings", "other", "table", "weight", "hooks", "none")),)).guards(
        [holder.weight]
    )
    other.count = 1
    holder.weight.mul_(2)
    assert guards.hold()
    settings.inner.sizes[1]["a"] = 3
    assert not guards.hold()
    assert guards.changes() == ("model.settings.inner.sizes",)
    settings.inner.sizes[1]["a"] = 2
    assert guards.hold()
    holder.table.mul_(2)
    holder.hooks["new"] = print
    holder.none = None
    assert guards.changes() == ("model.none", "model.hooks", "model.table")


class Settings:
    """An object with the given attributes."""

    kind = "settings"

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def _with_attributes() -> None:
    """A function with a number as an attribute."""


_with_attributes.size = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "holds_settings"),
    [
        (Settings(size=1, inner=Settings(names=["a"])), True),
        (Settings(size=1, data=object()), False),
        (Settings(), False),
        (Settings(inner=Settings()), False),
        (Settings, False),
        (torch.nn.Identity(), False),
        (_with_attributes, False),
        (3, False),
    ],
)
def test_records_hold_settings_alone(value: Any, holds_settings: bool) -> None:
    """An object counts as settings if it holds plain values or settings, and a type, function, module or empty
    object does not."""
    assert is_record(value) is holds_settings


class Slotted:
    """An object with settings in slots."""

    __slots__ = ("scale", "sizes", "unset")

    def __init__(self) -> None:
        self.scale, self.sizes = 1.0, [1]


class SlottedBeside(Slotted):
    """An object with a dict and a private slot beside inherited slots."""

    __slots__ = ("__dict__", "__hidden")

    def __init__(self) -> None:
        super().__init__()
        self.__hidden = 1
        self.beside = 1

    def hide(self) -> None:
        self.__hidden = 2


def _guards(value: Any) -> PythonGuards:
    holder = SimpleNamespace(value=value)
    guards = PythonUse((("", holder, ("value",)),)).guards([])
    assert guards.hold()
    assert not guards.changes()
    return guards


BIG = 5 << 20
"""More bytes than a call compares."""

IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "deque": (lambda: deque([1, 2]), lambda held: held.append(3)),
    "full deque": (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "empty deque": (deque, lambda held: held.append(3)),
    "deque in a list": (lambda: [deque([[1]])], lambda held: held[0][0].append(3)),
    "frozenset of nothing but a tuple of a list": (lambda: (frozenset({1}), [1]), lambda held: held[1].append(1)),
    "mapping proxy": (lambda: MappingProxyType({"a": [1]}), lambda held: held["a"].append(1)),
    "Counter": (lambda: Counter("ab"), lambda held: held.update("a")),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "UserList": (lambda: UserList([1]), lambda held: held.append(2)),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.__setitem__(0, 7)),
    "bytearray that grows": (lambda: bytearray(b"ab"), lambda held: held.append(0)),
    "empty bytearray": (bytearray, lambda held: held.append(0)),
    "large bytearray": (lambda: bytearray(BIG), lambda held: held.__setitem__(slice(None), b"a" * BIG)),
    "array": (lambda: array.array("d", [1.0, 2.0]), lambda held: held.__setitem__(1, -2.0)),
    "array that grows": (lambda: array.array("i", [1]), lambda held: held.append(1)),
    "NumPy array": (lambda: np.zeros((3, 4)), lambda held: held.__setitem__((2, 3), -0.0)),
    "NumPy array without dims": (lambda: np.array(1.0), lambda held: held.fill(2)),
    "transposed NumPy array": (lambda: np.zeros((3, 4)).T[1:], lambda held: held.__setitem__((2, 2), 1)),
    "NumPy array of another shape": (lambda: np.zeros((3, 4)), lambda held: setattr(held, "shape", (4, 3))),
    "NumPy array of texts": (lambda: np.array(["a", "b"]), lambda held: held.__setitem__(1, "c")),
    "NumPy array of objects": (lambda: np.array([{}, [1]], dtype=object), lambda held: held[1].append(2)),
    "NumPy array of fields": (lambda: np.zeros(2, "i4,f8"), lambda held: held["f1"].__setitem__(1, 2.0)),
    "large NumPy array": (lambda: np.zeros((5, BIG // 5)), lambda held: np.add(held, 1, out=held)),
    "NumPy array in a dict": (lambda: {"a": np.zeros(3)}, lambda held: held["a"].fill(1)),
    "slots": (Slotted, lambda held: setattr(held, "scale", 2.0)),
    "slot that is set": (Slotted, lambda held: setattr(held, "unset", 0)),
    "slot that is deleted": (Slotted, lambda held: delattr(held, "scale")),
    "list in a slot": (Slotted, lambda held: held.sizes.append(2)),
    "slot of a base class": (SlottedBeside, lambda held: setattr(held, "scale", 2.0)),
    "attribute beside slots": (SlottedBeside, lambda held: setattr(held, "beside", 2)),
    "hidden slot": (SlottedBeside, lambda held: held.hide()),
    "slots in slots": (lambda: SimpleNamespace(inner=Slotted()), lambda held: setattr(held.inner, "scale", 3.0)),
    "tensor": (lambda: torch.ones(3), lambda held: held.mul_(2)),
    "tensor by data": (lambda: torch.ones(3), lambda held: held.data.mul_(2)),
    "tensor by numpy": (lambda: torch.ones(3), lambda held: held.numpy().fill(2)),
    "tensor by its storage": (lambda: torch.ones(3), lambda held: held.untyped_storage().fill_(1)),
    "tensor with other data": (lambda: torch.ones(3), lambda held: setattr(held, "data", torch.ones(3) * 2)),
    "large tensor with other data": (lambda: torch.ones(BIG), lambda held: setattr(held, "data", torch.ones(BIG))),
    "large tensor by data": (lambda: torch.ones(2, 2, BIG // 16), lambda held: held.data.mul_(2)),
    "bfloat16 tensor by data": (lambda: torch.ones(3, dtype=torch.bfloat16), lambda held: held.data.mul_(2)),
    "flag by data": (lambda: torch.tensor(True), lambda held: held.data.logical_not_()),
    "complex tensor by data": (lambda: torch.ones(3, dtype=torch.complex128), lambda held: held.data.mul_(1j)),
    "transposed tensor by data": (lambda: torch.ones(3, 4).T, lambda held: held.data[1:].mul_(2)),
    "tensor with a gradient by data": (lambda: torch.ones(3, requires_grad=True), lambda held: held.data.mul_(2)),
    "parameter in a list by data": (lambda: [nn.Parameter(torch.ones(3))], lambda held: held[0].data.mul_(2)),
    "tensor in a setting": (lambda: SimpleNamespace(table=torch.ones(3)), lambda held: held.table.mul_(2)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_is_noticed(name: str) -> None:
    """A change in place breaks the guard, and `changes` names the value."""
    make, change = IN_PLACE[name]
    value = make()
    guards = _guards(value)
    change(value)
    assert not guards.hold()
    assert guards.changes()[0].startswith("value")


UNTOUCHED: dict[str, Callable[[], Any]] = {
    "array that may grow": lambda: bytearray(b"a"),
    "NumPy number": lambda: np.int64(3),
    "NaN in an array": lambda: np.array([NAN]),
    "NaN in a tensor": lambda: torch.tensor(NAN),
    "tensor of inference": lambda: _in_inference_mode(),
    "tensor on meta": lambda: torch.ones(3, device="meta"),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "float8 tensor": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "empty array": lambda: np.zeros((0, 3)),
    "path": lambda: Path("a"),
}


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_is_not_changed_holds(name: str) -> None:
    """Guards hold for values that nobody changes, and a bytearray can still grow after the checks."""
    value = UNTOUCHED[name]()
    guards = _guards(value)
    str(value)
    assert guards.hold()
    if isinstance(value, bytearray):
        value.append(1)


@pytest.mark.parametrize("make", [lambda: np.arange(3), lambda: np.float32(0.5), lambda: bytearray(b"a"), Fraction])
def test_an_equal_value_in_its_place_is_alike(make: Callable[[], Any]) -> None:
    """A new equal object passes the guard, and a change in a new array breaks it."""
    holder = SimpleNamespace(value=make())
    guards = PythonUse((("", holder, ("value",)),)).guards([])
    holder.value = make()
    assert guards.hold()
    if isinstance(holder.value, np.ndarray):
        holder.value[1] = 5
        assert not guards.hold()
