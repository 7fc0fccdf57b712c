"""Price a model's sections under many layouts; what layouts share is priced once.

A kernel takes as long whatever the sizes of axes that split none of its tensors, and so does a run of kernels. The axis
that shares out experts splits few kernels, so that of a thousand layouts most have almost all runs in common. Likewise
bytes: a section has hundreds of values, but few shapes. Kernels are priced by `price_sections`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Generic, TypeVar

from cost_models.device import Device
from passes.sections.count_sections import Phase, Section, SectionKernel, Sized
from passes.sections.price_sections import (
    EXPERT,
    Busy,
    PhasePrice,
    SectionPrice,
    SectionSizes,
    Setting,
    price_kernel,
    traffic_of,
)

Sizes = Mapping[str, int]
"""Sizes of axes."""


@dataclass(frozen=True, slots=True)
class _Priced:
    """A kernel without its name; the axes on which its price depends, and whether on the micro-batch."""

    kernel: SectionKernel
    axes: tuple[str, ...]
    varies: bool


@dataclass(frozen=True, slots=True)
class _KernelRun:
    """Kernels that follow each other, by number; `axes`, `varies`: as of kernels, of any of them."""

    kernels: tuple[int, ...]
    axes: tuple[str, ...]
    varies: bool


@dataclass(frozen=True, slots=True)
class _RunTimes:
    """What a run takes: all of it; attention's core; what is behind the last product with a weight, and that.

    `restarts`: whether there is such a product.
    """

    busy: Busy
    core: Busy
    tail: Busy
    restarts: bool

    def then(self, other: _RunTimes) -> _RunTimes:
        """This run and the next one."""
        tail = other.tail if other.restarts else self.tail + other.busy
        return _RunTimes(self.busy + other.busy, self.core + other.core, tail, self.restarts or other.restarts)


_IDLE = Busy()
_NOTHING = _RunTimes(_IDLE, _IDLE, _IDLE, restarts=False)

_T = TypeVar("_T")


@dataclass
class _Numbered(Generic[_T]):
    """Things by number; equal ones have one."""

    items: list[_T] = field(default_factory=list)
    numbers: dict[_T, int] = field(default_factory=dict)

    def number(self, item: _T) -> int:
        """Its number."""
        if item not in self.numbers:
            self.numbers[item] = len(self.items)
            self.items.append(item)
        return self.numbers[item]


@dataclass(frozen=True, slots=True)
class _Shapes:
    """A section's values by shape, with their number.

    Args:
        values: the shapes that follow as numbers, from 0.
        saved, core: kept for the backward; of these in attention's core.
        entering: from other sections.
        workspaces: what kernels read and write of what is not kept.
        parameters: those that all replicas hold, and `expert` ones.
        matrices: how many of `parameters` have two dims or more.
    """

    values: tuple[Sized, ...]
    saved: Counter[int]
    core: Counter[int]
    entering: Counter[int]
    workspaces: tuple[Counter[int], ...]
    parameters: Counter[Sized]
    expert: Counter[Sized]
    matrices: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """A section in parts: its number among those that differ, runs of phases by number, shapes.

    `axes`: on whose sizes its price depends.
    """

    number: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    shapes: _Shapes
    axes: tuple[str, ...]


@dataclass
class SectionPricer:
    """Prices the sections of a model for one device; what was priced is kept.

    Args:
        device, precision, separate_experts: see `Setting`.
    """

    device: Device
    precision: str
    separate_experts: bool
    _parts: dict[object, _Parts] = field(default_factory=dict)
    _alike: _Numbered[object] = field(default_factory=lambda: _Numbered())
    _kernels: _Numbered[_Priced] = field(default_factory=lambda: _Numbered())
    _runs: _Numbered[_KernelRun] = field(default_factory=lambda: _Numbered())
    _busy: dict[tuple[object, ...], Busy] = field(default_factory=dict)
    _spans: dict[tuple[object, ...], _RunTimes] = field(default_factory=dict)
    _sizes: dict[tuple[object, ...], SectionSizes] = field(default_factory=dict)
    _prices: dict[tuple[object, ...], SectionPrice] = field(default_factory=dict)

    def sizes(self, key: object, section: Section, batch: int, sizes: Sizes, *, is_block: bool) -> SectionSizes:
        """What a section, which `key` names, keeps and holds, for `batch` sequences on axes of these sizes.

        Operands of products that run in 8 bits are kept so (Transformer Engine, module/linear.py: `saved_inputmat`).
        """
        parts = self._parts_of(key, section, is_narrow=is_block and self.precision == "f8")
        known = (parts.number, batch, *(sizes[axis] for axis in parts.axes))
        if known not in self._sizes:
            self._sizes[known] = _section_sizes(parts.shapes, batch, sizes)
        return self._sizes[known]

    def price(self, key: object, section: Section, batch: int, sizes: Sizes, *, is_block: bool) -> SectionPrice:
        """The price of a section; products run in the precision inside blocks only, if it is narrower."""
        parts = self._parts_of(key, section, is_narrow=is_block and self.precision == "f8")
        known = (parts.number, is_block, batch, *(sizes[axis] for axis in parts.axes))
        if known not in self._prices:
            held = self.sizes(key, section, batch, sizes, is_block=is_block)
            setting = Setting(batch, tuple(sizes.items()), self.device, self.precision, self.separate_experts)
            precision = self.precision if is_block else ""
            forward = self._phase(section.forward, parts.forward, setting, precision, held)
            backward = self._phase(section.backward, parts.backward, setting, precision, held)
            known_sizes = {name: getattr(held, name) for name in _HELD}
            self._prices[known] = SectionPrice(**known_sizes, forward=forward, backward=backward)
        return self._prices[known]

    def _phase(
        self, phase: Phase, runs: tuple[int, ...], setting: Setting, precision: str, held: SectionSizes
    ) -> PhasePrice:
        """The price of a phase."""
        sizes, span = dict(setting.sizes), _NOTHING
        for number in runs:
            run = self._runs.items[number]
            known = (number, precision, setting.batch * run.varies, *(sizes[axis] for axis in run.axes))
            if known not in self._spans:
                self._spans[known] = self._span(run, setting, sizes, precision)
            span = span.then(self._spans[known])
        sent = tuple(traffic_of(item, setting.batch, sizes, held.entering_bytes) for item in phase.sent)
        return PhasePrice(span.busy, span.core, span.tail, sent)

    def _parts_of(self, key: object, section: Section, *, is_narrow: bool) -> _Parts:
        """The parts of a section; sections that differ in no price have one number."""
        if key not in self._parts:
            forward, backward = self._runs_in(section.forward), self._runs_in(section.backward)
            parameters = (tuple(section.parameters.items()), section.expert_parameters)
            sent = (section.forward.sent, section.backward.sent)
            alike = (
                forward,
                backward,
                *sent,
                section.saved,
                section.entering,
                *parameters,
                section.workspaces,
                is_narrow,
            )
            shapes = _shapes_of(section, is_narrow=is_narrow)
            self._parts[key] = _Parts(self._alike.number(alike), forward, backward, shapes, _axes_of(section))
        return self._parts[key]

    def _span(self, run: _KernelRun, setting: Setting, sizes: Sizes, precision: str) -> _RunTimes:
        span = _NOTHING
        for number in run.kernels:
            item = self._kernels.items[number]
            known = (number, precision, setting.batch * item.varies, *(sizes[axis] for axis in item.axes))
            if known not in self._busy:
                self._busy[known] = price_kernel(item.kernel, setting, sizes, precision)
            taken = self._busy[known]
            core = taken if item.kernel.is_core else _IDLE
            span = span.then(_RunTimes(taken, core, taken, bool(taken.matmul_s) and item.kernel.has_weight))
        return span

    def _runs_in(self, phase: Phase) -> tuple[int, ...]:
        """The runs of a phase by number: its kernels, split where experts' begin and end."""
        numbers = []
        for _, kernels in groupby(map(_priced, phase.kernels), lambda item: EXPERT in item.axes):
            run = tuple(kernels)
            axes = tuple(sorted({axis for item in run for axis in item.axes}))
            places = tuple(self._kernels.number(item) for item in run)
            numbers.append(self._runs.number(_KernelRun(places, axes, any(item.varies for item in run))))
        return tuple(numbers)


