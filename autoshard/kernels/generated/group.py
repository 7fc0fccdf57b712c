"""Groups of operators that one generated kernel computes: calls without branches or loops.

A group has no names, so equal groups of different programs share a kernel. A group's values are numbered from 0: first
the operands, then the result of each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_QUIET = frozenset(
    {"view", "unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "full"}
)
"""Operators that a kernel's name does not mention."""


@dataclass(frozen=True, slots=True)
class ValueShape:
    """A tensor's shape, its strides in elements, and its dtype, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> ValueShape:
        """Return the shape, strides and dtype of a real or fake tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def describes(self, tensor: Tensor) -> bool:
        """Whether a tensor has this shape and these strides. Its dtype, and strides of dims of size 1, may differ."""
        pairs = zip(self.shape, self.stride, tensor.stride(), strict=False)
        return tuple(tensor.shape) == self.shape and all(size == 1 or own == other for size, own, other in pairs)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return an uninitialised tensor with this shape, these strides and this dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to value number `index` of the group, in place of a tensor among the arguments of a step."""

    index: int


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One call of an operator.

    Args:
        target: the operator.
        args, kwargs: the arguments, with a `Ref` in place of each tensor.
        value: shape, strides and dtype of the result.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    value: ValueShape

    @property
    def name(self) -> str:
        """The operator's short name, such as "mul" for aten.mul.Tensor."""
        return self.target._schema.name.partition("::")[2].strip("_")

    @property
    def operands(self) -> tuple[int, ...]:
        """The numbers of the values that the step reads, in the order of its arguments."""
        return tuple(_refs((self.args, [item for _, item in self.kwargs])))

    def call(self, value_of: Callable[[int], Any], target: Callable[..., Any] | None = None) -> Any:
        """Call `target`, by default the step's operator, with `value_of(index)` in place of `Ref(index)`.

        Return the result of the call.
        """
        args = map_refs(self.args, value_of)
        return (target or self.target)(*args, **{name: map_refs(item, value_of) for name, item in self.kwargs})


@dataclass(frozen=True, eq=False)
class Group:
    """The operators of a generated kernel. Two groups are equal if their `text` is equal.

    Args:
        operands: shape, strides and dtype of each operand.
        steps: calls of operators. Each step reads operands and results of earlier steps.
        results: the numbers of the values that the kernel returns.
    """

    operands: tuple[ValueShape, ...]
    steps: tuple[GroupStep, ...]
    results: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def values(self) -> tuple[ValueShape, ...]:
        """Shape, strides and dtype of every value: of the operands, then of each step's result."""
        return (*self.operands, *(step.value for step in self.steps))

    def step_of(self, index: int) -> GroupStep:
        """Return the step that computes value number `index`."""
        return self.steps[index - len(self.operands)]

    def run(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Compute the group with torch's operators, one after another, for tests to compare the kernel with."""
        values = list(operands)
        for step in self.steps:
            values.append(step.call(values.__getitem__))
        return tuple(values[index] for index in self.results)

    @cached_property
    def text(self) -> str:
        """A text that is equal for equal groups only, and equal in every process. It differs between 0.0 and -0.0."""
        lines = [f"operand {value} {list(value.stride)}" for value in self.operands]
        lines += [
            f"{step.target}{step.args}{step.kwargs} {step.value} {list(step.value.stride)}" for step in self.steps
        ]
        return "\n".join([*lines, f"results {list(self.results)}"])

    @cached_property
    def name(self) -> str:
        """The kernel's name, such as "triton_mul_add_1a2b3c4d5e6f": up to four operators and a digest of `text`."""
        names = dict.fromkeys(step.name for step in self.steps if step.name not in _QUIET)
        shown = "_".join(list(names)[:4])
        return f"triton_{shown}_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"


def map_refs(item: Any, value_of: Callable[[int], Any]) -> Any:
    """Return an argument with `value_of(index)` in place of each `Ref(index)`, also inside nested tuples and lists."""
    if isinstance(item, Ref):
        return value_of(item.index)
    if isinstance(item, (tuple, list)):
        return type(item)(map_refs(part, value_of) for part in item)
    return item


def _refs(item: Any) -> Iterator[int]:
    if isinstance(item, Ref):
        yield item.index
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _refs(part)
