"""Reads JSON data into the dataclasses that wrote the data.

A wrong value raises an error that names its place in the file, the value, and the expected type. Duplicate keys,
numbers that are not finite or exceed 64 bits, and endless nesting raise too. The JSON standard does not rule on these
cases.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from autoshard.errors import PlanMismatchError
from autoshard.ir.spec import PartitionSpec

Place = tuple[str, ...]
"""Keys that lead to a value in a file, outermost first. The key of a list's entry is its index as text."""

_IN_JSON: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "bool"),
    int: ((int,), "int"),
    float: ((int, float), "int or float"),
    str: ((str,), "str"),
    PartitionSpec: ((str,), "str"),
    Mapping: ((dict,), "dict"),
    Sequence: ((list, tuple), "list"),
    tuple: ((list, tuple), "list"),
}
"""For each type of a field, the Python types that its JSON value may have, and a name for messages. Dataclasses count
as mappings.
"""


def parse(text: str) -> Any:
    """Return the data of a JSON text.

    Raises:
        ValueError: the text is no JSON, repeats a key, nests too deeply, or has a number that is not finite or exceeds
            64 bits.

    Example:
        >>> parse('{"data": 2}')
        {'data': 2}
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_float
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON, {error}") from error
    except RecursionError as error:
        raise ValueError("its lists and objects lie in each other too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{_SHORT.repr(twice)} stands twice in one object; take one of them out")
    return found


_MAX_DIGITS = 19


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number {_SHORT.repr(digits)} is longer than 64 bits")
    return int(digits)


def _float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"the number {_SHORT.repr(digits)} is not finite")
    return number


def read(kind: Any, data: object, place: Place = ()) -> Any:
    """Convert JSON data to the type `kind`: a dataclass, a `PartitionSpec` (text in the file), a mapping, a tuple.

    `place` has the keys and indices that lead to the data in its file, for messages.

    Raises:
        PlanMismatchError: the data is of another type, a required field is missing, or a field is unknown.

    Example:
        >>> read(tuple[int, ...], [2, 4])
        (2, 4)
    """
    inner = next(each for each in (*get_args(kind), kind) if each is not NoneType) if _is_optional(kind) else kind
    if data is None and _is_optional(kind):
        return None
    types, name = _IN_JSON[_origin(inner)]
    if not isinstance(data, types) or (isinstance(data, bool) and inner is not bool) or data != data:
        where = f"{_words(place)} is" if place else "the content of the file is"
        null = " or null" if _is_optional(kind) else ""
        raise PlanMismatchError(f"{where} {_SHORT.repr(data)} in the plan; it must be of {name}{null}.")
    return _read_inner(inner, data, place)


def _read_inner(kind: Any, data: Any, place: Place) -> Any:
    """Return `data` converted to `kind`. The type of `data` has been checked, the types of its items have not."""
    if kind is PartitionSpec:
        return PartitionSpec.parse(data)
    if is_dataclass(kind):
        return _read_fields(kind, data, place)
    if isinstance(data, dict):
        return {name: read(get_args(kind)[1], item, (*place, name)) for name, item in data.items()}
    if isinstance(data, list | tuple):
        kinds = _kinds_of_entries(kind, len(data), place)
        entries = enumerate(zip(kinds, data, strict=True))
        return tuple(read(each, item, (*place, str(number))) for number, (each, item) in entries)
    return data


def _kinds_of_entries(kind: Any, count: int, place: Place) -> Sequence[Any]:
    inner = get_args(kind)
    if get_origin(kind) is not tuple or inner[-1] is Ellipsis:
        return [inner[0]] * count
    if count != len(inner):
        raise PlanMismatchError(f"{_words(place)} has {count} entries in the plan; it must have {len(inner)}.")
    return inner


def _read_fields(kind: Any, data: Mapping[str, Any], place: Place) -> Any:
    known, hints = {item.name: item for item in fields(kind)}, _hints(kind)
    check_keys(data, known, [name for name, item in known.items() if is_required(item)], place)
    return kind(**{name: read(hints[name], item, (*place, name)) for name, item in data.items()})


def check_keys(
    data: Mapping[str, Any], known: Sequence[str] | Mapping[str, Any], required: Sequence[str], place: Place = ()
) -> None:
    """Raise `PlanMismatchError` if a key in `required` is missing, or a key of `data` is not in `known`.

    `place` has the keys and indices that lead to `data` in its file, for the message.
    """
    for name in required:
        if name not in data:
            raise PlanMismatchError(f"{_words((*place, name))} is missing in the plan: something was taken out.")
    for name in data:
        if name not in known:
            raise PlanMismatchError(f"{_words((*place, name))} is no field of plans; there are {', '.join(known)}.")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def _words(place: Place) -> str:
    return ", ".join(map(repr, place))


def _origin(kind: Any) -> Any:
    return Mapping if is_dataclass(kind) and kind is not PartitionSpec else get_origin(kind) or kind


def _is_optional(kind: Any) -> bool:
    return NoneType in get_args(kind)


def is_required(item: Field[Any]) -> bool:
    """Whether a dataclass field has no default."""
    return item.default is MISSING and item.default_factory is MISSING


@lru_cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def check_version(data: object, key: str, expected: int) -> None:
    """Raise `PlanMismatchError` unless `data` is an object with the schema version of this release under `key`."""
    if not isinstance(data, Mapping):
        raise PlanMismatchError(
            f"This is not a plan that autoshard wrote: it holds {type(data).__name__}, and a plan is an object."
        )
    version = data.get(key)
    if isinstance(version, bool) or version != expected:
        way_out = "Upgrade autoshard, or plan again." if isinstance(version, int) else "Plan again."
        raise PlanMismatchError(f"the plan has schema version {version!r}; this release reads {expected}. {way_out}")
