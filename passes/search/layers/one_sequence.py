"""The program of one sequence, from those of two and of three.

It is the program of two sequences, in which every size is as much less as two sequences have less than three.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.program import Program
from passes.preparation.rewriting import copy_program


def program_of_one(double: Program, triple: Program) -> Program:
    """The program of one sequence which those of two and of three continue.

    Raises:
        TraceError: these run different operators, or a size is none for one sequence.
    """
    single = copy_program(double)
    for node, three in zip_longest(single.graph.nodes, triple.graph.nodes):
        if node is None or three is None or not _are_alike(node, three):
            raise TraceError(
                f"The model runs other operators for three sequences than for two: {_named(three)} in place of "
                f"{_named(node)}, so its cost cannot be told from one trace."
            )
        node.args, node.kwargs = pytree.tree_map(_size_before, (node.args, node.kwargs), (three.args, three.kwargs))
        if "val" in node.meta:
            values = (node.meta["val"], three.meta["val"])
            node.meta["val"] = pytree.tree_map(lambda two, three, node=node: _value_before(node, two, three), *values)
    return single


def _are_alike(two: fx.Node, three: fx.Node) -> bool:
    if two.op != three.op or (two.op != "placeholder" and two.target != three.target):
        return False
    if [operand.name for operand in two.all_input_nodes] != [operand.name for operand in three.all_input_nodes]:
        return False
    forms = [pytree.tree_structure((node.args, node.kwargs, node.meta.get("val"))) for node in (two, three)]
    return forms[0] == forms[1]


def _named(node: fx.Node | None) -> str:
    return "none" if node is None else f"{node.target} ({node.meta.get('source') or 'unknown line'})"


def _size_before(two: Any, three: Any) -> Any:
    """An argument of a call for one sequence: a size, or what does not depend on sequences."""
    return 2 * two - three if type(two) is int and type(three) is int else two


def _value_before(node: fx.Node, two: Any, three: Any) -> Any:
    """A value for one sequence."""
    if not isinstance(two, torch.Tensor):
        return _size_before(two, three)
    shape = [2 * first - second for first, second in zip(two.shape, three.shape, strict=False)]
    strides = [2 * first - second for first, second in zip(two.stride(), three.stride(), strict=False)]
    if two.ndim != three.ndim or any(size < 0 for size in (*shape, *strides)):
        raise TraceError(
            f"{_named(node)} has a tensor of {list(two.shape)} for two sequences, and of {list(three.shape)} for "
            "three, so its cost cannot be told from one trace."
        )
    fakes: Any = two
    with fakes.fake_mode:
        return torch.empty_strided(shape, strides, dtype=two.dtype, device=two.device)
