"""Numbers that record their use by Python code while a call of a model is traced.

A watched number stands in for an attribute. Arithmetic with it gives another watched number, whose expression is in
terms of attributes. Taking a plain value from a watched number (by comparison, truth value, conversion or text) makes a
condition of expression and value. A call under which all conditions hold takes the same path through the model's
Python.

Watched numbers do not subclass `int` or `float`, because C code would read their values unnoticed. `type(number)`
cannot be intercepted. Code that calls `type` is found by its bytecode, and its numbers are then guarded by value.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import math
import operator
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from autoshard.ir.python_values import MISSING, PLAIN, are_alike

KINDS = (int, float)
"""Types of attributes that are watched."""

_MOST_CONDITIONS, _MOST_OPERATIONS = 64, 128
"""Most conditions of a trace, and operations in a condition. Beyond these, numbers are compared by value. Checking 60
conditions takes 0.13 ms of a call.
"""

_DIVIDING = (operator.truediv, operator.floordiv, operator.mod)
_FAILING = (pow, operator.lshift, operator.rshift, round, math.trunc, math.floor, math.ceil)
_TELLING = (str, repr, format, float, complex, operator.index)
_ERRORS = (ArithmeticError, TypeError, ValueError)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = tuple(
    os.path.dirname(path or "") + os.sep for path in (torch.__file__, np.__file__, os.path.dirname(__file__))
)

_IS_PAUSED: ContextVar[bool] = ContextVar("autoshard_is_paused", default=False)
_IS_WATCHING: ContextVar[bool] = ContextVar("autoshard_is_watching", default=False)


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """An expression that is one attribute: the number, of type `kind`, under `name` in the `vars` of `holder`.

    `title` is the path of `holder` for messages.
    """

    title: str
    holder: Any
    name: str
    kind: type

    size = 1

    @property
    def key(self) -> tuple[int, str]:
        """Hashable identity of the attribute: the `id` of the object, and the attribute's name."""
        return id(self.holder), self.name

    @property
    def path(self) -> str:
        """Path of the attribute for messages: "layers.0.step"."""
        return f"{self.title}.{self.name}".removeprefix(".")

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """This attribute alone, in a tuple: all attributes of the expression."""
        return (self,)

    def value(self) -> Any:
        """Return the attribute's present value. Raises `TypeError` if it is gone or no longer of type `kind`."""
        found = vars(self.holder).get(self.name, MISSING)
        if type(found) is not self.kind:
            raise TypeError(f"{self.path} is no longer of type {self.kind.__name__}")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class NumberOperation:
    """A function applied to expressions (attributes, other operations) and plain values, itself an expression."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Number of attributes and operations in the expression, itself included."""
        return 1 + sum(item.size for item in self.operands if isinstance(item, (Attribute, NumberOperation)))

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable key, equal for the same function of equal operands."""
        keys = (
            item.key if isinstance(item, (Attribute, NumberOperation)) else (type(item), repr(item))
            for item in self.operands
        )
        return (self.function, *keys)

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All attributes in the expression, in the order of their occurrence."""
        inner = (item for item in self.operands if isinstance(item, (Attribute, NumberOperation)))
        return tuple(attribute for item in inner for attribute in item.attributes)

    def value(self) -> Any:
        """Return the expression's value for the present values of its attributes."""
        operands = (item.value() if isinstance(item, (Attribute, NumberOperation)) else item for item in self.operands)
        return self.function(*operands)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on later calls: `expression` has the value `outcome`, which Python code saw during the trace."""

    expression: Attribute | NumberOperation
    outcome: Any

    @property
    def fixed(self) -> Attribute | None:
        """The attribute whose value follows from the outcome, as for `str(x)`; None otherwise, as for `x > 2`."""
        match self.expression:
            case Attribute():
                return self.expression
            case NumberOperation(function, (Attribute() as attribute, *rest)) if not any(rest):
                return attribute if function in _TELLING or (function is int and attribute.kind is int) else None
        return None

    def holds(self) -> bool:
        """Whether the expression's present value equals `outcome`."""
        try:
            return are_alike(self.expression.value(), self.outcome)
        except _ERRORS:
            return False

    def changes(self) -> list[str]:
        """Return the paths of the expression's attributes if the condition no longer holds, else an empty list."""
        return [] if self.holds() else [item.path for item in self.expression.attributes]


