"""Restores attributes of modules after a trace, so that no traced tensor stays in the model.

Models store tensors between calls in plain attributes: a table of biases, the last mask. A traced call computes on fake
tensors, which must reach neither the trace's next run nor the user's model.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autoshard.ir.python_values import PLAIN, held_by, is_record
from autoshard.tracing.calling import Result
from autoshard.tracing.python_use import Accesses

_OWN = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""

_DEPTH = 4
"""The greatest depth of nested containers and records that are searched."""


Kept = Mapping[tuple[str, nn.Module, str], Any]
"""(name of a module, the module, name of an attribute) → the tensor or container that a call left there."""


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[Callable[[], Kept]]:
    """At exit, undo the storing of new tensors in attributes of `model`'s modules.

    Changed attributes get their old value or content, and new attributes are deleted. Attributes without new tensors
    stay as they are.

    Yield a function that returns the attributes in which tensors were stored since entry. A tensor counts if it is the
    attribute's value, or lies within a container or record in the attribute (`_inside`).
    """
    titles = {module: title for title, module in model.named_modules()}
    before = [(module, _own_attributes(module)) for module in model.modules()]
    tensors = [{name: _tensors(value) for name, value in attributes.items()} for _, attributes in before]
    holders = {id(holder): holder for _, attributes in before for holder in _holders(attributes.values())}
    contents = [(holder, content_of(holder)) for holder in holders.values()]

    def kept() -> Kept:
        return {
            (titles[module], module, name): module.__dict__[name]
            for (module, attributes), old in zip(before, tensors, strict=True)
            for name in _with_new_tensors(module, attributes, old)
        }

    try:
        yield kept
    finally:
        for module, attributes in before:
            _restore(module, attributes)
        for holder, content in contents:
            if _tensors(holder):
                refill(holder, content)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OWN}


def _with_new_tensors(
    module: nn.Module, attributes: dict[str, Any], tensors: dict[str, dict[int, Tensor]]
) -> Iterator[str]:
    parameters = set(map(id, module._parameters.values()))
    for name, value in _own_attributes(module).items():
        found = _tensors(value)
        if not found or (not isinstance(value, Tensor) and found.keys() <= parameters):
            continue  # a recurrent layer lists its own parameters
        if value is not attributes.get(name) or found.keys() != tensors[name].keys():
            yield name


def _inside(value: Any, depth: int) -> Iterable[Any]:
    """Return the values in a container or record, which lies within fewer than `_DEPTH` others; () for other values."""
    if depth == _DEPTH or isinstance(value, PLAIN):
        return ()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, set, tuple, deque)):
        return value
    return held_by(value).values() if is_record(value, _DEPTH - depth) else ()


def _tensors(value: Any, depth: int = 0) -> dict[int, Tensor]:
    """Return the tensors within a value, by `id`. The dict keeps them alive, so that no `id` is used again."""
    if isinstance(value, Tensor):
        return {id(value): value}
    return {key: tensor for item in _inside(value, depth) for key, tensor in _tensors(item, depth + 1).items()}


def _holders(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """Yield the containers and records among `values`, and within them, that can get new content."""
    for value in values:
        inside = _inside(value, depth)
        if isinstance(value, (dict, list, set, deque)) or (inside and not isinstance(value, tuple)):
            yield value
        yield from _holders(inside, depth + 1)


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
        if value is attributes.get(name) or not _tensors(value):
            continue
        if name in attributes:
            module.__dict__[name] = attributes[name]
        else:
            del module.__dict__[name]


def content_of(holder: Any) -> Any:
    """Return a copy of the content of a container or record, for `refill`."""
    if isinstance(holder, dict):
        return dict(holder)
    return list(holder) if isinstance(holder, (list, set, deque)) else held_by(holder)


def refill(holder: Any, content: Any) -> None:
    """Set a container or record back to the earlier content `content`, a result of `content_of`."""
    if isinstance(holder, (dict, list, set, deque)):
        holder.clear()
        (holder.extend if isinstance(holder, (list, deque)) else holder.update)(content)
        return
    for name in held_by(holder).keys() - content.keys():
        delattr(holder, name)
    for name, value in content.items():
        if getattr(holder, name, None) is not value:
            object.__setattr__(holder, name, value)
