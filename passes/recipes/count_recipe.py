"""Count what a recipe's step does, in expressions, from the sections of the folded program that also price it.

Sections are counted once for a micro-batch, blocks by their number. Where the stages of a pipeline differ, what a rank
does is the mean over them. Communication is that of `price_recipe`: the collectives of each section (again where blocks
are recomputed), ZeRO's gathering and reduction, and what stages hand on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from autoshard.errors import FormulaError
from autoshard.ir.execution import Execution
from autoshard.ir.reshard import ReshardKind
from cost_models.formulas import Size, ceil_div, product_of, value_at
from cost_models.operators import work
from cost_models.work import Kind, MatmulShape, TensorInfo
from passes.counting.count_plan import ring_bytes
from passes.recipes.price_ends import GRADIENT_BYTES, WEIGHT_BYTES
from passes.recipes.price_memory import kept_bytes, state_bytes
from passes.sections.count_sections import FUSED, Phase, Section, SectionKernel, Sized
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_sections import EXPERT
from passes.sections.propagate_axis import MoveKind

_KINDS = {
    MoveKind.GATHER: ReshardKind.ALL_GATHER,
    MoveKind.SCATTER: ReshardKind.REDUCE_SCATTER,
    MoveKind.REDUCE: ReshardKind.ALL_REDUCE,
    MoveKind.EXCHANGE: ReshardKind.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True)
class SectionCount:
    """A section, once, for one micro-batch on one rank; see `price_sections.SectionPrice`.

    Args:
        flops: of products and attention, forward and backward; `whole_flops` with nothing split.
        forward_sent, backward_sent: bytes sent, by axis.
        elements: of its parameters with nothing split.
    """

    flops: Size
    whole_flops: Size
    forward_sent: Mapping[str, Size]
    backward_sent: Mapping[str, Size]
    saved_bytes: Size
    core_bytes: Size
    entering_bytes: Size
    parameters: Size
    expert_parameters: Size
    elements: Size


def count_section(section: Section, batch: Size, sizes: Mapping[str, Size]) -> SectionCount:
    """A section's counts for `batch` sequences on axes of these sizes, numbers or expressions."""
    alone = {**sizes, EXPERT: 1}
    ones: dict[str, Size] = dict.fromkeys(sizes, 1)
    saved = [(_bytes(item.value, batch, alone), item.is_core) for item in section.saved]
    split = {name: product_of(local_shape(value, 1, sizes)) for name, value in section.parameters.items()}
    phases = (section.forward, section.backward)
    return SectionCount(
        flops=_total(_flops(kernel, batch, sizes) for phase in phases for kernel in phase.kernels),
        whole_flops=_total(_flops(kernel, batch, ones) for phase in phases for kernel in phase.kernels),
        forward_sent=_sent(section.forward, batch, sizes),
        backward_sent=_sent(section.backward, batch, sizes),
        saved_bytes=_total(size for size, _ in saved),
        core_bytes=_total(size for size, is_core in saved if is_core),
        entering_bytes=_total(_bytes(item, batch, alone) for item in section.entering),
        parameters=_total(size for name, size in split.items() if name not in section.expert_parameters),
        expert_parameters=_total(size for name, size in split.items() if name in section.expert_parameters),
        elements=_total(product_of(value.first) for value in section.parameters.values()),
    )


def local_shape(item: Sized, batch: Size, sizes: Mapping[str, Size]) -> tuple[Size, ...]:
    """The local shape for `batch` sequences; as `Sized.shape`, of expressions too."""
    shape = []
    for first, step, axes in zip(item.first, item.step, item.splits, strict=True):
        dim: Any = first + step * (batch - 1)
        for axis in axes:
            dim = ceil_div(dim, sizes[axis])
        shape.append(sympy.expand(dim) if isinstance(dim, sympy.Expr) else dim)
    return tuple(shape)


def _bytes(item: Sized, batch: Size, sizes: Mapping[str, Size]) -> Size:
    return product_of(local_shape(item, batch, sizes)) * item.itemsize


def _total(items: Any) -> Size:
    return sympy.Add(*(sympy.sympify(item) for item in items))


def _sent(phase: Phase, batch: Size, sizes: Mapping[str, Size]) -> dict[str, Size]:
    """Bytes that each rank sends, by axis: a value of `local` bytes is whole on its axis before or after."""
    sent: dict[str, Any] = {}
    for item in phase.sent:
        whole, ranks = _bytes(item.value, batch, {**sizes, EXPERT: 1}), sizes[item.axis]
        kind = _KINDS[item.kind]
        piece = sympy.sympify(whole) / ranks
        before = piece if kind is ReshardKind.ALL_GATHER else whole
        sent[item.axis] = sent.get(item.axis, 0) + ring_bytes(kind, before, piece, ranks)
    return sent