class Watch:
    """Makes the watched numbers of one trace, and records the conditions on them."""

    def __init__(self) -> None:
        self._conditions: dict[Any, Condition] = {}
        self._made: list[weakref.ref[_Number]] = []
        self._is_open = True
        self.is_exhausted = False
        self.asks_for_types = False

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions recorded so far, in order."""
        return tuple(self._conditions.values())

    def number(self, expression: Attribute | NumberOperation, value: float) -> Any:
        """Return a new watched number with this expression and plain value."""
        number = (_Float if isinstance(value, float) else _Integer)(expression, value, self)
        self._made.append(weakref.ref(number))
        return number

    def derived(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply a function to watched numbers, and return the result as a watched number.

        If the result is no number, or its expression is too large, the plain result is returned. The plain values of
        the operands then become conditions.
        """
        value = self._apply(function, operands)
        expression = NumberOperation(function, tuple(map(_expression_of, operands)))
        if type(value) not in (bool, *KINDS) or expression.size > _MOST_OPERATIONS:
            self._note_exactly(operands)
            return value
        if function in _FAILING or (function in _DIVIDING and isinstance(operands[1], _Number)):
            self._note(
                NumberOperation(type, (expression,)), type(value)
            )  # another value is an error, or of another type
        return self.number(expression, value) if self._is_watching() else value

    def noted(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply a function to watched numbers; return its plain result, which becomes a condition on later calls."""
        value = self._apply(function, operands)
        self._note(NumberOperation(function, tuple(map(_expression_of, operands))), value)
        return value

    def exact(self, number: _Number) -> Any:
        """Return the plain value of a watched number, which becomes a condition on later calls."""
        self._note(number._expression, number._value)
        return number._value

    def _apply(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        try:
            return function(*(item._value if isinstance(item, _Number) else item for item in operands))
        except _ERRORS:
            self._note_exactly(operands)  # whether it raises depends on the values
            raise

    def _note_exactly(self, operands: Iterable[Any]) -> None:
        for item in operands:
            if isinstance(item, _Number):
                self.exact(item)

    def _note(self, expression: Attribute | NumberOperation, value: Any) -> None:
        if not self._is_watching():
            return
        if expression.size > _MOST_OPERATIONS or len(self._conditions) >= _MOST_CONDITIONS:
            self.is_exhausted = True
        else:
            self._conditions.setdefault(expression.key, Condition(expression, value))

    def _is_watching(self) -> bool:
        return self._is_open and not _IS_PAUSED.get()

    def close(self) -> None:
        """Stop recording, and put plain numbers in place of watched numbers left in containers and objects."""
        self._is_open = False
        left = [number for made in self._made if (number := made()) is not None]
        plain = {id(number): number._value for number in left}
        for holder in gc.get_referrers(*left) if left else ():
            if holder is not left:
                _replace(holder, plain)


def _expression_of(operand: Any) -> Any:
    return operand._expression if isinstance(operand, _Number) else operand


def _replace(holder: Any, plain: Mapping[int, Any]) -> None:
    if isinstance(holder, (list, deque)):
        for index, item in enumerate(holder):
            if id(item) in plain:
                holder[index] = plain[id(item)]
    elif isinstance(holder, dict):
        for name, item in list(holder.items()):
            if id(name) in plain:
                del holder[name]
            if id(name) in plain or id(item) in plain:
                holder[plain.get(id(name), name)] = plain.get(id(item), item)
    elif isinstance(holder, set):
        for item in [item for item in holder if id(item) in plain]:
            holder.remove(item)
            holder.add(plain[id(item)])
    elif isinstance(holder, types.CellType):
        holder.cell_contents = plain.get(id(holder.cell_contents), holder.cell_contents)
    elif not isinstance(holder, (tuple, types.FrameType)) and isinstance(getattr(holder, "__dict__", None), dict):
        _replace(vars(holder), plain)


@contextlib.contextmanager
def watching(attributes: Iterable[Attribute]) -> Iterator[Watch]:
    """Put watched numbers in the place of `attributes` within the context, and yield their `Watch`.

    Raises:
        TypeError, AttributeError: an object does not accept a watched number as its attribute.
    """
    watch, before = Watch(), [(item, item.value()) for item in attributes]
    codes: set[types.CodeType] = set()

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    profiler, token = sys.getprofile(), _IS_WATCHING.set(True)
    try:
        for item, value in before:
            _put(item, watch.number(item, value))
        if profiler is None:
            sys.setprofile(look)
        yield watch
    finally:
        if profiler is None:
            sys.setprofile(None)
        _IS_WATCHING.reset(token)
        for item, value in before:
            _put(item, value)
        watch.asks_for_types = profiler is not None or any(map(_asks_for_types, codes))
        watch.close()


def _put(item: Attribute, value: Any) -> None:
    held = vars(item.holder)
    if isinstance(held, dict):
        held[item.name] = value
    else:
        setattr(item.holder, item.name, value)  # a class


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Pause the recording of conditions within the context."""
    token = _IS_PAUSED.set(True)
    try:
        yield
    finally:
        _IS_PAUSED.reset(token)


def is_watching() -> bool:
    """Whether `watching` is active in this context.

    A call with watched numbers can only be traced by running its Python.
    """
    return _IS_WATCHING.get()


def plain_number(value: Any) -> Any:
    """Return the plain value of a watched number, which becomes a condition; return any other value as it is."""
    return value._watch.exact(value) if isinstance(value, _Number) else value


def _asks_for_types(code: types.CodeType) -> bool:
    """Whether code of the user calls `type` on something other than `self`."""
    file = code.co_filename
    is_standard = file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
    if "type" not in code.co_names or is_standard or file.startswith(_LIBRARIES):
        return False
    return any(
        item.opname in ("LOAD_GLOBAL", "LOAD_NAME") and item.argval == "type" and following.argval != "self"
        for item, following in pairwise(dis.get_instructions(code))
    )


def _binary(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: _Number, other: Any) -> Any:
        return self._watch.derived(function, self, other) if isinstance(other, _OPERANDS) else NotImplemented

    return method


def _reflected(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: _Number, other: Any) -> Any:
        return self._watch.derived(function, other, self) if isinstance(other, _OPERANDS) else NotImplemented

    return method


def _compared(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: _Number, other: Any) -> Any:
        return self._watch.noted(function, self, other) if isinstance(other, _OPERANDS) else NotImplemented

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Number, *arguments: Any) -> Any:
        return self._watch.derived(function, self, *map(plain_number, arguments))

    return method


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Number, *arguments: Any) -> Any:
        return self._watch.noted(function, self, *arguments)

    return method


