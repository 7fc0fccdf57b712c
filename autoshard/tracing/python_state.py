"""Attributes of a model that its calls change. A trace would freeze the first call's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.program import Program
from autoshard.ir.python_values import content_text, held_by, is_record, is_setting
from autoshard.ir.watched_numbers import unwatched

_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes of every module, with tensors, modules and hooks."""

State = Mapping[tuple[str, str], Any]
"""Texts of numbers, arrays, configurations and containers of them, by the module's name and the attribute's path."""


def python_state(model: nn.Module) -> State:
    """Text of each setting of a model's modules now, by module and path."""
    with unwatched():
        return {
            (name, path): content_text(value)
            for name, module in model.named_modules()
            for attribute, held in vars(module).items()
            if attribute not in _OWN and not isinstance(held, torch.Tensor) and is_setting(held)
            for path, value in _opened(attribute, held)
        }


def _opened(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value by its path; an object with settings is opened into its attributes."""
    if not is_record(value):
        yield path, value
        return
    for name, item in held_by(value).items():
        yield from _opened(f"{path}.{name}", item)


def refuse_counting(
    model: nn.Module, before: State, program: Program, trace_again: Callable[[], Program]
) -> frozenset[tuple[str, str]]:
    """Return the attributes that every call changes, such as a count of calls; raise if the model computes with one.

    An attribute that changed since `before` qualifies if another trace changes it too. It matters if that trace gives
    another program. An attribute that only the first call sets, such as a cache, is accepted.

    Raises:
        TraceError: names the attribute.
    """
    once = python_state(model)
    if not _changed(before, once):
        return frozenset()
    other = trace_again()
    counting = _changed(before, once) & _changed(once, python_state(model))
    if counting and fingerprint(other) != fingerprint(program):
        raise TraceError(
            f"{type(model).__name__} changes {_names(counting)} with every call, and its computation depends on it. A "
            "trace would compute every step with the value of the first. Make it a buffer, or pass it as a tensor."
        )
    return frozenset(counting)


def counting_note(model: nn.Module, counting: frozenset[tuple[str, str]]) -> Iterator[str]:
    """Notes for the user on attributes that every call changes."""
    if counting:
        yield (
            f"{type(model).__name__} changes {_names(counting)} with every call. Its computation was found not to "
            "depend on it. Compiled calls run no Python of the model, and leave it as it is."
        )


def _names(attributes: frozenset[tuple[str, str]]) -> str:
    return ", ".join(sorted(f"{name}.{attribute}".removeprefix(".") for name, attribute in attributes))


def _changed(before: State, after: State) -> frozenset[tuple[str, str]]:
    return frozenset(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
