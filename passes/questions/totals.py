"""Sums of counts over a model's blocks, which are linear in the number of blocks of each kind."""

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
    """A block of a program: the path of its list, its kind (blocks of a kind are equal), and its position.

    `stands_for` is the number of the model's blocks that it represents; more than one beside blocks left out.
    """

    path: str
    kind: int
    position: int = 0
    stands_for: int = 1


COMMUNICATION = "communication_bytes"
"""The quantity of bytes sent over any axis; "communication_bytes_data" is that over one axis."""

Counted = tuple[BlockPlace | None, Size]
"""A part of a count, and its block."""


def block_symbols(lists: Sequence[BlockList]) -> dict[tuple[str, int], str]:
    """(path of a list, kind) to the symbol of how many blocks of the kind there are.

    "layers", with the list's path behind it where there are several lists ("layers_encoder_block"), and the number of
    the kind where a list has several ("layers_0").
    """
    found: dict[tuple[str, int], str] = {}
    for item in lists:
        path = item.path.split(".") if len(lists) > 1 else []
        kinds = list(dict.fromkeys(item.kinds))
        for kind in kinds:
            found[item.path, kind] = "_".join(["layers", *path, *([str(kind)] if len(kinds) > 1 else [])])
    return found


def total(counts: Iterable[Counted], symbols: Mapping[tuple[str, int], str], fixed: Collection[str] = ()) -> Size:
    """The sum of counts, linear in the number of blocks of each kind, except for fixed numbers.

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
    """Count inner blocks by their number, and the first and the last separately."""
    between = blocks[1:-1] or blocks
    if any(item != between[0] for item in between):
        raise FormulaError(
            f"The plan does not treat all blocks alike, so costs are not linear in {symbol}. Constrain them to one "
            f"layout (constraints={{'*.weight': ...}}), or plan for at least three blocks of a kind. Or hold their "
            f"number fixed: formula(..., fixed=({symbol!r},))."
        )
    edges = sympy.Add(*(item - between[0] for item in blocks))
    return edges + size_symbol(symbol) * between[0]