class _Number:
    """A number with its expression in attributes, its plain value, and the `Watch` that records its conditions."""

    __slots__ = ("__weakref__", "_expression", "_value", "_watch")

    def __init__(self, expression: Attribute | NumberOperation, value: Any, watch: Watch) -> None:
        self._expression, self._value, self._watch = expression, value, watch

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        getattr(self._value, name)  # an AttributeError does not depend on the value
        return getattr(self._watch.exact(self), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain_args, plain_kwargs = pytree.tree_map(plain_number, (tuple(args), dict(kwargs or {})))
        return function(*plain_args, **plain_kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self._watch.exact(self), dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._watch.exact(self).__reduce_ex__(protocol)

    def __hash__(self) -> int:
        return hash(self._watch.exact(self))

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if not isinstance(other, _OPERANDS) or not isinstance(modulus, _OPERANDS):
            return NotImplemented
        return self._watch.derived(pow, self, other, modulus)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    __eq__, __ne__ = _compared(operator.eq), _compared(operator.ne)  # type: ignore[assignment]
    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)
    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __rpow__ = _reflected(pow)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(abs)
    __round__, __trunc__ = _unary(round), _unary(math.trunc)
    __floor__, __ceil__ = _unary(math.floor), _unary(math.ceil)
    __bool__, __int__, __float__, __complex__ = map(_converted, (bool, int, float, complex))
    __str__, __repr__, __format__ = _converted(str), _converted(repr), _converted(format)  # type: ignore[assignment]


class _Float(_Number):
    __slots__ = ()


class _Integer(_Number):
    __slots__ = ()

    __index__ = _converted(operator.index)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __invert__ = _unary(operator.invert)


_OPERANDS = (_Number, *PLAIN)
