"""Price a model's sections under many layouts; what layouts share is priced once.

A kernel takes as long whatever the sizes of axes that split none of its tensors. The axis that shares out experts
splits few kernels, so most of a thousand layouts have most kernels in common. A section has hundreds of values, but few
shapes. Kernels are priced by `price_layers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from cost_models.device import Device
from passes.search.layers.count_layers import Phase, Section, SectionKernel, Sized
from passes.search.layers.price_layers import (
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

_WHERE = ("all", "core", "tail")
"""Parts of a phase: every kernel, attention's core, and the last product with a weight with what follows."""


@dataclass(frozen=True, slots=True)
class _KernelGroup:
    """Kernels of a phase, without their names, whose price depends on the same axes.

    Args:
        kernels: each with the parts of the phase that it is in, an index of `_WHERE`.
        axes: the axes.
        varies: whether the price depends on the micro-batch.
    """

    kernels: tuple[tuple[SectionKernel, tuple[int, ...]], ...]
    axes: tuple[str, ...]
    varies: bool


@dataclass(frozen=True, slots=True)
class _SectionValues:
    """The values of a section by shape.

    Args:
        values: the shapes.
        kept: how often each is saved, in attention's core, entering, and in each workspace, [3 + workspaces, shapes].
        parameters: how often it is the shape of a parameter that all replicas hold, and of an expert, [2, shapes].
    """

    values: tuple[Sized, ...]
    kept: NDArray[np.int64]
    parameters: NDArray[np.int64]
    matrices: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """A section in parts: groups of its phases by number, its values, and the axes on whose sizes its price depends."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    held: _SectionValues
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
    _groups: dict[_KernelGroup, int] = field(default_factory=dict)
    _by_number: list[_KernelGroup] = field(default_factory=list)
    _busy: dict[tuple[object, ...], tuple[Busy, ...]] = field(default_factory=dict)
    _sizes: dict[tuple[object, ...], SectionSizes] = field(default_factory=dict)
    _prices: dict[tuple[object, ...], SectionPrice] = field(default_factory=dict)

    def sizes(self, key: object, section: Section, batch: int, sizes: Sizes, *, is_block: bool) -> SectionSizes:
        """What a section, which `key` names, keeps and holds, for `batch` sequences on axes of these sizes.

        Operands of products that run in 8 bits are kept so (Transformer Engine, module/linear.py: `saved_inputmat`).
        """
        parts = self._parts_of(key, section, is_block=is_block)
        known = (key, batch, *(sizes[axis] for axis in parts.axes))
        if known not in self._sizes:
            self._sizes[known] = SectionSizes(**_held_sizes(parts.held, batch, sizes))
        return self._sizes[known]

    def price(self, key: object, section: Section, batch: int, sizes: Sizes, *, is_block: bool) -> SectionPrice:
        """The price of a section; products run in the precision inside blocks only, if it is narrower."""
        parts = self._parts_of(key, section, is_block=is_block)
        known = (key, batch, *(sizes[axis] for axis in parts.axes))
        if known not in self._prices:
            held = _held_sizes(parts.held, batch, sizes)
            setting = Setting(batch, tuple(sizes.items()), self.device, self.precision, self.separate_experts)
            precision = self.precision if is_block else ""
            forward, backward = (
                self._phase(phase, groups, setting, precision, held["entering_bytes"])
                for phase, groups in ((section.forward, parts.forward), (section.backward, parts.backward))
            )
            self._prices[known] = SectionPrice(**held, forward=forward, backward=backward)
        return self._prices[known]

    def _phase(
        self, phase: Phase, groups: Sequence[int], setting: Setting, precision: str, entering_bytes: int
    ) -> PhasePrice:
        """The price of a phase."""
        sizes = dict(setting.sizes)
        busy, core, tail = Busy(), Busy(), Busy()
        for number in groups:
            group = self._by_number[number]
            known = (number, precision, setting.batch * group.varies, *(sizes[axis] for axis in group.axes))
            if known not in self._busy:
                self._busy[known] = _group_price(group, setting, sizes, precision)
            found = self._busy[known]
            busy, core, tail = busy + found[0], core + found[1], tail + found[2]
        sent = tuple(traffic_of(item, setting.batch, sizes, entering_bytes) for item in phase.sent)
        return PhasePrice(busy, core, tail, sent)

    def _parts_of(self, key: object, section: Section, *, is_block: bool) -> _Parts:
        if key not in self._parts:
            forward, backward = self._groups_in(section.forward), self._groups_in(section.backward)
            held = _held(section, is_narrow=is_block and self.precision == "f8")
            sent = [item.value for phase in (section.forward, section.backward) for item in phase.sent]
            axes = {axis for number in (*forward, *backward) for axis in self._by_number[number].axes}
            self._parts[key] = _Parts(forward, backward, held, tuple(sorted(axes | _axes_in([*held.values, *sent]))))
        return self._parts[key]

    def _groups_in(self, phase: Phase) -> tuple[int, ...]:
        """The groups of a phase, by number: equal ones of other sections have the same."""
        alone = Setting(1, (), self.device, self.precision)
        products = [bool(price_kernel(kernel, alone, _ALONE, "").matmul_s) for kernel in phase.kernels]
        lasts = [place for place, kernel in enumerate(phase.kernels) if products[place] and kernel.has_weight]
        found: dict[tuple[tuple[str, ...], bool], list[tuple[SectionKernel, tuple[int, ...]]]] = {}
        for place, kernel in enumerate(phase.kernels):
            tensors = (*kernel.inputs, *kernel.outputs)
            alike = (tuple(sorted(_axes_in(tensors))), any(any(item.step) for item in tensors))
            is_in = (True, kernel.is_core, place >= max(lasts, default=0))
            parts = tuple(part for part, is_there in enumerate(is_in) if is_there)
            found.setdefault(alike, []).append((replace(kernel, name=""), parts))
        numbers = []
        for (axes, varies), kernels in found.items():
            group = _KernelGroup(tuple(kernels), axes, varies)
            if group not in self._groups:
                self._groups[group] = len(self._by_number)
                self._by_number.append(group)
            numbers.append(self._groups[group])
        return tuple(numbers)


_ALONE = {"tensor": 1, "context": 1, EXPERT: 1}


def _group_price(group: _KernelGroup, setting: Setting, sizes: Sizes, precision: str) -> tuple[Busy, ...]:
    """Seconds of a group in each part of the phase."""
    total = [Busy() for _ in _WHERE]
    for kernel, parts in group.kernels:
        taken = price_kernel(kernel, setting, sizes, precision)
        for part in parts:
            total[part] += taken
    return tuple(total)


def _axes_in(items: Iterable[Sized]) -> set[str]:
    return {axis for item in items for axes in item.splits for axis in axes}


def _held(section: Section, *, is_narrow: bool) -> _SectionValues:
    saved = [_whole(replace(item.value, itemsize=1) if is_narrow and item.is_operand else item.value)
             for item in section.saved]  # fmt: skip
    core = [value for value, item in zip(saved, section.saved, strict=True) if item.is_core]
    workspaces = [list(map(_stored, items)) for items in section.workspaces]
    kept = [saved, core, list(map(_whole, section.entering)), *workspaces]
    dense, expert = (
        [value for name, value in section.parameters.items() if (name in section.expert_parameters) == is_expert]
        for is_expert in (False, True)
    )
    values = tuple(dict.fromkeys(value for items in (*kept, dense, expert) for value in items))

    def table(rows: Sequence[Sequence[Sized]]) -> NDArray[np.int64]:
        counts = [Counter(items) for items in rows]
        return np.array([[count[value] for value in values] for count in counts], dtype=np.int64)

    matrices = sum(len(value.first) > 1 for value in dense)
    return _SectionValues(values, table(kept), table([dense, expert]), matrices)


def _held_sizes(held: _SectionValues, batch: int, sizes: Sizes) -> dict[str, int]:
    """The fields of `SectionSizes`."""
    shapes = [value.local_bytes(batch, sizes) for value in held.values]
    saved, core, entering, *workspaces = (held.kept @ np.array(shapes, dtype=np.int64)).tolist()
    elements = np.array([prod(value.shape(1, sizes)) for value in held.values], dtype=np.int64)
    dense, expert = (held.parameters @ elements).tolist()
    return {
        "saved_bytes": saved, "core_bytes": core, "entering_bytes": entering,
        "workspace_bytes": max(workspaces, default=0), "parameters": dense,
        "matrices": held.matrices, "expert_parameters": expert,
    }  # fmt: skip


def _whole(item: Sized) -> Sized:
    """A value as it is stored: rows that experts' ranks exchange stay as many."""
    return replace(item, splits=tuple(tuple(axis for axis in axes if axis != EXPERT) for axes in item.splits))


def _stored(item: Sized) -> Sized:
    """The same of what kernels read and write; of experts' weights and gradients a rank has those of its experts."""
    return _whole(item) if any(item.step) else item
