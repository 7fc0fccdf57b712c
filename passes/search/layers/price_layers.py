"""Price layer classes: seconds of computation by kind, bytes of every collective, bytes of memory.

Kernels are priced with `cost_models`, as in planning. Seconds of products, of attention and of memory-bound kernels are
kept apart, because communication overlaps with each in another way (`price_phases`).

A search prices a model under thousands of layouts, which have most kernels in common. The time of a kernel depends only
on the sizes of axes that split its tensors. So kernels are priced in groups that depend on the same axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.compute import memory_time, work_time
from cost_models.counting import size_bytes
from cost_models.exchanges import EXCHANGES
from cost_models.hardware import Device
from cost_models.operators import work
from cost_models.work import Kind, TensorInfo, Work
from passes.search.layers.count_layers import FUSED, LayerClass, LayerKernel, Phase, Sent, Sized
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.propagate_axis import MoveKind

EXPERT = "expert"

Sizes = Mapping[str, int]
"""The number of ranks of each axis, by the axis' name."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of a device in kernels of each kind (products, attention, memory-bound), and the number of kernels.

    Products that make parameters' gradients also count in `weight_gradient_s` and `weight_gradient_kernels`. No other
    kernel waits for them.
    """

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    kernels: int = 0
    weight_gradient_s: float = 0.0
    weight_gradient_kernels: int = 0
    flops: float = 0.0

    def __add__(self, other: Busy) -> Busy:
        return Busy(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def total_s(self) -> float:
        """Seconds of one device in all kernels, without communication."""
        return self.matmul_s + self.attention_s + self.memory_s


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """A collective over one axis.

    Args:
        bytes: bytes of the value that each rank would hold if the axis did not split it.
        copies: how often `bytes` counts each token: once, or once for each of the token's experts.
    """

    axis: str
    kind: MoveKind
    bytes: int
    copies: float = 1.0


@dataclass(frozen=True, slots=True)
class PhasePrice:
    """The price of one layer in one phase, forward or backward, for one micro-batch on one rank.

    Args:
        busy: all kernels of the phase.
        core: the kernels inside attention's core.
        tail: the kernels from the last product with a weight to the end.
        traffic: the collectives.
    """

    busy: Busy
    core: Busy
    tail: Busy
    traffic: tuple[AxisTraffic, ...]


@dataclass(kw_only=True, eq=False)
class LayerPrice:
    """The price of one layer of a class, for one micro-batch on one rank. A phase is priced when it is first read.

    Args:
        saved_bytes: bytes of values that the forward keeps for the backward.
        core_bytes: the part of `saved_bytes` in attention's core.
        entering_bytes: bytes of values of other layer classes that the forward reads.
        workspace_bytes: the most bytes that one kernel reads and writes, without saved values.
        parameters: elements on each rank, before ZeRO, of the parameters that all replicas hold.
        matrices: the number of these parameters that have two dims or more.
        expert_parameters: elements on each rank of the parameters that the expert axis splits.
        frozen, frozen_experts: the elements of `parameters` and of `expert_parameters` that have no gradient.
        phase: function from "forward" or "backward" to the price of this phase.
    """

    saved_bytes: int
    core_bytes: int
    entering_bytes: int
    workspace_bytes: int
    parameters: int
    matrices: int
    expert_parameters: int
    frozen: int = 0
    frozen_experts: int = 0
    phase: Callable[[str], PhasePrice] = field(repr=False)

    @property
    def trained(self) -> int:
        """Elements of `parameters` that have a gradient."""
        return self.parameters - self.frozen

    @property
    def trained_experts(self) -> int:
        """Elements of `expert_parameters` that have a gradient."""
        return self.expert_parameters - self.frozen_experts

    @cached_property
    def forward(self) -> PhasePrice:
        """Kernels and collectives of the layer's forward for one micro-batch on one rank."""
        return self.phase("forward")

    @cached_property
    def backward(self) -> PhasePrice:
        """Kernels and collectives of the layer's backward for one micro-batch on one rank, without recomputation."""
        return self.phase("backward")


