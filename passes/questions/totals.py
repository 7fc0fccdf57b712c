"""Sum counts over a model's blocks into one expression, linear in the number of blocks of each kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from autoshard.errors import FormulaError
from autoshard.tracing import BlockList
from cost_models.formulas import Size, size_symbol


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """A block of a program.

    Args:
        path: path of the list of blocks.
        kind: number of the block's kind in the list. Blocks of one kind are equal.
        position: index of the block in the list.
        stands_for: number of the model's blocks that it represents. It is more than one if the program leaves out
            blocks.
    """

    path: str
    kind: int
    position: int = 0
    stands_for: int = 1


COMMUNICATION = "communication_bytes"
"""Name of the quantity of bytes sent over all axes. "communication_bytes_data" is the bytes sent over axis "data"."""

Counted = tuple[BlockPlace | None, Size]
"""A block and the FLOPs, bytes or elements of one operation in it; None for operations outside of blocks."""


def block_symbols(lists: Sequence[BlockList]) -> dict[tuple[str, int], str]:
    """Return a dict from (path of a list, kind of block) to the symbol's name for the number of blocks of this kind.

    The name is "layers". If there are several lists, the list's path follows ("layers_encoder_block"). If a list has
    several kinds of blocks, the number of the kind follows ("layers_0").
    """
    found: dict[tuple[str, int], str] = {}
    for item in lists:
        path = item.path.split(".") if len(lists) > 1 else []
        kinds = list(dict.fromkeys(item.kinds))
        for kind in kinds:
            found[item.path, kind] = "_".join(["layers", *path, *([str(kind)] if len(kinds) > 1 else [])])
    return found


def total(counts: Iterable[Counted], symbols: Mapping[tuple[str, int], str], fixed: Collection[str] = ()) -> Size:
    """Return the sum of counts as an expression, linear in the number of blocks of each kind.

    `counts` has at least one count for each block of the program, which may be zero. `symbols` is the result of
    `block_symbols`. Symbols whose names are in `fixed` are replaced by the model's own numbers.

    Raises:
        FormulaError: blocks of one kind have different counts.
    """
    parts: defaultdict[BlockPlace | None, list[Any]] = defaultdict(list)
    for place, size in counts:
        parts[place].append(size)
    result: Any = sympy.Add(*parts.pop(None, ()))
    kinds: defaultdict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
    for place, sizes in parts.items():
        assert place is not None
        one = sympy.expand(sympy.Add(*sizes))
        if symbols[place.path, place.kind] in fixed:
            result += place.stands_for * one
        else:
            kinds[place.path, place.kind][place.position] = one
    for key, blocks in kinds.items():
        result += _linear(symbols[key], [blocks[position] for position in sorted(blocks)])
    return sympy.expand(result)


def _linear(symbol: str, blocks: Sequence[Any]) -> Size:
    """Return the sum of the counts of all blocks of a kind, as an expression in their number.

    The expression is `symbol` times the count of an inner block, plus a constant for the first and the last block.

    Raises:
        FormulaError: inner blocks have different counts.
    """
    between = blocks[1:-1] or blocks
    if any(item != between[0] for item in between):
        raise FormulaError(
            f"The plan does not treat all blocks alike, so costs are not linear in {symbol}. Constrain them to one "
            f"layout (constraints={{'*.weight': ...}}), or plan for at least three blocks of a kind. Or hold their "
            f"number fixed: formula(..., fixed=({symbol!r},))."
        )
    edges = sympy.Add(*(item - between[0] for item in blocks))
    return edges + size_symbol(symbol) * between[0]
