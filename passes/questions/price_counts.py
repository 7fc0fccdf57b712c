"""Count the FLOPs and bytes of a recipe's price under another runtime, as expressions in sizes.

A layer class is all blocks of one kind, or the part of the model before or after its blocks.

1. Trace the model at a few lengths of its inputs, and sort its layers into layer classes. Price each class for the
   recipe's micro-batch and for twice as many sequences, on the recipe's axes and on axes of one rank.
2. Fit the FLOPs and bytes of each layer class as polynomials in sizes of inputs (`fit_sizes`). They are linear in the
   micro-batch, and in 1 / (size of an axis) for each axis.
3. Compute the quantities of a rank from its layer classes, as `price_recipe` does. The quantities include each
   collective (twice for recomputed blocks), ZeRO's gathers and reductions, and the transfers between stages.

If the stages of a pipeline differ, a rank's share is the mean over stages. All splits count as even.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from autoshard.errors import FormulaError, TraceError
from autoshard.ir.execution import Execution
from autoshard.ir.plan import Plan
from autoshard.tracing import BlockList
from cost_models.formulas import Size, grid, interpolate, size_symbol
from cost_models.hardware import Cluster
from passes.questions.fit_sizes import (
    InputDims,
    InputSize,
    Observation,
    cannot_resize,
    fit_numbers,
    input_sizes,
    resize,
)
from passes.questions.totals import COMMUNICATION, BlockPlace, Counted
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import LayerPrice, PhasePrice
from passes.search.layers.price_model import PricedModel
from passes.search.layers.propagate_axis import MoveKind
from passes.search.price_ends import GRADIENT_BYTES, WEIGHT_BYTES
from passes.search.price_memory import kept_bytes, state_bytes

_AXES = ("data", "context", "tensor", "expert", "pipeline")
_SPLIT_BY = ("tensor", "context", "expert")
"""Axes that split the work within a layer class."""

_BATCH, _MICRO_BATCH = "batch", "micro_batch"
_ENDS = (BEFORE, AFTER)
_HELD = ("saved_bytes", "core_bytes", "entering_bytes", "parameters", "expert_parameters", "frozen", "frozen_experts")
_PARAMETERS = ("parameters", "expert_parameters", "frozen", "frozen_experts")
_STATE = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer state"}

Tally = Mapping[str, Any]
"""The numbers of a layer class for one micro-batch on one rank, by name ("flops", "saved_bytes", "forward tensor")."""


@dataclass
class CountsOfPrice:
    """The counts (`formulas.Counts`) of a plan that `autoshard.price` made.

    Args:
        fold: takes example inputs (args, kwargs); returns the model sorted into layer classes.
        args, kwargs: the example inputs of the plan.
    """

    fold: Callable[[tuple[Any, ...], Mapping[str, Any]], PricedModel]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    recipe: Execution
    cluster: Cluster
    _fitted: dict[object, Mapping[str, Tally]] = field(default_factory=dict, repr=False)

    def sizes(self, dims: InputDims | None) -> tuple[InputSize, ...]:
        if dims is not None and dims.get(_BATCH, 0) != 0:
            raise FormulaError(f"dims={dict(dims)!r}: a recipe's batch is the first dim of every input, 0.")
        batches = ((_BATCH, self.recipe.batch), (_MICRO_BATCH, self.recipe.micro_batch))
        others = (size for size in input_sizes(self.args, self.kwargs, dims) if size.name != _BATCH)
        pieces = self.recipe.tensor * self.recipe.context
        even = (replace(size, step=pieces) if size.value % pieces == 0 else size for size in others)
        return (*(InputSize(name, (), value) for name, value in batches), *even)

    def lists(self) -> Sequence[BlockList]:
        return self.fold(self.args, self.kwargs).folded.lists

    def axes(self, plan: Plan) -> Mapping[str, int]:
        return {axis: getattr(self.recipe, axis) for axis in _AXES if getattr(self.recipe, axis) > 1}

    def of(self, plan: Plan, name: str, sizes: tuple[InputSize, ...], axes: Mapping[str, Size]) -> Iterator[Counted]:
        free = {size.name: size_symbol(size.name) for size in sizes}
        batch, micro_batch = free.get(_BATCH, self.recipe.batch), free.get(_MICRO_BATCH, self.recipe.micro_batch)
        ranks = {axis: sympy.sympify(axes.get(axis, getattr(self.recipe, axis))) for axis in _AXES}
        tallies = self._tallies(tuple(size for size in sizes if size.places))
        if name == "tokens":
            yield None, tallies[""]["tokens"] * batch
            return
        counts = _RecipeCounts(self.recipe, sympy.sympify(batch), micro_batch, ranks)
        blocks = self.fold(self.args, self.kwargs).folded.blocks
        for layer in (BEFORE, *dict.fromkeys(blocks), AFTER):
            path, _, kind = layer.rpartition(":")
            place = None if layer in _ENDS else BlockPlace(path, int(kind), stands_for=blocks.count(layer))
            yield place, counts.of(name, layer, tallies[layer])
        if self.recipe.pipeline > 1 and name.startswith(COMMUNICATION):
            yield None, _over(name, counts.sent_between_stages([tallies[layer] for layer in dict.fromkeys(blocks)]))

    def _tallies(self, sizes: tuple[InputSize, ...]) -> Mapping[str, Tally]:
        """Return for each layer class its numbers by name, as expressions in symbols.

        The symbols are input sizes, the micro-batch and mesh axes. The names of numbers are those of `_numbers_of`. The
        entry "" has the number of tokens of a sequence.
        """
        if sizes not in self._fitted:
            keys: list[tuple[str, str]] = []

            def observe(point: tuple[int, ...]) -> Observation:
                try:
                    priced = self.fold(*resize(self.args, self.kwargs, sizes, point))
                except TraceError as error:
                    raise cannot_resize(sizes, point, error) from error
                measured = self._measured(priced)
                keys[:] = measured
                labels = tuple(f"{name} of {layer or 'the model'}" for layer, name in keys)
                owners = (label for label, each in zip(labels, measured.values(), strict=True) for _ in each)
                return Observation(labels, tuple(size for each in measured.values() for size in each), tuple(owners))

            numbers = iter(fit_numbers(sizes, observe))
            micro_batches, *axes = self._trials()
            trials = [micro_batches, *([sympy.Rational(1, ranks) for ranks in trial] for trial in axes)]
            symbols = [size_symbol(_MICRO_BATCH), *map(_inverse, self._split)]
            tallies = defaultdict[str, dict[str, Any]](dict)
            for layer, name in keys:
                values = {point: next(numbers) for point in grid(trials)}
                tallies[layer][name] = interpolate(symbols, trials, values)
            self._fitted[sizes] = tallies
        return self._fitted[sizes]

    @property
    def _split(self) -> tuple[str, ...]:
        return tuple(axis for axis in _SPLIT_BY if getattr(self.recipe, axis) > 1)

    def _trials(self) -> list[tuple[int, int]]:
        """Return pairs of sizes at which to price: first of the micro-batch, then of each axis with several ranks."""
        own = self.recipe.micro_batch
        return [(own, 2 * own), *((1, getattr(self.recipe, axis)) for axis in self._split)]

    def _measured(self, priced: PricedModel) -> dict[tuple[str, str], list[Any]]:
        """Return the values of each number on the grid of `_trials`, by (layer class, name of the number).

        The names are those of `_numbers_of`.
        """
        found = defaultdict[tuple[str, str], list[Any]](list)
        for batch, *ranks in grid(self._trials()):
            sizes = {**dict.fromkeys(_SPLIT_BY, 1), **dict(zip(self._split, ranks, strict=True))}
            for layer, price in priced.counted.layer_prices(self.recipe, self.cluster, batch, sizes).items():
                for name, size in _numbers_of(price).items():
                    found[layer, name].append(sympy.Rational(size))
            found["", "tokens"].append(priced.tokens)
        return found


def _numbers_of(price: LayerPrice) -> dict[str, float]:
    """Return the numbers of a layer class by name, such as "flops" and its bytes.

    "forward tensor" is the bytes of the forward's collectives over the axis "tensor".
    """
    found = {name: getattr(price, name) for name in _HELD}
    found["flops"] = price.forward.busy.flops + price.backward.busy.flops
    for phase, name in ((price.forward, "forward"), (price.backward, "backward")):
        for axis in _SPLIT_BY:
            sent = [item for item in phase.traffic if item.axis == axis]
            found[f"{name} {axis}"] = sum(item.bytes * (2 if item.kind is MoveKind.REDUCE else 1) for item in sent)
    return found


def _no_phase(name: str) -> PhasePrice:
    raise AssertionError("only memory is counted")


def _inverse(axis: str) -> sympy.Symbol:
    return size_symbol(f"1/{axis}")


def _over(name: str, sent: Mapping[str, Any]) -> Any:
    """Return the bytes sent over the axis that the quantity `name` names, or over all axes if it names none.

    `sent` has bytes by axis.
    """
    return sum(size for axis, size in sent.items() if name in (COMMUNICATION, f"{COMMUNICATION}_{axis}"))


@dataclass(frozen=True, slots=True)
class _RecipeCounts:
    """Computes quantities of a recipe, such as "rank_flops", from the tally of each layer class.

    A tally has the FLOPs, bytes and parameters of a layer class (`CountsOfPrice._tallies`). `batch` is the number of
    sequences in a step. `micro_batch` is the number of sequences in one forward of one replica.
    """

    recipe: Execution
    batch: Any
    micro_batch: Any
    axes: Mapping[str, Any]

    def of(self, name: str, layer: str, tally: Tally) -> Any:
        """Return the part of the quantity `name` that comes from one layer of the layer class `layer`.

        The layer is a block, or the whole part of the model before or after the blocks. `tally` is the tally of the
        layer class. If the quantity is for a rank, the result is the mean over pipeline ranks.
        """
        recipe, pipeline = self.recipe, self.axes["pipeline"]
        whole, tally = self._at(tally, dict.fromkeys(_SPLIT_BY, 1)), self._at(tally, self.axes)
        if name.startswith(COMMUNICATION):
            return _over(name, self._sent(layer, tally)) / pipeline
        if name in _STATE:
            dense, expert, frozen, frozen_experts = (tally[each] for each in _PARAMETERS)
            shared = (
                (dense - frozen, frozen, self._shards),
                (expert - frozen_experts, frozen_experts, self._expert_replicas),
            )
            return sum(state_bytes(*numbers, recipe)[_STATE[name]] for numbers in shared) / pipeline
        match name:
            case "step_flops":
                return whole["flops"] * self.batch / self.micro_batch
            case "rank_flops":
                return tally["flops"] * self._micro_batches / pipeline
            case "activation_bytes":
                held = {key: tally[key] for key in _HELD}
                price = LayerPrice(**held, workspace_bytes=0, matrices=0, phase=_no_phase)
                return kept_bytes(price, recipe, is_block=layer not in _ENDS) / pipeline
        return whole["parameters"] + whole["expert_parameters"]

    def sent_between_stages(self, blocks: Sequence[Tally]) -> dict[str, Any]:
        """Return the bytes that a rank sends in a step for values between stages, by axis.

        Forward and backward are included. Without sequence parallelism, ranks send a share of each value, and gather
        the shares over the tensor axis.
        """
        recipe, pipeline, tensor = self.recipe, self.axes["pipeline"], self.axes["tensor"]
        entering = list(dict.fromkeys(self._at(block, self.axes)["entering_bytes"] for block in blocks))
        whole: Any = entering[0] if len(entering) == 1 else sympy.Max(*entering)
        times = 2 * self._micro_batches * (pipeline * recipe.virtual_stages - 1) / pipeline
        if recipe.sequence_parallel:
            return {"pipeline": times * whole}
        return {"pipeline": times * whole / tensor, "tensor": times * _gather(whole, tensor)}

    def _at(self, tally: Tally, axes: Mapping[str, Any]) -> Tally:
        at = {size_symbol(_MICRO_BATCH): self.micro_batch, **{_inverse(axis): 1 / axes[axis] for axis in _SPLIT_BY}}
        return {name: sympy.sympify(size).subs(at) for name, size in tally.items()}

    @property
    def _micro_batches(self) -> Any:
        return self.batch / (self.micro_batch * self.axes["data"])

    def _sent(self, layer: str, tally: Tally) -> dict[str, Any]:
        """Return the bytes that each rank sends in a step for one layer of a layer class, by axis.

        Collectives over several axes at once count as "data".

        Raises:
            FormulaError: the recipe merges the dispatch to experts, so the bytes depend on the tokens' experts.
        """
        if self.recipe.runtime.merged_dispatch and self.recipe.expert > 1:
            raise FormulaError(
                "The bytes of a merged dispatch depend on the ranks of a token's experts, so they have no formula. For "
                "the bytes of the experts' all-to-alls set merged_dispatch=False."
            )
        forwards = 2 if self.recipe.recompute == "full" and layer not in _ENDS else 1
        sent = {"data": self._exchanged(*(tally[each] for each in _PARAMETERS))}
        for axis in _SPLIT_BY:
            whole = forwards * tally[f"forward {axis}"] + tally[f"backward {axis}"]
            sent[axis] = self._micro_batches * _gather(whole, self.axes[axis])
        return sent

    def _exchanged(self, dense: Any, expert: Any, frozen: Any, frozen_experts: Any) -> Any:
        """Return the bytes that a rank sends in a step to reduce gradients and to gather parameters.

        `dense` and `expert` are the rank's numbers of parameters outside of experts and in experts. `frozen` and
        `frozen_experts` count the parameters among them that get no gradients. The times of these collectives are in
        `price_ends.exchange_times` and `price_recipe.sharded_time`.
        """
        recipe = self.recipe
        gradient, weight = GRADIENT_BYTES[recipe.runtime.gradient_dtype], WEIGHT_BYTES[recipe.precision]
        replicas, shards, owners = self._replicas, self._shards, self._expert_replicas
        trained, of_experts = dense - frozen, expert - frozen_experts
        gathered = _gather(weight * dense, shards) + _gather(weight * expert, owners)
        updated = _gather(weight * trained, shards) + _gather(weight * of_experts, owners)
        scattered = _gather(gradient * of_experts, owners)
        in_groups = _gather(gradient * trained, shards) + 2 * _gather(gradient * trained / shards, replicas / shards)
        if recipe.reduces_each:
            both = scattered + in_groups + (2 * gathered if recipe.zero == 3 else 0)
            return self._micro_batches * both + (updated if recipe.zero == 2 else 0)
        if not recipe.zero:
            return 2 * _gather(gradient * trained, replicas) + 2 * scattered
        is_whole = recipe.zero_group in (None, recipe.replicas)
        return (in_groups if is_whole else 2 * _gather(gradient * trained, replicas)) + scattered + updated

    @property
    def _replicas(self) -> Any:
        return self.axes["data"] * self.axes["context"]

    @property
    def _shards(self) -> Any:
        return self._replicas if self.recipe.zero_group is None else sympy.Integer(self.recipe.zero_group)

    @property
    def _expert_replicas(self) -> Any:
        return self._replicas * self.axes["tensor"] / (self.recipe.expert_tensor * self.axes["expert"])


def _gather(whole: Any, ranks: Any) -> Any:
    """Return the bytes that a rank sends to gather `whole` bytes over `ranks`, or to reduce-scatter `whole` bytes."""
    return whole * (ranks - 1) / ranks
