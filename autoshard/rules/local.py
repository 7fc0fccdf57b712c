"""The interface through which rewrites of sharding rules emit the calls of each rank.

Most operators run unchanged on their local operands. An operator whose arguments name shapes, or whose value depends on
global indices, needs a *rewrite*. This function *emits* the calls that each rank runs in place of the traced call: it
appends them to the ranks' program. Its operands are fx proxies of local values. Every call goes through `context.call`,
so that calls without tensor operands (`arange`) are also emitted instead of run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class LocalContext(Protocol):
    """Sizes and positions of the running rank's pieces of a call's factors, and methods to emit calls.

    All ranks run one program. So a number that differs between ranks is a value of the program, not a Python int.
    """

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of the call that are larger than one."""
        ...

    def is_split(self, factor: str) -> bool:
        """Whether some axis splits `factor`."""
        ...

    def shards(self, factor: str) -> int:
        """Return the number of pieces of `factor`, 1 if it is not split."""
        ...

    def index(self, factor: str) -> Any:
        """Return the index of the running rank's piece of `factor`: a value of the program, or 0 if it is not split."""
        ...

    def offset(self, factor: str) -> Any:
        """Return the global index of the first element of the running rank's piece of `factor`."""
        ...

    def local_size(self, factor: str) -> int:
        """Return the number of elements of `factor` on each rank, padding included."""
        ...

    def real_size(self, factor: str) -> Any:
        """Return the number of elements of `factor` on the running rank without padding, from 0 to `local_size`."""
        ...

    def global_size(self, factor: str) -> int:
        """Return the number of elements of `factor` over all ranks."""
        ...

    def pieces(self, factor: str) -> list[tuple[int, int]]:
        """Return, for each piece of `factor` in order, the global index of its first element, and its `real_size`."""
        ...

    def input_shape(self, operand: int) -> list[int]:
        """Return the local shape of a tensor operand, padding included."""
        ...

    def input_offset(self, operand: int) -> list[Any]:
        """Return the global index of the first element of the rank's piece of an operand, for each dim."""
        ...

    def output_shape(self, output: int = 0) -> list[int]:
        """Return the local shape of a result, padding included."""
        ...

    def output_offset(self, output: int = 0) -> list[Any]:
        """Return the global index of the first element of the rank's piece of a result, for each dim."""
        ...

    def all_reduce(self, value: Any, reduction: str, factor: str) -> Any:
        """Emit an all-reduce of `value` over the ranks that split `factor`, and return the reduced value.

        `reduction` is "sum", "max" or "min".
        """
        ...

    def all_gather(self, value: Any, factor: str) -> Any:
        """Emit an all-gather of `value` over the ranks that split `factor`.

        Return the ranks' values stacked on a new dim 0, in the order of their pieces.
        """
        ...

    def group(self, *factors: str) -> str | None:
        """Return the axes that each split every one of `factors`, joined as in "data,model"; None without such an axis.

        In ring attention, for example, the axes split both the queries and the keys.
        """
        ...

    def fill(self, value: Any, operand: int, factor: str, number: bool | int | float) -> Any:
        """Emit calls that write `number` into the padding of `factor` in `value`, and return the result.

        `value` has the dims of operand number `operand`.
        """
        ...

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit a call of any operator or function on local values, and return its result."""
        ...

    def default(self, *args: Any, **kwargs: Any) -> Any:
        """Emit a call of the traced call's own operator on local operands, and return its result."""
        ...


def whole_to_piece(context: LocalContext, factors: Iterable[str]) -> float:
    """Return the number of elements along `factors` in the whole tensor, divided by the number in a padded piece."""
    sizes = [(context.global_size(factor), context.local_size(factor)) for factor in factors]
    return math.prod(size / local for size, local in sizes if size != local)


def shifted(offset: Sequence[Any], shift: Sequence[Any]) -> list[Any]:
    """Return the global index, by dim, of the first element of a piece within a tensor.

    `shift` is the element's index in the tensor, and `offset` is the global index of the tensor's first element.
    """
    return [by if start == 0 else start + by for start, by in zip(offset, shift, strict=True)]
