"""Restores attributes of modules after a trace, so that no traced tensor stays in the model.

Models store tensors between calls in plain attributes: a table of biases, the last mask. A traced call computes on fake
tensors, which must reach neither the trace's next run nor the user's model.
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
"""Attributes that every module has."""


Kept = Mapping[tuple[str, nn.Module, str], Any]
"""(name of a module, the module, name of an attribute) → the tensor or container that a call left there."""


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[Callable[[], Kept]]:
    """At exit, undo the storing of new tensors in attributes of `model`'s modules.

    Changed attributes get their old value or content, and new attributes are deleted. Attributes without new tensors
    stay as they are.

    Yield a function that returns the attributes in which tensors were stored since entry. A tensor counts if it is the
    attribute's value, or an item of a dict, list, set or tuple in the attribute. Nested containers are not searched.
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
            continue  # a recurrent layer lists its own parameters
        if value is not attributes.get(name) or _items(value) != _items(contents.get(id(value), value)):
            yield name


def _items(value: Any) -> set[int]:
    """Return the `id` of each item of a container; an empty set for a tensor."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set, tuple)) else ()
    return set(map(id, items))


def keep_scalars(kept: Kept, accesses: Accesses, result: Result) -> list[Tensor]:
    """Return the scalars that a call left in attributes, and write the attributes' paths into `result.kept`.

    These scalars become results of the program, so `result.indices` gets an index for each. An attribute counts only if
    the call did not read it before setting it.

    The paths of all other attributes with new tensors go into `result.lost`, for two reasons. Large tensors would have
    to be gathered. An attribute that the call reads before setting it is a cache, or carries a value over from the
    previous call.
    """
    scalars, lost = {}, []
    assert result.tree is not None, "the result is not flattened yet"
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
    """Yield a warning if the call leaves tensors in attributes that a compiled call will not set (`result.lost`)."""
    if result.lost:
        yield (
            f"{type(model).__name__} keeps tensors in {', '.join(result.lost)} when it is called. A compiled call "
            "leaves the values from before the trace there, and computes from them. Return the tensors, or make "
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
