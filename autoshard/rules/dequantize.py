"""Rule of `autoshard::dequantize_nf4`. Ranks may split rows of the weight where a split cuts no block of weights.

Rows of a piece are then consecutive bytes of the packed weight, and consecutive scales. So a rank either dequantises
its own rows, or first gathers the packed bytes, an eighth of the bytes of float32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch

import autoshard.kernels as kernels
from autoshard.rules.local import LocalContext, shifted
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule


@sharding_rule(kernels.dequantize_nf4)
def dequantize_nf4(
    packed: torch.Tensor, absmax: torch.Tensor, nested: torch.Tensor | None, shape: Sequence[int], blocksize: int,
    *_: Any,
) -> Rule:  # fmt: skip
    """Return a rule in which ranks split the factor n, the number of groups of g rows.

    g is the least number of rows that are whole blocks of weights. If the number of rows is no multiple of g, no dim
    may be split.
    """
    rows, columns = shape
    group = _rows_of_blocks(columns, blocksize)
    rest = "" if nested is None else ", _"
    if rows % group:
        return Rule(f"_ 1, _{rest} -> _ _")
    sizes = {"n": rows // group, "g": group}
    return Rule(f"(n p) 1, (n s){rest} -> (n g) _", sizes=sizes, blocked=("p", "s", "g"), local=_local)


def _rows_of_blocks(columns: int, blocksize: int) -> int:
    """Return the least number of rows that are whole blocks. A row has `columns` weights, a block has `blocksize`."""
    return blocksize // gcd(columns, blocksize)


def _local(
    context: LocalContext, packed: Any, absmax: Any, nested: Any, shape: Sequence[int], blocksize: int,
    first_block: Any, dtype: torch.dtype,
) -> Any:  # fmt: skip
    rows, columns = context.output_shape()
    row, _ = context.output_offset()
    (place,) = shifted([first_block], [row * columns // blocksize])
    return context.default(packed, absmax, nested, [rows, columns], blocksize, place, dtype)
