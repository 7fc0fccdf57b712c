"""Write and read states without tensors as JSON, without pickle, so that reading runs no code.

A value that JSON knows is written as it is. Every other value is written as a JSON object with one key, the value's
kind: `{"tuple": [1, 2]}`. Kinds that are not listed here are written by `torch.save`, and
`torch.load(weights_only=True)` must be able to read them.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from autoshard.errors import CheckpointError
from autoshard.ir.read_json import parse


@dataclass(frozen=True, slots=True)
class Slot:
    """The placeholder of a tensor in a state: its name in the checkpoint, and whether it was a DTensor."""

    name: str
    is_sharded: bool


@dataclass(frozen=True, slots=True)
class StepCount:
    """A tensor of one element in which an optimizer counts steps."""

    value: float
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self) -> torch.Tensor:
        """Return the count as a tensor on the CPU, of the saved dtype and shape."""
        return torch.full(self.shape, self.value, dtype=self.dtype)


def packed(value: Any) -> bytes:
    """Return a value as JSON text in UTF-8.

    Raises:
        CheckpointError: the value contains an object that only pickle can write, or contains itself.

    Example:
        >>> packed({"betas": (0.9, 0.95)})
        b'{"dict":{"betas":{"tuple":[0.9,0.95]}}}'
    """
    try:
        return json.dumps(_encoded(value), separators=(",", ":"), allow_nan=False).encode()
    except RecursionError as error:
        raise CheckpointError(
            f"A state of type {type(value).__name__} contains itself, or containers nested too deeply. Give a flatter "
            "state in state_dict."
        ) from error


def unpacked(data: bytes) -> Any:
    """Return the value from the text that `packed` returned. Raises `ValueError` for any other text."""
    try:
        return _decoded(parse(bytes(data).decode()))
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError, pickle.UnpicklingError) as error:
        raise ValueError(f"Checkpoints did not write this state ({type(error).__name__}: {error})") from error


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with a name such as "float32". Raises `ValueError` if there is none."""
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:60]!r} is not a dtype")
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


_EXACT = 2**53
"""Integers of at least this absolute value are written as hexadecimal text."""


def _encoded(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [_encoded(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encoded(item) for key, item in value.items()}}
    if kind in _KINDS and (kind is not defaultdict or has_known_factory(value)):
        name, encode = _KINDS[kind]
        return {name: encode(value)}
    if isinstance(value, np.ndarray | np.generic) and _is_plain(value):
        array = np.asarray(value)
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        return {name: [array.dtype.str, list(array.shape), _text(array.tobytes())]}
    return {"torch": _text(_saved(value))}


def _is_plain(value: np.ndarray | np.generic) -> bool:
    """Whether the bytes of an array are the whole array: no objects, named fields or mask."""
    return not value.dtype.hasobject and value.dtype.names is None and not isinstance(value, np.ma.MaskedArray)


def _saved(value: Any) -> bytes:
    """Return a value as the bytes of `torch.save`. Raises `CheckpointError` if `weights_only=True` cannot load it."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
        named = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
        allow = (
            f", or allow it on saving and loading: torch.serialization.add_safe_globals([{named.__name__}])"
            if named.__name__.isidentifier()
            else ""
        )
        raise CheckpointError(
            f"A state contains {named.__module__}.{named.__qualname__}, which only pickle can read, and pickle runs "
            f"the code in a file. Give numbers, text, tensors and containers in state_dict{allow}."
        ) from error
    return file.getvalue()


def _items(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[_encoded(key), _encoded(item)] for key, item in value.items()]


def _each(value: Any) -> list[Any]:
    return [_encoded(item) for item in value]


def _sorted(value: Any) -> list[Any]:
    """Return the encoded elements of a set in an order that is the same on every rank."""
    return sorted(_each(value), key=json.dumps)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


_FACTORIES = {factory.__name__: factory for factory in (bool, int, float, str, list, tuple, dict, set)}
"""Factories of a `defaultdict` that need no code of the user, by name."""


def has_known_factory(value: defaultdict[Any, Any]) -> bool:
    """Whether a `defaultdict` can be written and read: its factory is a type of Python, or None."""
    return value.default_factory is None or value.default_factory in _FACTORIES.values()


def _default(value: defaultdict[Any, Any]) -> list[Any]:
    factory: Any = value.default_factory
    return [None if factory is None else factory.__name__, _items(value)]


_KINDS: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    Slot: ("slot", lambda slot: [slot.name, slot.is_sharded]),
    StepCount: ("count", lambda count: [_encoded(count.value), name_of(count.dtype), list(count.shape)]),
    dict: ("items", _items),
    OrderedDict: ("ordered", _items),
    Counter: ("counter", _items),
    defaultdict: ("default", _default),
    tuple: ("tuple", _each),
    set: ("set", _sorted),
    frozenset: ("frozenset", _sorted),
    deque: ("deque", lambda value: [_each(value), value.maxlen]),
    complex: ("complex", lambda value: [_encoded(value.real), _encoded(value.imag)]),
    bytes: ("bytes", _text),
    bytearray: ("bytearray", _text),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", name_of),
    torch.device: ("device", str),
}
"""Type → its key in JSON, and the function that encodes its values."""


def _decoded(data: Any) -> Any:
    if isinstance(data, list):
        return [_decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    return _DECODERS[name](inner)


def _pairs(data: Any) -> list[tuple[Any, Any]]:
    return [(_decoded(key), _decoded(item)) for key, item in data]


def _bytes(data: Any) -> bytes:
    return base64.b64decode(data, validate=True)


def _array(data: Any) -> np.ndarray:
    kind, shape, text = data
    dtype = np.dtype(str(kind))
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return np.frombuffer(_bytes(text), dtype).reshape(shape).copy()


def _slot(data: Any) -> Slot:
    name, is_sharded = data
    if not (isinstance(name, str) and isinstance(is_sharded, bool)):
        raise ValueError("a slot without name")
    return Slot(name, is_sharded)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "slot": _slot,
    "count": lambda data: StepCount(_decoded(data[0]), dtype_named(data[1]), torch.Size(data[2])),
    "dict": lambda data: {key: _decoded(item) for key, item in data.items()},
    "items": lambda data: dict(_pairs(data)),
    "ordered": lambda data: OrderedDict(_pairs(data)),
    "counter": lambda data: Counter(dict(_pairs(data))),
    "default": lambda data: defaultdict(None if data[0] is None else _FACTORIES[data[0]], _pairs(data[1])),
    "tuple": lambda data: tuple(map(_decoded, data)),
    "set": lambda data: set(map(_decoded, data)),
    "frozenset": lambda data: frozenset(map(_decoded, data)),
    "deque": lambda data: deque(map(_decoded, data[0]), data[1]),
    "complex": lambda data: complex(_decoded(data[0]), _decoded(data[1])),
    "bytes": _bytes,
    "bytearray": lambda data: bytearray(_bytes(data)),
    "size": torch.Size,
    "dtype": dtype_named,
    "device": torch.device,
    "int": lambda data: int(data, 16),
    "float": float,
    "array": _array,
    "scalar": lambda data: _array(data)[()],
    "torch": lambda data: torch.load(io.BytesIO(_bytes(data)), weights_only=True),
}