_HELD = tuple(item.name for item in fields(SectionSizes))


def _priced(kernel: SectionKernel) -> _Priced:
    tensors = _tensors(kernel)
    return _Priced(replace(kernel, name=""), _axes_in(tensors), any(any(item.step) for item in tensors))


def _tensors(kernel: SectionKernel) -> tuple[Sized, ...]:
    return (*kernel.inputs, *kernel.outputs)


def _axes_in(items: Iterable[Sized]) -> tuple[str, ...]:
    return tuple(sorted({axis for item in items for axes in item.splits for axis in axes}))


def _axes_of(section: Section) -> tuple[str, ...]:
    """The axes on whose sizes a section's price depends."""
    phases = (section.forward, section.backward)
    tensors = [item for phase in phases for kernel in phase.kernels for item in _tensors(kernel)]
    held = [*(item.value for item in section.saved), *section.entering, *section.parameters.values()]
    held += [item for workspace in section.workspaces for item in workspace]
    return _axes_in([*tensors, *held, *(item.value for phase in phases for item in phase.sent)])


def _shapes_of(section: Section, *, is_narrow: bool) -> _Shapes:
    shapes = _Numbered[Sized]()

    def counted(items: Iterable[Sized]) -> Counter[int]:
        return Counter(map(shapes.number, items))

    saved = [(_whole(replace(item.value, itemsize=1) if is_narrow and item.is_operand else item.value), item.is_core)
             for item in section.saved]  # fmt: skip
    dense, expert = Counter[Sized](), Counter[Sized]()
    for name, value in section.parameters.items():
        (expert if name in section.expert_parameters else dense)[value] += 1
    return _Shapes(
        saved=counted(value for value, _ in saved),
        core=counted(value for value, is_core in saved if is_core),
        entering=counted(map(_whole, section.entering)),
        workspaces=tuple(
            counted(map(_stored, items.elements())) for items in _not_within(list(map(Counter, section.workspaces)))
        ),
        values=tuple(shapes.items),
        parameters=dense,
        expert=expert,
        matrices=sum(count for value, count in dense.items() if len(value.first) > 1),
    )