@dataclass(frozen=True, slots=True)
class KernelPricer:
    """Price single kernels on a device.

    Args:
        precision: the precision of products in blocks. Outside of blocks, "f8" counts as 16 bits.
        separate_experts: whether each expert's product is a kernel of its own.
    """

    device: Device
    precision: str
    separate_experts: bool = False

    def price(self, kernel: LayerKernel, batch: int, sizes: Sizes, *, is_block: bool) -> Busy:
        """Return one rank's time of a kernel for `batch` sequences, with axes of the given sizes.

        `is_block` says whether the kernel is in a block. Only products in blocks run in 8 bits.
        """
        # an exchange keeps the number of a rank's tokens; of weights a rank has its share
        alone = {**sizes, EXPERT: 1}
        inputs, outputs = (
            tuple(
                TensorInfo(item.shape(batch, alone if any(item.step) else sizes), item.itemsize, item.dtype)
                for item in items
            )
            for items in (kernel.inputs, kernel.outputs)
        )
        if kernel.operator == FUSED:
            moved_s = memory_time(size_bytes((*inputs, *outputs)), self.device)
            return Busy(memory_s=self.device.launch_latency_s + moved_s, kernels=1)
        done = work(kernel.operator, inputs, outputs, kernel.arguments)
        kernels = 1
        splits = {axis for item in kernel.inputs for axes in item.splits for axis in axes}
        is_shared = EXPERT in splits and kernel.operator not in EXCHANGES
        if done.products and is_shared and sizes.get(EXPERT, 1) > 1:
            done = _shared_out(done, kernel, sizes[EXPERT])
            if self.separate_experts:  # the last wave of each product leaves processors idle
                each = tuple(item._replace(batch=1) for item in done.products for _ in range(item.batch))
                kernels = len(each)
                done = done._replace(products=each, steps=max(1, kernels))
        quantising_s = 0.0
        if done.dtype in ("bf16", "f16"):
            done = done._replace(dtype=self.precision if self.precision != "f8" else "bf16")
        is_narrow = is_block and self.precision == "f8"
        if is_narrow and done.products and (kernel.has_weight or kernel.makes_gradient):
            # an operand is read once, and written twice in eight bits: as it is and transposed
            quantising_s = sum(
                memory_time(math.prod(item.shape) * (item.itemsize + 2), self.device) for item in inputs[:1]
            )
            done = done._replace(dtype="f8", bytes_read=done.bytes_read / 2)
        time_s = work_time(done, self.device)
        if done.products:
            flops, kernels = sum(shape.flops for shape in done.products), max(1, kernels)
            late = (time_s, kernels) if kernel.makes_gradient else (0.0, 0)
            return Busy(time_s, 0.0, quantising_s, kernels, *late, flops)
        if done.kind is Kind.ATTENTION:
            return Busy(attention_s=time_s, kernels=1, flops=done.flops)
        return Busy(memory_s=time_s, kernels=int(done.kind is not Kind.VIEW))


