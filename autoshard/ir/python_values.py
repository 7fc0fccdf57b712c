"""Functions that tell which Python values guards can compare, read the content of values, and compare values."""

from __future__ import annotations

import array
import enum
import hashlib
import types
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MISSING = enum.Enum("Missing", "NAME").NAME  # type: ignore[attr-defined]
"""Stands for the value of a name that a namespace lacks."""

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, slice, range, types.EllipsisType, Fraction, PurePath,
    torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic,
)  # fmt: skip
"""Types whose values are compared by type and value."""

CONTAINERS = (dict, types.MappingProxyType, list, set, tuple, frozenset, deque)

MEMORIES = (bytearray, array.array, np.ndarray)
"""Types that store numbers contiguously and may change in place."""

_CALLABLE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


def is_container(value: Any) -> bool:
    """Whether a value contains other values, such as a list or an array of objects."""
    return isinstance(value, CONTAINERS) or (isinstance(value, np.ndarray) and value.dtype.hasobject)


def items_of(value: Any) -> tuple[Any, ...]:
    """Return a mapping's keys and values, another container's elements, or the values of an object's slots."""
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    if isinstance(value, np.ndarray):
        return (value.shape, *value.ravel().tolist())
    return tuple(value) if isinstance(value, CONTAINERS) else tuple(slots_of(value).values())


def slots_of(value: Any) -> dict[str, Any]:
    """Return the values of an object's `__slots__` by name, without empty slots."""
    found = {}
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            own = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if own not in ("__dict__", "__weakref__") and hasattr(value, own):
                found[own] = getattr(value, own)
    return found


def as_array(value: Any) -> NDArray[Any] | None:
    """Return an array as it is, and a tensor as an array on the tensor's memory.

    The array of a tensor has integers of the same bits, because numpy has no bfloat16. None for a tensor on another
    device than the CPU, and for a quantised, sparse or lazily conjugated tensor.
    """
    if isinstance(value, np.ndarray):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu" or value.is_quantized:
        return None
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    return real.view(_INTEGERS[real.itemsize]).numpy()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def are_alike(found: Any, value: Any) -> bool:
    """Whether two values are one object, or of equal type and content (plain values, arrays, containers of them)."""
    if found is value:
        return True
    if type(found) is not type(value):
        return False
    if isinstance(value, (float, complex)):
        return repr(found) == repr(value)  # NaN is NaN, and -0.0 is not 0.0
    if isinstance(value, np.generic):
        return found.dtype == value.dtype and found.tobytes() == value.tobytes()
    if isinstance(value, PLAIN):
        return bool(found == value)
    if isinstance(value, types.MethodType):
        return bool(found.__func__ is value.__func__ and found.__self__ is value.__self__)
    if is_container(value):
        one, two = items_of(found), items_of(value)
        return len(one) == len(two) and all(map(are_alike, one, two))
    if isinstance(value, MEMORIES):
        mine, other = np.asarray(found), np.asarray(value)
        return mine.dtype == other.dtype and mine.shape == other.shape and mine.tobytes() == other.tobytes()
    return False


def held_by(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, from its dict and its slots."""
    held = getattr(value, "__dict__", None)
    return {**(held if isinstance(held, dict) else {}), **slots_of(value)}


def is_record(value: Any, depth: int = 4) -> bool:
    """Whether an object only holds settings: plain values, arrays, tensors, functions, types, containers, records.

    Records and containers may lie within each other at most `depth` deep.
    """
    if isinstance(value, (type, torch.Tensor, torch.nn.Module, *_CALLABLE, *MEMORIES)):
        return False
    held = held_by(value)
    return bool(held) and depth > 0 and all(is_setting(item, depth - 1) for item in held.values())


def content_text(value: Any) -> str:
    """Return a text of a setting's content, different for different content.

    For a tensor, a function or a type, the text has only its kind.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (type, torch.Tensor, *_CALLABLE)):
        return f"{type(value).__qualname__}"
    if is_container(value):
        return f"{type(value).__name__}({', '.join(map(content_text, items_of(value)))})"
    if isinstance(value, MEMORIES):
        found = np.asarray(value)
        return f"{type(value).__name__}({found.dtype}, {found.shape}, {hashlib.sha256(found.tobytes()).hexdigest()})"
    return (
        f"{type(value).__name__}({', '.join(f'{name}={content_text(item)}' for name, item in held_by(value).items())})"
    )


def is_setting(value: Any, depth: int = 4) -> bool:
    """Whether a value is plain, an array, a tensor, a function or a type, or a container or record of such values.

    Records and containers may lie within each other at most `depth` deep.
    """
    if isinstance(value, (*PLAIN, type, torch.Tensor, *_CALLABLE)):
        return True
    if is_container(value):
        return depth > 0 and all(is_setting(item, depth - 1) for item in items_of(value))
    return isinstance(value, MEMORIES) or is_record(value, depth)