def _flops(kernel: SectionKernel, batch: Size, sizes: Mapping[str, Size]) -> Size:
    if kernel.operator == FUSED:
        return 0
    inputs, outputs = (
        tuple(_info(item, batch, {**sizes, EXPERT: 1} if any(item.step) else sizes) for item in items)
        for items in (kernel.inputs, kernel.outputs)
    )
    if not _contracts(kernel, inputs, outputs):
        return 0
    try:
        done = work(kernel.operator, inputs, outputs, kernel.arguments)
    except TypeError as error:
        raise FormulaError(
            f"The FLOPs of {kernel.operator} ({kernel.name}) depend on which of two sizes is larger, so they "
            "are no formula; hold the sizes of its operands fixed: formula(..., fixed=('sequence', 'micro_batch'))."
        ) from error
    if done.kind is Kind.ATTENTION:
        return sympy.nsimplify(done.flops, rational=True)
    products = done.products
    if sizes.get(EXPERT, 1) != 1 and any(EXPERT in axes for item in kernel.inputs for axes in item.splits):
        products = tuple(_shared_out(product, kernel, sizes[EXPERT]) for product in products)
    return _total(product.flops for product in products)


_ANY_SIZE = 840
"""Divides by all small numbers of ranks."""


def _contracts(kernel: SectionKernel, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> bool:
    """Whether a call is made of products, or attention; that does not depend on sizes."""

    def numbers(item: TensorInfo) -> TensorInfo:
        symbols: Any = {symbol for dim in item.shape for symbol in sympy.sympify(dim).free_symbols}
        shape = tuple(int(value_at(dim, dict.fromkeys(symbols, _ANY_SIZE))) for dim in item.shape)
        return item._replace(shape=shape)

    done = work(kernel.operator, tuple(map(numbers, inputs)), tuple(map(numbers, outputs)), kernel.arguments)
    return bool(done.products) or done.kind is Kind.ATTENTION


def _shared_out(product: MatmulShape, kernel: SectionKernel, ranks: Size) -> MatmulShape:
    """As `price_sections`: products of a share of the experts, with the tokens of all ranks."""
    whole: Any = sympy.Max(*(item.first[0] for item in kernel.inputs))
    share: Any = sympy.Max(1, sympy.floor(whole / ranks))
    many: Any = ranks
    if kernel.makes_gradient:
        return product._replace(batch=share, k=product.k * many)
    return product._replace(batch=share, m=product.m * many)


def _info(item: Sized, batch: Size, sizes: Mapping[str, Size]) -> TensorInfo:
    shape: Any = local_shape(item, batch, sizes)
    return TensorInfo(shape, item.itemsize, item.dtype)


@dataclass(frozen=True)
class RecipeCounting:
    """Counts of one recipe.

    Args:
        recipe: whose flags, dtypes and schedule hold.
        sections: name to what it counts.
        blocks: name of each section to how many there are; the ends count once.
        batch: sequences of a step; `micro_batch`: of one forward of a replica.
        axes: sizes of "data", "context", "tensor", "expert", "pipeline", numbers or expressions.
        tokens_each: integers of a sequence.
    """

    recipe: Execution
    sections: Mapping[str, SectionCount]
    blocks: Mapping[str, Size]
    batch: Size
    micro_batch: Size
    axes: Mapping[str, Size]
    tokens_each: Size

    def of(self, name: str) -> Size:
        """A quantity of `formulas.QUANTITIES`, or the bytes sent over an axis."""
        if name == "communication_bytes":
            return _total(self.sent().values())
        if name.startswith("communication_bytes_"):
            return self.sent()[name.removeprefix("communication_bytes_")]
        return getattr(self, name)()

    @property
    def micro_batches(self) -> Any:
        """That each replica runs in a step."""
        return sympy.sympify(self.batch) / (self.micro_batch * self.axes["data"])

    def step_flops(self) -> Size:
        """Of all ranks together, nothing split."""
        return self._sum(lambda _, item: item.whole_flops) * self.batch / self.micro_batch

    def rank_flops(self) -> Size:
        """Of each rank, without what is recomputed."""
        return self._share(lambda _, item: item.flops) * self.micro_batches

    def parameters(self) -> Size:
        """Elements of the whole model."""
        return self._sum(lambda _, item: item.elements)

    def parameter_bytes(self) -> Size:
        """Of each rank."""
        return self._state("parameters")

    def gradient_bytes(self) -> Size:
        """Of each rank."""
        return self._state("gradients")

    def optimizer_bytes(self) -> Size:
        """Of each rank, master weights included."""
        return self._state("optimizer state")

    def activation_bytes(self) -> Size:
        """Of each rank for one micro-batch, on the device or the host."""
        return self._share(lambda name, item: self._kept(name, item))

    def tokens(self) -> Size:
        """Of a step."""
        return self.tokens_each * self.batch

    def sent(self) -> dict[str, Size]:
        """Bytes that each rank sends, by what for: an axis, or, where several share a group, the axis "data"."""
        axes, again = self.axes, self.recipe.recompute == "full"
        if self.recipe.runtime.merged_dispatch and self.recipe.expert > 1:
            raise FormulaError(
                "What a merged dispatch sends depends on where the experts of a token lie, so it is no formula; for "
                "what the all-to-alls of experts send set merged_dispatch=False."
            )
        sent: dict[str, Any] = dict.fromkeys(axes, 0)
        for axis in ("tensor", "context", "expert"):
            sent[axis] += self.micro_batches * self._share(
                lambda name, item, axis=axis: (
                    item.forward_sent.get(axis, 0) * (2 if again and name not in (BEFORE, AFTER) else 1)
                    + item.backward_sent.get(axis, 0)
                )
            )
        sent["data"] += self._exchanged()
        if self.recipe.pipeline > 1:
            handed, gathered = self._handed_on()
            sent["pipeline"] += handed
            sent["tensor"] += gathered
        return {axis: sympy.expand(size) for axis, size in sent.items()}

    def _exchanged(self) -> Any:
        """Gradients reduced, parameters gathered: see `price_ends.exchange_times` and `price_recipe.sharded_time`."""
        recipe = self.recipe
        gradient, weight = GRADIENT_BYTES[recipe.runtime.gradient_dtype], WEIGHT_BYTES[recipe.precision]
        dense, expert = self._share(lambda _, i: i.parameters), self._share(lambda _, i: i.expert_parameters)
        replicas, shards, owners = self._replicas(), self._shards(), self._expert_replicas()
        gathered = _gather(weight * dense, shards) + _gather(weight * expert, owners)
        scattered = _gather(gradient * expert, owners)
        if recipe.reduces_each:
            reduced = scattered + _gather(gradient * dense, shards)
            reduced += _reduce(gradient * dense / shards, replicas / shards)
            both = reduced + (2 * gathered if recipe.zero == 3 else 0)
            return self.micro_batches * both + (gathered if recipe.zero == 2 else 0)
        if not recipe.zero:
            return _reduce(gradient * dense, replicas) + _reduce(gradient * expert, owners)
        whole = recipe.zero_group in (None, recipe.replicas)
        reduced = _gather(gradient * dense, shards) if whole else _reduce(gradient * dense, replicas)
        return reduced + scattered + gathered

    def _handed_on(self) -> tuple[Any, Any]:
        """Bytes between stages, forward and backward, and of gathering over the tensor axis what came in parts."""
        recipe, tensor = self.recipe, self.axes["tensor"]
        found = [item.entering_bytes for name, item in self.sections.items() if name not in (BEFORE, AFTER)]
        whole: Any = found[0] if all(size == found[0] for size in found) else sympy.Max(*found)
        part = whole if recipe.sequence_parallel else whole / tensor
        pipeline: Any = self.axes["pipeline"]
        times = 2 * self.micro_batches * (pipeline * recipe.virtual_stages - 1) / pipeline
        gathered = 0 if recipe.sequence_parallel or recipe.tensor == 1 else _gather(whole, tensor)
        return times * part, times * gathered

    def _sum(self, of: Callable[[str, SectionCount], Size]) -> Any:
        return _total(of(name, self.sections[name]) * count for name, count in self.blocks.items())

    def _share(self, of: Callable[[str, SectionCount], Size]) -> Any:
        return self._sum(of) / sympy.sympify(self.axes["pipeline"])

    def _kept(self, name: str, item: Any) -> Size:
        return kept_bytes(item, name, self.recipe)

    def _replicas(self) -> Any:
        return sympy.sympify(self.axes["data"]) * self.axes["context"]

    def _shards(self) -> Any:
        return self._replicas() if self.recipe.zero_group is None else sympy.Integer(self.recipe.zero_group)

    def _expert_replicas(self) -> Any:
        return self._replicas() * self.axes["tensor"] / (self.recipe.expert_tensor * self.axes["expert"])

    def _state(self, part: str) -> Any:
        dense, expert = self._share(lambda _, i: i.parameters), self._share(lambda _, i: i.expert_parameters)
        pairs = ((dense, self._shards()), (expert, self._expert_replicas()))
        return _total(state_bytes(elements, shards, self.recipe)[part] for elements, shards in pairs)


def _gather(whole: Any, ranks: Any) -> Any:
    """Of a gathering to, or a reduction and scattering from, `whole` bytes."""
    return whole * (ranks - 1) / ranks


def _reduce(whole: Any, ranks: Any) -> Any:
    return 2 * _gather(whole, ranks)
