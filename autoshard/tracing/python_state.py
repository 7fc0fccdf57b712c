"""Attributes of a model that its calls change: a trace would hold the numbers of the first call for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.program import Program

State = Mapping[tuple[str, str], Any]
"""Numbers, strings, truth values and containers of them that modules hold, by the module's name and the attribute's."""


def python_state(model: nn.Module) -> State:
    """What plain values the modules of a model hold now."""
    return {
        (name, attribute): repr(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if _is_plain(value)
    }


def refuse_counting(
    model: nn.Module, before: State, program: Program, trace_again: Callable[[], Program]
) -> frozenset[tuple[str, str]]:
    """The attributes that every call changes, as a count of calls; raise if the model computes with one.

    An attribute that changed from `before` to now is one if another trace changes it too. It matters if that trace
    gives another program. One that is set by the first call alone (a cache, say) is let pass.

    Raises:
        TraceError: it names the attribute.
    """
    once = python_state(model)
    if not _changed(before, once):
        return frozenset()
    other = trace_again()
    counting = _changed(before, once) & _changed(once, python_state(model))
    if counting and fingerprint(other) != fingerprint(program):
        raise TraceError(
            f"{type(model).__name__} changes {_names(counting)} with every call, and what it computes depends on it: a "
            "trace would compute every step with the value of the first. Make it a buffer, or pass it as a tensor."
        )
    return frozenset(counting)


def counting_note(model: nn.Module, counting: frozenset[tuple[str, str]]) -> Iterator[str]:
    """What a user must know of attributes that every call changes."""
    if counting:
        yield (
            f"{type(model).__name__} changes {_names(counting)} with every call. What it computes was found not to "
            "depend on that; compiled calls run no Python of the model, and leave it as it is."
        )


def _names(attributes: frozenset[tuple[str, str]]) -> str:
    return ", ".join(sorted(f"{name}.{attribute}".removeprefix(".") for name, attribute in attributes))


def _is_plain(value: Any, depth: int = 3) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return True
    items = (*value, *value.values()) if type(value) is dict else value if type(value) in (list, tuple, set) else None
    return items is not None and depth > 0 and all(_is_plain(item, depth - 1) for item in items)


def _changed(before: State, after: State) -> frozenset[tuple[str, str]]:
    return frozenset(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
