"""Writes the Triton source of the kernel of a group of operators (`Group`).

The kernel of a group without reductions walks all elements in one flat index, cut into blocks. The kernel of a group
with reductions works on tiles of whole rows, which stay in registers between a sum and its readers.

A *value number* is an index into the group's operands, followed by the results of its steps.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import triton

from autoshard.kernels.generated.group import Group, GroupStep, ValueShape, map_refs
from autoshard.kernels.generated.loops import Loops, NoLoopsError, find_loops
from autoshard.kernels.generated.operators import (
    TRITON_TYPES,
    IndexKind,
    convert,
    kind_of,
    number_of,
    reduced_dims,
    write_number,
    write_pointwise,
    write_reduction,
)
from autoshard.kernels.launch import MAX_COLUMNS

_BLOCK = 1024
_TILE = 2048
_ELEMENTS_PER_THREAD = 8
_MAX_REGISTERS = 128
_MAX_POINTERS = 24
_RESERVED = frozenset({"tl", "triton", "index", "row", "column", "inside", "in_row", "in_column", *keyword.kwlist})
_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ElementLayout:
    """The launch configuration of a group's kernel.

    Args:
        blocks: the values of the kernel's `constexpr` arguments.
        programs: the number of Triton programs.
        num_warps: the warps of each program.
    """

    blocks: Mapping[str, int]
    programs: int
    num_warps: int

    @property
    def tunable(self) -> tuple[str, ...]:
        """Names of the block sizes that tuning may change."""
        return tuple(name for name in ("BLOCK", "BLOCK_R") if name in self.blocks)

    def grid(self, blocks: Mapping[str, int]) -> tuple[int]:
        """Return the launch grid for block sizes `blocks` by name, which tuning may have changed."""
        elements = self.programs * math.prod(self.blocks[name] for name in self.tunable)
        return (math.ceil(elements / math.prod(blocks[name] for name in self.tunable)),)


@dataclass(frozen=True, slots=True)
class Source:
    """The generated kernel of a group of operators: its source text, and its launch configuration.

    The text is the `@triton.jit` function, decorator included.
    """

    text: str
    layout: ElementLayout


def lay_out(loops: Loops) -> ElementLayout:
    """Return the launch configuration of a group's kernel. Raise `NoLoopsError` if rows are too long for registers."""
    if not loops.columns:
        return ElementLayout({"BLOCK": _BLOCK}, math.ceil(loops.row_count / _BLOCK), 4)
    if loops.column_count > MAX_COLUMNS:
        raise NoLoopsError(f"a row has {loops.column_count} elements; a kernel holds up to {MAX_COLUMNS}.")
    width = triton.next_power_of_2(loops.column_count)
    rows = max(1, min(16, _TILE // width))
    if _lies_by_columns(loops):
        # Neighbouring rows are adjacent in memory: take enough of them for whole sectors of 32 bytes.
        rows = 16
        if rows * width > MAX_COLUMNS:
            raise NoLoopsError(f"adjacent columns of {loops.column_count} elements are more than registers hold.")
    rows = min(rows, triton.next_power_of_2(loops.row_count))
    warps = max(4, min(16, rows * width // (32 * _ELEMENTS_PER_THREAD)))
    return ElementLayout({"BLOCK_R": rows, "BLOCK_C": width}, math.ceil(loops.row_count / rows), warps)


def _lies_by_columns(loops: Loops) -> bool:
    """Whether some operand or result has stride 1 along the last row axis, and a larger stride along columns."""
    count = len(loops.rows)
    return any(own[count - 1] == 1 and own[-1] > 1 for own in loops.strides.values()) if count else False


def write_source(group: Group, names: Sequence[str], purpose: str) -> Source:
    """Return the source of a group's kernel and its launch configuration, or raise `NoLoopsError` if there is none.

    `names` has a name for every value. `purpose` is the first lines of the kernel's docstring.
    """
    return _KernelSource(group, _identifiers(names), purpose).write()


def _identifiers(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` with "_" appended to names that are repeated or reserved in a kernel."""
    found: dict[str, None] = {}
    for name in names:
        while name in found or name in _RESERVED:
            name += "_"
        found[name] = None
    return tuple(found)


@dataclass(slots=True)
class _KernelSource:
    group: Group
    names: tuple[str, ...]
    purpose: str
    loops: Loops = field(init=False)
    layout: ElementLayout = field(init=False)
    texts: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.loops = find_loops(self.group)
        self.layout = lay_out(self.loops)

    def write(self) -> Source:
        group = self.group
        if len(group.operands) + len(group.results) > _MAX_POINTERS:
            raise NoLoopsError(f"the group reads and writes more than {_MAX_POINTERS} tensors.")
        if any(value.dtype not in TRITON_TYPES for value in group.values):
            raise NoLoopsError("a value has a dtype that kernels do not support.")
        for index, step in enumerate(group.steps, len(group.operands)):
            self._write_step(index, step)
        for index in group.results:
            place, mask = self._place(index)
            masked = f", mask={mask}" if mask else ""
            self.lines.append(f"tl.store({self.names[index]}_ptr{place}, {self._text(index)}{masked})")
        self._check_registers()
        pointers = [f"{self.names[index]}_ptr" for index in (*range(len(group.operands)), *group.results)]
        blocks = [f"{name}: tl.constexpr" for name in self.layout.blocks]
        head = ["@triton.jit", f"def {group.name}(", *(f"    {item}," for item in (*pointers, *blocks)), "):"]
        body = [*self._docstring(), *self._indices(), *self.lines]
        text = "\n".join([*head, *(f"    {line}".rstrip() for line in body)])
        return Source(text, self.layout)

    # Steps.

    def _write_step(self, index: int, step: GroupStep) -> None:
        kind = kind_of(step.target)
        if kind is IndexKind.VIEW:
            self.texts[index] = self._text(step.operands[0])
            return
        if kind is IndexKind.CONSTANT:
            triton_type = TRITON_TYPES[step.value.dtype]
            shape = "[1, 1]" if self.loops.columns else "[1]"
            written = f"tl.full({shape}, {write_number(number_of(step), triton_type)}, {triton_type})"
        elif kind is IndexKind.REDUCTION:
            written = self._write_reduction(step)
        else:
            texts = {operand: self._text(operand) for operand in step.operands}
            written = write_pointwise(step, self.group.values, texts)
        if written is None:
            raise NoLoopsError(f"{step.target} has no expression for these arguments.")
        self.texts[index] = self.names[index]
        self.lines.append(f"{self.names[index]} = {written}  # {self._call(step)}")

    def _write_reduction(self, step: GroupStep) -> str | None:
        (operand,) = step.operands
        value = self.group.values[operand]
        text = self._text(operand)
        if all(value.shape[dim] == 1 for dim in reduced_dims(step, value)):
            return convert(text, TRITON_TYPES[value.dtype], TRITON_TYPES[step.value.dtype])
        self.used |= {"in_row", "in_column"}
        return write_reduction(step, value, text, "inside")

    def _text(self, index: int) -> str:
        """Return the Triton expression of value number `index`.

        For an operand that the kernel has not read yet, also write the line that loads the operand.
        """
        if index not in self.texts:
            name, triton_type = self.names[index], TRITON_TYPES[self.group.values[index].dtype]
            place, mask = self._place(index)
            other = "" if not mask else f", mask={mask}, other={write_number(0, triton_type)}"
            cast = ".to(tl.float32)" if triton_type == "tl.float32" else f".to({triton_type})"
            self.lines.append(f"{name} = tl.load({name}_ptr{place}{other}){cast}")
            self.texts[index] = name
        return self.texts[index]

    def _call(self, step: GroupStep) -> str:
        shown = [*(map_refs(item, self.names.__getitem__) for item in step.args)]
        shown += [f"{name}={map_refs(item, self.names.__getitem__)}" for name, item in step.kwargs]
        return f"{step.target}({', '.join(str(item) for item in shown)})"

    # Indices.

    def _place(self, index: int) -> tuple[str, str]:
        """Return source texts of the offset and the mask with which a program loads or stores value number `index`.

        The offset starts with " + ". Both texts are empty for a single element.
        """
        strides = self.loops.strides[index]
        count = len(self.loops.rows)
        by_row = self._offset(self._flat, self.loops.rows, strides[:count], 0)
        if index in self.group.results and not by_row:
            by_row = self._flat  # the only row is 0, but the stored value is a tile
        by_column = self._offset("column", self.loops.columns, strides[count:], count)
        if not self.loops.columns:
            return (f" + {by_row}", "inside") if by_row else ("", "")
        mask = {(True, True): "inside", (True, False): "in_row", (False, True): "in_column", (False, False): ""}
        found = mask[bool(by_row), bool(by_column)]
        self.used |= {"in_row", "in_column"} if found == "inside" else {found} - {""}
        return "".join(f" + {text}" for text in (by_row, by_column) if text), found

    @property
    def _flat(self) -> str:
        return "row" if self.loops.columns else "index"

    def _offset(self, flat: str, sizes: Sequence[int], strides: Sequence[int], first: int) -> str:
        """Return the source text of a tensor's offset along the axes of the rows, or of the columns.

        For example, "row * 4" if the tensor is contiguous over the axes, "i0 * 8 + i1" if not, "" if all strides are 0.

        Args:
            flat: the variable with the flat index over the axes: "row", "column" or "index".
            sizes, strides: size of each axis, and the tensor's stride along the axis, in elements.
            first: number of the first axis. The index along axis number n is the variable `i{n}`.
        """
        if not any(strides):
            return ""
        if all(strides[at] == strides[at + 1] * sizes[at + 1] for at in range(len(sizes) - 1)):
            return _times(flat, strides[-1])
        terms = []
        for at, stride in enumerate(strides):
            if stride:
                self.used.add(f"i{first + at}")
                terms.append(_times(f"i{first + at}", stride))
        return " + ".join(terms)

    def _indices(self) -> Iterator[str]:
        loops = self.loops
        wide = ".to(tl.int64)" if self._is_large() else ""
        program = f"tl.program_id(0){wide}"
        if not loops.columns:
            yield f"index = {program} * BLOCK + tl.arange(0, BLOCK)"
            yield f"inside = index < {loops.row_count}"
        else:
            yield f"row = ({program} * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]"
            yield f"column = tl.arange(0, BLOCK_C){wide}[None, :]"
            if "in_row" in self.used:
                yield f"in_row = row < {loops.row_count}"
            if "in_column" in self.used:
                yield f"in_column = column < {loops.column_count}"
            if {"in_row", "in_column"} <= self.used:
                yield "inside = in_row & in_column"
        for flat, sizes, first in ((self._flat, loops.rows, 0), ("column", loops.columns, len(loops.rows))):
            for at in range(len(sizes)):
                if f"i{first + at}" in self.used:
                    yield f"i{first + at} = {_digit(flat, sizes, at)}"

    def _is_large(self) -> bool:
        loops = self.loops
        sizes = (*loops.rows, *loops.columns)
        ends = [
            sum((size - 1) * stride for size, stride in zip(sizes, own, strict=True)) for own in loops.strides.values()
        ]
        # One more block, because tuning may double a block.
        padded = (self.layout.programs + 1) * self.layout.blocks.get("BLOCK", self.layout.blocks.get("BLOCK_R", 1))
        return max(*ends, padded * max(1, loops.column_count)) > _INT32

    def _docstring(self) -> Iterator[str]:
        yield from f'"""{self.purpose}'.splitlines()
        yield ""
        for index in (*range(len(self.group.operands)), *self.group.results):
            value = self.group.values[index]
            lies = "" if _is_contiguous(value) else f", strides {list(value.stride)}"
            yield f"{self.names[index]}_ptr: {value}{lies}"
        yield '"""'

    # Registers.

    def _check_registers(self) -> None:
        elements = math.prod(self.layout.blocks.values()) / (32 * self.layout.num_warps)
        alive = _most_alive(self.group, self.loops)
        if alive * elements > _MAX_REGISTERS:
            raise NoLoopsError(f"{alive} tiles are alive at once, {elements:.0f} elements of each in every thread.")


def _most_alive(group: Group, loops: Loops) -> int:
    """Return the greatest number of tiles that a kernel holds at one time.

    A kernel holds the tile of a value from just before its first use to its last use.
    """
    first = len(group.operands)
    last: dict[int, int] = {index: len(group.steps) for index in group.results}
    for at, step in enumerate(group.steps):
        for index in step.operands:
            last[index] = max(last.get(index, 0), at)
    begins: dict[int, int] = {}
    for at, step in enumerate(group.steps):
        for index in (*step.operands, first + at):
            begins.setdefault(index, at)
    tiles = [
        index
        for index in begins
        if (loops.spans[index][1] or not loops.columns)
        and (index < first or kind_of(group.step_of(index).target) in (IndexKind.POINTWISE, IndexKind.REDUCTION))
    ]
    return max((sum(begins[i] <= at <= last.get(i, at) for i in tiles) for at in range(len(group.steps))), default=0)


def _digit(flat: str, sizes: Sequence[int], at: int) -> str:
    """Return the source text of the index along axis number `at`. `sizes` has the sizes of all axes, major to minor.

    `flat` is the variable that has the flat index over all axes.
    """
    below = math.prod(sizes[at + 1 :])
    divided = flat if below == 1 else f"{flat} // {below}"
    return divided if at == 0 else f"{divided} % {sizes[at]}"


def _times(name: str, stride: int) -> str:
    return name if stride == 1 else f"{name} * {stride}"


def _is_contiguous(value: ValueShape) -> bool:
    return torch.empty_strided(value.shape, value.stride, device="meta").is_contiguous()
