"""Price the sections of a folded program: seconds of computation by kind, bytes of every collective, bytes of memory.

Computation is priced kernel by kernel with `cost_models`, as in planning; here it is kept apart by what bounds it, so
that the step's model (`cost_models.step`) can weigh the parts, and let communication run beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_models.compute import memory_time, work_time
from cost_models.counting import size_bytes
from cost_models.exchanges import EXCHANGES
from cost_models.hardware import Device
from cost_models.operators import work
from cost_models.work import Kind, MatmulShape, TensorInfo, Work
from passes.sections.count_sections import FUSED, SectionKernel, Sent, Sized
from passes.sections.propagate_axis import MoveKind

EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of a device, by what bounds its kernels, and how many kernels there are.

    `weight_gradient_s` is the part of `matmul_s` that nothing waits for: products that make parameters' gradients, in
    `weight_gradient_kernels`.
    """

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    kernels: int = 0
    weight_gradient_s: float = 0.0
    weight_gradient_kernels: int = 0
    flops: float = 0.0

    def __add__(self, other: Busy) -> Busy:
        return Busy(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.kernels + other.kernels,
            self.weight_gradient_s + other.weight_gradient_s,
            self.weight_gradient_kernels + other.weight_gradient_kernels,
            self.flops + other.flops,
        )


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """A collective: its axis, kind, and bytes of the value that each rank would hold if the axis did not split it.

    `copies` is how often each token is among them: once, or once for each of its experts.
    """

    axis: str
    kind: MoveKind
    bytes: int
    has_weight: bool
    copies: float = 1.0


@dataclass(frozen=True, slots=True)
class PhasePrice:
    """A phase of a section, once: work, the part of it in attention's core, that in its last product and what follows,
    and collectives."""

    busy: Busy
    core: Busy
    tail: Busy
    traffic: tuple[AxisTraffic, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionSizes:
    """What a section keeps and holds, for one micro-batch. It is known by identity, not by its numbers.

    Args:
        saved_bytes: kept for the backward; `core_bytes` of it in attention's core.
        entering_bytes: of what comes in.
        workspace_bytes: the most that a kernel reads and writes of what is not kept.
        parameters: elements on each rank before ZeRO, of those that all replicas hold.
        matrices: how many tensors of two dims or more these are.
        expert_parameters: elements on each rank of those that the expert axis splits.
    """

    saved_bytes: int
    core_bytes: int
    entering_bytes: int
    workspace_bytes: int
    parameters: int
    matrices: int
    expert_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionPrice(SectionSizes):
    """A section, once, for one micro-batch: what it takes, beside what it keeps and holds."""

    forward: PhasePrice
    backward: PhasePrice


@dataclass(frozen=True, slots=True)
class Setting:
    """What sections are priced for.

    Args:
        batch: sequences per micro-batch.
        sizes: of axes.
        device: that runs them.
        precision: of products.
        separate_experts: each expert's product is a kernel of its own.
    """

    batch: int
    sizes: tuple[tuple[str, int], ...]
    device: Device
    precision: str
    separate_experts: bool = False


def price_kernel(kernel: SectionKernel, setting: Setting, sizes: Mapping[str, int], precision: str) -> Busy:
    """What a kernel takes; `precision` is that of products with weights."""
    inputs = tuple(_info(item, setting.batch, _sizes_of(item, sizes)) for item in kernel.inputs)
    outputs = tuple(_info(item, setting.batch, _sizes_of(item, sizes)) for item in kernel.outputs)
    if kernel.operator == FUSED:
        moved_s = memory_time(size_bytes((*inputs, *outputs)), setting.device)
        return Busy(memory_s=setting.device.launch_latency_s + moved_s, kernels=1)
    done = work(kernel.operator, inputs, outputs, kernel.arguments)
    kernels = 1
    is_stack = kernel.operator not in EXCHANGES and EXPERT in _axes_of(kernel.inputs)
    if sizes.get(EXPERT, 1) > 1 and is_stack:
        done = _shared_out(done, kernel, sizes[EXPERT])
        if setting.separate_experts:
            kernels = sum(product.batch for product in done.products)
            done = done._replace(products=tuple(_each_expert(done.products)), steps=max(1, kernels))
    extra = 0.0
    if done.dtype in ("bf16", "f16"):
        done = done._replace(dtype=setting.precision if setting.precision != "f8" else "bf16")
    if precision == "f8" and done.products and (kernel.has_weight or kernel.makes_gradient):
        extra = _quantising_time(inputs, setting.device)
        done = replace_work(done, dtype="f8")
    time = work_time(done, setting.device)
    if done.products:
        flops = sum(shape.flops for shape in done.products)
        product = Busy(matmul_s=time, memory_s=extra, kernels=max(1, kernels), flops=flops)
        if not kernel.makes_gradient:
            return product
        return replace(product, weight_gradient_s=time, weight_gradient_kernels=product.kernels)
    if done.kind is Kind.ATTENTION:
        return Busy(attention_s=time, kernels=1, flops=done.flops)
    return Busy(memory_s=time, kernels=int(done.kind is not Kind.VIEW))


def _axes_of(items: Sequence[Sized]) -> set[str]:
    return {axis for item in items for axes in item.splits for axis in axes}


def replace_work(done: Work, dtype: str) -> Work:
    """The same work in another dtype, whose operands are narrower."""
    return done._replace(dtype=dtype, bytes_read=done.bytes_read / 2)


def _sizes_of(item: Sized, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """The sizes by which a tensor is cut: tokens that are exchanged for other ranks' stay as many, weights do not."""
    return {**sizes, EXPERT: 1} if any(item.step) else sizes


def _shared_out(done: Work, kernel: SectionKernel, ranks: int) -> Work:
    """Products of a share of the experts, with the tokens of all ranks."""

    def share(product: MatmulShape) -> MatmulShape:
        whole = max(item.first[0] for item in kernel.inputs)
        batch = max(1, whole // ranks)
        if kernel.makes_gradient:
            return product._replace(batch=batch, k=product.k * ranks)
        return product._replace(batch=batch, m=product.m * ranks)

    return done._replace(products=tuple(share(product) for product in done.products))


def _each_expert(products: Sequence[MatmulShape]) -> Iterator[MatmulShape]:
    """Batches of products one by one: the last wave of each leaves processors idle."""
    for product in products:
        yield from (product._replace(batch=1),) * product.batch


def _quantising_time(inputs: tuple[TensorInfo, ...], device: Device) -> float:
    """Operands are read once, and written in eight bits as they are and transposed."""
    return sum(memory_time(math.prod(item.shape) * (item.itemsize + 2), device) for item in inputs[:1])


def traffic_of(sent: Sent, batch: int, sizes: Mapping[str, int], entering: int) -> AxisTraffic:
    """A collective of a section that so many bytes enter."""
    size = sent.value.local_bytes(batch, {**sizes, EXPERT: 1})
    copies = max(1.0, size / entering) if sent.axis == EXPERT and entering else 1.0
    return AxisTraffic(sent.axis, sent.kind, size, sent.has_weight, copies)


def _info(item: Sized, batch: int, sizes: Mapping[str, int]) -> TensorInfo:
    return TensorInfo(item.shape(batch, sizes), item.itemsize, item.dtype)