def _shared_out(done: Work, kernel: LayerKernel, ranks: int) -> Work:
    """Return the work of one rank in a kernel whose experts are shared out over `ranks` ranks.

    The rank has fewer experts, but each expert gets tokens from all ranks.
    """
    batch = max(1, max(item.first[0] for item in kernel.inputs) // ranks)
    dim = "k" if kernel.makes_gradient else "m"
    shared = (item._replace(**{"batch": batch, dim: getattr(item, dim) * ranks}) for item in done.products)
    return done._replace(products=tuple(shared))


@dataclass(slots=True)
class _KernelGroup:
    """Kernels of a phase whose prices depend on the sizes of the same `axes`.

    With `varies`, they also depend on the micro-batch.

    Args:
        kernels: pairs of a kernel and three flags: whether it counts in the phase's `busy`, `core` and `tail`.
        prices: known sums over the kernels for `busy`, `core` and `tail`. The key is (is_block, micro-batch, sizes of
            the axes).
    """

    axes: tuple[str, ...]
    varies: bool
    kernels: list[tuple[LayerKernel, tuple[bool, bool, bool]]] = field(default_factory=list)
    prices: dict[tuple[int, ...], tuple[Busy, ...]] = field(default_factory=dict)


class _Held(NamedTuple):
    """The values of a layer class, counted by shape.

    Args:
        values: the different shapes.
        kept: how often each shape occurs, [3 + workspaces, shapes]. The rows are saved values, saved values in
            attention's core, entering values, and the values of each workspace.
        parameters: how often each shape occurs among parameters, [4, shapes]. The rows are the parameters that all
            replicas hold, experts' parameters, and the frozen parameters of both.
        matrices: the number of parameters with two dims or more that all replicas hold.
    """

    values: tuple[Sized, ...]
    kept: NDArray[np.int64]
    parameters: NDArray[np.int64]
    matrices: int


class _Parts(NamedTuple):
    """A layer class prepared for pricing.

    Args:
        groups: phase → the kernels of the phase, in groups.
        held: the values of the class.
        axes: the axes on whose sizes the price of the class depends.
        is_block: whether the class is a kind of block.
    """

    groups: Mapping[str, list[_KernelGroup]]
    held: _Held
    axes: tuple[str, ...]
    is_block: bool


_NOTHING = (Busy(), Busy(), Busy())

Key = tuple[object, str]
"""A kind of recipe, and the name of a layer class."""


@dataclass
class LayerPricer:
    """Price the layer classes of a model, and keep the prices.

    A product in 8 bits saves its operands in 8 bits (Transformer Engine, module/linear.py: `saved_inputmat`).
    """

    kernel_pricer: KernelPricer
    _parts: dict[object, _Parts] = field(default_factory=dict)
    _groups: dict[object, _KernelGroup] = field(default_factory=dict)
    _prices: dict[tuple[object, ...], LayerPrice] = field(default_factory=dict)

    def price(self, key: Key, layer: LayerClass, batch: int, sizes: Sizes) -> LayerPrice:
        """Return the price of a layer class for `batch` sequences, on axes of the given sizes.

        Layer classes with the same `key` must be equal, because results are cached by `key`, `batch` and `sizes`.
        """
        if key not in self._parts:
            self._parts[key] = self._parts_of(layer, is_block=key[1] not in (BEFORE, AFTER))
        parts = self._parts[key]
        known = (key, batch, *(sizes[axis] for axis in parts.axes))
        if known not in self._prices:
            held = _held_sizes(parts.held, batch, sizes)

            def phase_price(name: str) -> PhasePrice:
                found = [
                    self._group_price(group, batch, sizes, is_block=parts.is_block) for group in parts.groups[name]
                ]
                busy, core, tail = (sum(each, Busy()) for each in zip(_NOTHING, *found, strict=True))
                sent = getattr(layer, name).sent
                traffic = (_traffic(item, batch, sizes, held["entering_bytes"]) for item in sent)
                return PhasePrice(busy, core, tail, tuple(traffic))

            self._prices[known] = LayerPrice(**held, phase=phase_price)
        return self._prices[known]

    def _group_price(self, group: _KernelGroup, batch: int, sizes: Sizes, *, is_block: bool) -> tuple[Busy, ...]:
        known = (is_block, batch * group.varies, *(sizes[axis] for axis in group.axes))
        if known not in group.prices:
            total = list(_NOTHING)
            for kernel, places in group.kernels:
                taken = self.kernel_pricer.price(kernel, batch, sizes, is_block=is_block)
                total = [each + taken if is_in else each for each, is_in in zip(total, places, strict=True)]
            group.prices[known] = tuple(total)
        return group.prices[known]

    def _parts_of(self, layer: LayerClass, *, is_block: bool) -> _Parts:
        groups = {"forward": self._groups_in(layer.forward), "backward": self._groups_in(layer.backward)}
        held = _held(layer, is_narrow=is_block and self.kernel_pricer.precision == "f8")
        sent = [item.value for phase in (layer.forward, layer.backward) for item in phase.sent]
        axes = {axis for group in chain(*groups.values()) for axis in group.axes} | _axes_in([*held.values, *sent])
        return _Parts(groups, held, tuple(sorted(axes)), is_block)

    def _groups_in(self, phase: Phase) -> list[_KernelGroup]:
        """Return the kernels of a phase in groups.

        Equal groups of several kinds of recipes are one object with shared prices.
        """
        alone = {"tensor": 1, "context": 1, EXPERT: 1}
        products = [self.kernel_pricer.price(kernel, 1, alone, is_block=False).matmul_s > 0 for kernel in phase.kernels]
        lasts = [place for place, kernel in enumerate(phase.kernels) if products[place] and kernel.has_weight]
        found: dict[tuple[tuple[str, ...], bool], _KernelGroup] = {}
        for place, kernel in enumerate(phase.kernels):
            tensors = (*kernel.inputs, *kernel.outputs)
            alike = (tuple(sorted(_axes_in(tensors))), any(any(item.step) for item in tensors))
            group = found.setdefault(alike, _KernelGroup(*alike))
            group.kernels.append((kernel, (True, kernel.is_core, place >= max(lasts, default=0))))
        return [self._groups.setdefault((alike, tuple(group.kernels)), group) for alike, group in found.items()]


def _traffic(sent: Sent, batch: int, sizes: Sizes, entering: int) -> AxisTraffic:
    """Return a collective for `batch` sequences, on axes of the given sizes.

    `entering` is the bytes of values of other layer classes that the layer reads. `AxisTraffic.copies` follows from it.
    """
    size = sent.value.local_bytes(batch, {**sizes, EXPERT: 1})
    copies = max(1.0, size / entering) if sent.axis == EXPERT and entering else 1.0
    return AxisTraffic(sent.axis, sent.kind, size, copies)


def _axes_in(items: Iterable[Sized]) -> set[str]:
    return {axis for item in items for axes in item.splits for axis in axes}


def _held(layer: LayerClass, *, is_narrow: bool) -> _Held:
    saved = [_whole(replace(item.value, itemsize=1) if is_narrow and item.is_operand else item.value)
             for item in layer.saved]  # fmt: skip
    core = [value for value, item in zip(saved, layer.saved, strict=True) if item.is_core]
    # an exchange keeps the number of a rank's rows; of experts' weights and gradients it has its share
    workspaces = [[_whole(item) if any(item.step) else item for item in items] for items in layer.workspaces]
    kept = [saved, core, list(map(_whole, layer.entering)), *workspaces]
    dense, expert = (
        [value for name, value in layer.parameters.items() if (name in layer.expert_parameters) == is_expert]
        for is_expert in (False, True)
    )
    frozen, frozen_experts = (
        [layer.parameters[name] for name in layer.frozen if (name in layer.expert_parameters) == is_expert]
        for is_expert in (False, True)
    )
    values = tuple(dict.fromkeys(value for items in (*kept, dense, expert) for value in items))

    def table(rows: Sequence[Sequence[Sized]]) -> NDArray[np.int64]:
        counts = [Counter(items) for items in rows]
        return np.array([[count[value] for value in values] for count in counts], dtype=np.int64)

    parameters = table([dense, expert, frozen, frozen_experts])
    return _Held(values, table(kept), parameters, sum(len(value.first) > 1 for value in dense))


def _whole(item: Sized) -> Sized:
    """Return a tensor of tokens' rows as if the expert axis did not split it.

    The exchange over this axis leaves each rank as many rows as before.
    """
    return replace(item, splits=tuple(tuple(axis for axis in axes if axis != EXPERT) for axes in item.splits))


def _held_sizes(held: _Held, batch: int, sizes: Sizes) -> dict[str, int]:
    """Return the fields of a `LayerPrice` that are bytes or numbers of parameters, by name, for `batch` sequences."""
    shapes = np.array([value.local_bytes(batch, sizes) for value in held.values], dtype=np.int64)
    saved, core, entering, *workspaces = (held.kept @ shapes).tolist()
    elements = np.array([math.prod(value.shape(1, sizes)) for value in held.values], dtype=np.int64)
    dense, expert, frozen, frozen_experts = (held.parameters @ elements).tolist()
    return {
        "saved_bytes": saved, "core_bytes": core, "entering_bytes": entering,
        "workspace_bytes": max(workspaces, default=0), "parameters": dense,
        "matrices": held.matrices, "expert_parameters": expert, "frozen": frozen, "frozen_experts": frozen_experts,
    }  # fmt: skip
