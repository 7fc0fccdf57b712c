"""The interface between local rewrites and lowering.

Most operators run unchanged on their local operands. An operator whose arguments name shapes, or whose value depends on
the global index, has a *rewrite*. A rewrite emits the local form of the call in terms of a `LocalContext`. Operands are
fx proxies. Every call goes through `context.call`, so that calls without tensor operands (`arange`) are emitted too
instead of run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class LocalContext(Protocol):
    """The place of the running rank in a split call."""

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of the call larger than one."""
        ...

    def is_split(self, factor: str) -> bool:
        """Whether some axis splits `factor`."""
        ...

    def shards(self, factor: str) -> int:
        """The number of pieces of `factor`, 1 if nothing splits it."""
        ...

    def index(self, factor: str) -> Any:
        """Which piece of `factor` the running rank holds: an integer value of the program (0 where not split)."""
        ...

    def offset(self, factor: str) -> Any:
        """The global index of the first element of the rank's piece of `factor`."""
        ...

    def local_size(self, factor: str) -> int:
        """The number of elements of `factor` on each rank, padding included."""
        ...

    def real_size(self, factor: str) -> Any:
        """The number of elements of `factor` that the running rank holds without padding: from 0 to `local_size`."""
        ...

    def global_size(self, factor: str) -> int:
        """The number of elements of `factor` over all ranks."""
        ...

    def pieces(self, factor: str) -> list[tuple[int, int]]:
        """The global index of the first element and the `real_size` of each rank's piece of `factor`, in order."""
        ...

    def input_shape(self, operand: int) -> list[int]:
        """The local shape of a tensor operand."""
        ...

    def input_offset(self, operand: int) -> list[Any]:
        """The global index of the first element of the rank's piece of an operand, for each dim."""
        ...

    def output_shape(self, output: int = 0) -> list[int]:
        """The local shape of a result."""
        ...

    def output_offset(self, output: int = 0) -> list[Any]:
        """The global index of the first element of the rank's piece of a result, for each dim."""
        ...

    def all_reduce(self, value: Any, reduction: str, factor: str) -> Any:
        """The reduction of `value` ("sum", "max", "min") over the axes that split `factor`, on every rank."""
        ...

    def all_gather(self, value: Any, factor: str) -> Any:
        """The values of all ranks that hold a piece of `factor`, in order, stacked on a new dim 0."""
        ...

    def group(self, *factors: str) -> str | None:
        """The name of the group of ranks along the axes that split all of `factors` at once, or None."""
        ...

    def fill(self, value: Any, operand: int, factor: str, number: bool | int | float) -> Any:
        """A value with the dims of an operand, with `number` in the padding of `factor`."""
        ...

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of any operator or function on local values."""
        ...

    def default(self, *args: Any, **kwargs: Any) -> Any:
        """The operator itself, called on local operands."""
        ...


def whole_to_piece(context: LocalContext, factors: Iterable[str]) -> float:
    """How many times more elements the whole has than each rank's piece, padding included, along `factors`."""
    sizes = [(context.global_size(factor), context.local_size(factor)) for factor in factors]
    return math.prod(size / local for size, local in sizes if size != local)


def shifted(offset: Sequence[Any], shift: Sequence[Any]) -> list[Any]:
    """The global index of a piece's first element, given the offset of its whole and a `shift` within it."""
    return [by if start == 0 else start + by for start, by in zip(offset, shift, strict=True)]