def _whole(item: Sized) -> Sized:
    """A value as it is stored: rows that experts' ranks exchange stay as many."""
    return replace(item, splits=tuple(tuple(axis for axis in axes if axis != EXPERT) for axes in item.splits))


def _stored(item: Sized) -> Sized:
    """The same of what kernels read and write; of experts' weights and gradients a rank has those of its experts."""
    return _whole(item) if any(item.step) else item


def _not_within(workspaces: Sequence[Counter[Sized]]) -> list[Counter[Sized]]:
    """Those that are no part of another one; of equal ones the first."""
    found: list[Counter[Sized]] = []
    for each in sorted(workspaces, key=Counter.total, reverse=True):
        if not any(each <= other for other in found):
            found.append(each)
    return found


def _section_sizes(shapes: _Shapes, batch: int, sizes: Sizes) -> SectionSizes:
    each = [item.local_bytes(batch, sizes) for item in shapes.values]

    def total(items: Counter[int]) -> int:
        return sum(each[number] * count for number, count in items.items())

    def elements(items: Counter[Sized]) -> int:
        return sum(math.prod(item.shape(1, sizes)) * count for item, count in items.items())

    return SectionSizes(
        saved_bytes=total(shapes.saved),
        core_bytes=total(shapes.core),
        entering_bytes=total(shapes.entering),
        workspace_bytes=max(map(total, shapes.workspaces), default=0),
        parameters=elements(shapes.parameters),
        matrices=shapes.matrices,
        expert_parameters=elements(shapes.expert),
    )
