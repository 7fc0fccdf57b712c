"""Finds attributes of a model that calls of the model change, such as a count of calls.

A trace would freeze the first values of these attributes.
"""

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
"""Attributes that every module has: its tensors, submodules and hooks."""

State = Mapping[tuple[str, str], Any]
"""(name of a module, path of an attribute) → text of the attribute's value."""


def python_state(model: nn.Module) -> State:
    """Return the text of each number, string, array or container in attributes of a model's modules.

    Keys are (name of the module, path of the attribute).
    """
    with unwatched():
        return {
            (name, path): content_text(value)
            for name, module in model.named_modules()
            for attribute, held in vars(module).items()
            if attribute not in _OWN and not isinstance(held, torch.Tensor) and is_setting(held)
            for path, value in _opened(attribute, held)
        }


def _opened(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value).

    If the value is an object with attributes, such as a configuration, yield its attributes instead.
    """
    if not is_record(value):
        yield path, value
        return
    for name, item in held_by(value).items():
        yield from _opened(f"{path}.{name}", item)


def refuse_counting(
    model: nn.Module, before: State, program: Program, trace_again: Callable[[], Program]
) -> frozenset[tuple[str, str]]:
    """Return the attributes that every call changes, as (name of a module, path of an attribute).

    The call was traced once since `before`. An attribute is returned if this trace changed it and another trace changes
    it again. The program depends on such attributes if the other trace gives another program. An attribute that only
    the first call sets, such as a cache, is accepted.

    Args:
        model: the traced model.
        before: the model's attributes before the first trace.
        program: the program of the first trace.
        trace_again: traces the same call once more.

    Raises:
        TraceError: the program depends on an attribute that every call changes; the message names it.
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
    """Yield a note for the user that names the attributes `counting`, which every call changes, if there are any."""
    if counting:
        yield (
            f"{type(model).__name__} changes {_names(counting)} with every call. Its computation was found not to "
            "depend on it. Compiled calls run no Python of the model, and leave it as it is."
        )


def _names(attributes: frozenset[tuple[str, str]]) -> str:
    return ", ".join(sorted(f"{name}.{attribute}".removeprefix(".") for name, attribute in attributes))


def _changed(before: State, after: State) -> frozenset[tuple[str, str]]:
    return frozenset(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
