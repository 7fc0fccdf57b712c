"""Attributes of a model that its calls change: a trace would hold the numbers of the first call for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.program import Program

State = Mapping[tuple[str, str], Any]
"""Numbers, strings and truth values that modules hold, by the module's name and the attribute's."""


def python_state(model: nn.Module) -> State:
    """What plain values the modules of a model hold now."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if value is None or isinstance(value, (bool, int, float, complex, str))
    }


def refuse_counting(model: nn.Module, before: State, program: Program, trace_again: Callable[[], Program]) -> None:
    """Raise if a model counts its calls and computes with the count.

    An attribute that changed from `before` to now is one if another trace changes it too and gives another program.
    One that is set by the first call alone (a cache, say) is let pass.

    Raises:
        TraceError: it names the attribute.
    """
    once = python_state(model)
    if not _changed(before, once):
        return
    other = trace_again()
    counting = _changed(before, once) & _changed(once, python_state(model))
    if counting and other.digest() != program.digest():
        names = ", ".join(sorted(f"{name}.{attribute}".removeprefix(".") for name, attribute in counting))
        raise TraceError(
            f"{type(model).__name__} changes {names} with every call, and what it computes depends on it: a trace "
            "would compute every step with the value of the first. Make it a buffer, or pass it as a tensor."
        )


def _changed(before: State, after: State) -> set[tuple[str, str]]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
