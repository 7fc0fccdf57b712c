"""Finds the generators of random numbers of a model's own, and replaces them for a while.

A generator is found as an attribute of a module, in a closure of a `forward`, or as a global variable beside a module's
class. Generators that `forward` makes without a seed are found too.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import numpy as np
from torch import nn

from autoshard.ir.python_values import content_text
from autoshard.tracing.provenance import user_line

_Random = random.Random
_KIND_OF: Mapping[Any, type] = {
    np.random.default_rng: np.random.Generator,
    np.random.RandomState: np.random.RandomState,
    _Random: _Random,
}
"""Function or class that makes generators → the class of these generators."""


@dataclass(frozen=True, slots=True)
class _DrawPlace:
    """A variable that holds a generator or a key of `_KIND_OF`: an attribute of an object, or a closure's cell."""

    holder: Any
    name: str
    value: Any

    @property
    def is_generator(self) -> bool:
        return type(self.value) in _KIND_OF.values()

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            vars(self.holder)[self.name] = value


class OwnGenerators:
    """The generators of a model's own.

    Args:
        model: the model.
        functions: further functions that run with the model, such as its loss.

    Attributes:
        have_drawn: whether a run of the model within `watching` drew from one of them.
    """

    def __init__(self, model: nn.Module, functions: Sequence[Any] = ()) -> None:
        self._places = list(_places(model, functions))
        self.have_drawn = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, a draw from a generator of the model's own sets `have_drawn`."""

        def make(maker: Any, *args: Any, **kwargs: Any) -> Any:
            self.have_drawn |= _is_unseeded(args, kwargs)
            return maker(*args, **kwargs)

        before = self._states()
        with self._replaced(lambda place: place.value if place.is_generator else _maker(place.value, make)):
            yield
        self.have_drawn |= self._states() != before

    @contextlib.contextmanager
    def drawing(self, words: Sequence[int], lines: list[str]) -> Iterator[None]:
        """Within the context, the generators are Mersenne Twisters with the 624 `words` as their state.

        The user's lines that make a generator are added to `lines`.
        """

        def make(maker: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_unseeded(args, kwargs):
                return maker(*args, **kwargs)
            lines.append(user_line(sys._getframe(2)))
            return _twister(_KIND_OF[maker], words)

        def replacement(place: _DrawPlace) -> Any:
            return _twister(type(place.value), words) if place.is_generator else _maker(place.value, make)

        with self._replaced(replacement):
            yield

    @contextlib.contextmanager
    def _replaced(self, replacement: Callable[[_DrawPlace], Any]) -> Iterator[None]:
        for place in self._places:
            place.put(replacement(place))
        try:
            yield
        finally:
            for place in self._places:
                place.put(place.value)

    def _states(self) -> list[str]:
        return [content_text(_state_of(place.value)) for place in self._places if place.is_generator]


def _places(model: nn.Module, functions: Sequence[Any]) -> Iterator[_DrawPlace]:
    modules = list(model.modules())
    kinds = {type(module) for module in modules}
    files = {kind.__module__ for kind in kinds} | {getattr(function, "__module__", None) for function in functions}
    known = [sys.modules[name] for name in files if name in sys.modules and not name.startswith("torch.")]
    for maker in _KIND_OF:
        yield _DrawPlace(random if maker is _Random else np.random, maker.__name__, maker)
    for holder in (*known, *modules):
        yield from (_DrawPlace(holder, name, value) for name, value in vars(holder).items() if _is_of_interest(value))
    for function in (*(kind.forward for kind in kinds), *functions):
        closure = function.__closure__ if isinstance(function, FunctionType) else None
        for cell in closure or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if _is_of_interest(cell.cell_contents):
                    yield _DrawPlace(cell, "", cell.cell_contents)


def _is_of_interest(value: Any) -> bool:
    return type(value) in _KIND_OF.values() or any(value is maker for maker in _KIND_OF)


def _maker(maker: Any, make: Callable[..., Any]) -> Any:
    """Return a stand-in for a key of `_KIND_OF`, a function or a class. A call returns `make(maker, ...)`."""
    if not isinstance(maker, type):
        return lambda *args, **kwargs: make(maker, *args, **kwargs)

    class Maker(maker):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(maker, *args, **kwargs) if cls is Maker else super().__new__(cls, *args, **kwargs)

    return Maker


def _is_unseeded(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return all(value is None for value in (*args, *kwargs.values()))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, _Random) else generator.get_state(legacy=False)


def _twister(kind: type, words: Sequence[int]) -> Any:
    """Return a generator of a kind, whose Mersenne Twister is at the start of the state `words`."""
    if kind is _Random:
        made = _Random()
        made.setstate((3, (*words, 0), None))
        return made
    bits = np.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": np.array(words, dtype=np.uint32), "pos": 0}}
    return kind(bits)
