"""Tracing leaves no tensor in the model: attributes of modules that hold some are afterwards what they were before.

Models keep tensors between calls in plain attributes: a table of biases, the last mask. A traced call computes on fake
tensors, and runs more than once; what it keeps must reach neither its next run nor the user's model. Parameters,
buffers, submodules and hooks are not touched here, nor what holds no tensor: flags, counters, patched methods.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autoshard.tracing.calling import Result
from autoshard.tracing.python_use import Accesses

_OWN = frozenset(nn.Module().__dict__)
"""The attributes that every module has."""


Kept = Mapping[tuple[str, nn.Module, str], Any]
"""Attributes that hold tensors since a call: title and module, name, and what it holds."""


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[Callable[[], Kept]]:
    """Afterwards, no attribute of a module of `model`, nor a dict, list or set there, holds a tensor that is new.

    What these hold in turn is not looked into. Yields what tells which attributes do now.
    """
    titles = {module: title for title, module in model.named_modules()}
    before = [(module, _own_attributes(module)) for module in model.modules()]
    held = [[(value, copy.copy(value)) for value in found.values() if _is_container(value)] for _, found in before]

    def kept() -> Kept:
        return {
            (titles[module], module, name): module.__dict__[name]
            for (module, attributes), containers in zip(before, held, strict=True)
            for name in _with_new_tensors(module, attributes, containers)
        }

    try:
        yield kept
    finally:
        for (module, attributes), containers in zip(before, held, strict=True):
            _restore(module, attributes)
            for value, content in containers:
                _refill(value, content)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OWN}


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, set))


def _with_new_tensors(
    module: nn.Module, attributes: dict[str, Any], containers: list[tuple[Any, Any]]
) -> Iterator[str]:
    contents = {id(value): content for value, content in containers}
    for name, value in _own_attributes(module).items():
        if not _holds_tensors(value) or set() < _items(value) <= _items(module._parameters):
            continue  # the latter: a recurrent layer lists its own parameters
        if value is not attributes.get(name) or _items(value) != _items(contents.get(id(value), value)):
            yield name


def _items(value: Any) -> set[int]:
    """The identities of what a container holds; a tensor holds nothing."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set, tuple)) else ()
    return set(map(id, items))


def keep_scalars(kept: Kept, accesses: Accesses, result: Result) -> list[Tensor]:
    """Scalars that a call left in attributes which it does not read: results of the program, as those returned are.

    Attributes with other tensors go into `result.lost`: large ones would have to be gathered, and what the call reads
    before it sets it is a cache, or carries something over from the call before.
    """
    scalars, lost = {}, []
    assert result.tree is not None, "what the call returned is flat"
    for (title, module, name), value in kept.items():
        path = f"{title}.{name}".removeprefix(".")
        if isinstance(value, Tensor) and value.dim() == 0 and not accesses.has_read(module, name):
            scalars[path] = value
        else:
            lost.append(path)
    first = result.tree.num_leaves
    result.kept = dict(enumerate(scalars, first))
    result.indices += tuple(result.kept)
    result.lost = tuple(lost)
    return list(scalars.values())


def kept_note(model: nn.Module, result: Result) -> Iterator[str]:
    """What a user must know of attributes that a call leaves tensors in."""
    if result.lost:
        yield (
            f"{type(model).__name__} keeps tensors in {', '.join(result.lost)} when it is called. A compiled call "
            "leaves there what was there before it was traced, and computes from that: return the tensors, or make "
            "them buffers."
        )


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in _own_attributes(module).items():
        if not _holds_tensors(value) or value is attributes.get(name):
            continue
        if name in attributes:
            module.__dict__[name] = attributes[name]
        else:
            del module.__dict__[name]


def _refill(value: Any, content: Any) -> None:
    if not _holds_tensors(value):
        return
    if isinstance(value, list):
        value[:] = content
        return
    value.clear()
    value.update(content)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set, tuple)) else ()
    return any(isinstance(item, Tensor) for item in items)
