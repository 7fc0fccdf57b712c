"""Shortens a deep model before it is traced: two blocks of each kind stay.

Before → after: `layers = [A, A, A, ..., A]` becomes `[A, A]`, with a record of the kind of each block. Blocks are of
one kind if their modules have equal classes, plain attributes, and names, shapes and dtypes of parameters and buffers.
Trained and frozen parameters differ. An attribute that numbers the blocks (`layer_idx`) may differ. A list may have
None in a block's place; all None are equal.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

KEPT = 2
"""Number of blocks of each kind that stay. The second block follows a block of its kind, like all later blocks."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """A list of blocks of a model.

    Args:
        path: path of the list ("model.layers").
        kinds: a number for each block of the whole model, in order. Equal blocks have equal numbers.
        kept: indices, in the whole list, of the blocks that the short model keeps, in order.
    """

    path: str
    kinds: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShortModel:
    """A model with fewer blocks, and a record of its lists of blocks. It shares its parameters with the whole model."""

    model: nn.Module
    lists: tuple[BlockList, ...]


def shorten(model: nn.Module, kept: int | None = KEPT) -> ShortModel:
    """Return the model with only `kept` blocks of each kind in every outermost list of blocks; None keeps all."""
    lists: list[BlockList] = []
    replaced: dict[str, nn.ModuleList] = {}
    for path, blocks, kinds in block_lists(model):
        found = _block_list(path, kinds, len(blocks) if kept is None else kept)
        lists.append(found)
        if len(found.kept) < len(blocks):
            replaced[path] = nn.ModuleList([blocks[position] for position in found.kept])
    return ShortModel(with_lists(model, replaced) if replaced else model, tuple(lists))


def block_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList, tuple[int, ...]]]:
    """Yield (path, blocks, kinds) of each list of blocks.

    `kinds` has a number for each block. Equal blocks have equal numbers.
    """
    for path, blocks in _outer_lists(model):
        numbers: dict[object, int] = {}
        counting = _counting_attributes(blocks)
        yield path, blocks, tuple(numbers.setdefault(_signature(block, counting), len(numbers)) for block in blocks)


def _outer_lists(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield (path, list) of each outermost module list of two or more entries with parameters, in the model's order."""
    for name, child in model.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and len(child) > 1 and any(True for _ in child.parameters()):
            yield where, child
        else:
            yield from _outer_lists(child, where)


def _block_list(path: str, kinds: tuple[int, ...], kept: int) -> BlockList:
    seen: Counter[int] = Counter()
    positions = []
    for position, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= kept:
            positions.append(position)
    return BlockList(path, kinds, tuple(positions))


def _signature(block: nn.Module | None, counting: frozenset[tuple[str, str]]) -> object:
    """Return an object that is equal for equal blocks.

    `counting` has the attributes that number the blocks, as (submodule's path, name). The comparison ignores them.
    """
    if block is None:
        return None
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    tensors = (*block.named_parameters(), *block.named_buffers())
    forms = tuple((name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in tensors)
    plain = tuple(item for item in _plain(block).items() if item[0] not in counting)
    return modules, forms, plain


def _plain(block: nn.Module) -> dict[tuple[str, str], object]:
    return {
        (name, attribute): value
        for name, module in block.named_modules()
        for attribute, value in sorted(vars(module).items())
        if isinstance(value, (int, float, str))
    }


def _counting_attributes(blocks: nn.ModuleList) -> frozenset[tuple[str, str]]:
    """Return the attributes that number the blocks, as (submodule's path, name).

    Their value is one more in each block.
    """
    values = {index: _plain(block) for index, block in enumerate(blocks) if block is not None}
    start = min(values)
    return frozenset(
        key
        for key, first in values[start].items()
        if type(first) is int and all(item.get(key) == first + index - start for index, item in values.items())
    )


def with_lists(model: nn.Module, lists: Mapping[str, nn.ModuleList], path: str = "") -> nn.Module:
    """Return a shallow copy of a model, in which `lists` replace the module lists at their paths.

    `path` is the path of `model` itself.
    """
    copied = copy.copy(model)
    children: dict[str, nn.Module | None] = {}
    for name, child in model._modules.items():
        where = f"{path}.{name}" if path else name
        inside = any(item == where or item.startswith(f"{where}.") for item in lists)
        children[name] = lists.get(where) or (with_lists(child, lists, where) if inside and child else child)
    copied._modules = children
    return copied
