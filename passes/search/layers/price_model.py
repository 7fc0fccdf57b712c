"""A model ready to be priced under any recipe: traced and folded once, with its layouts and layer classes.

Layouts and layer classes depend only on the recipe's kind: which axes exist, sequence parallelism, and fusion. They are
computed at the first recipe of the kind. Each later recipe of the kind needs arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.program import InputKind, may_be_tokens
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from passes.search.layers.count_layers import LayerClass, count_layers
from passes.search.layers.fold_program import FoldedProgram
from passes.search.layers.price_layers import KernelPricer, LayerPrice, LayerPricer
from passes.search.layers.propagate_axis import AXIS, WHOLE, AxisLayout, Policy, axis_space, propagate_axis
from passes.search.layers.route_tokens import matrices_of_layers, routed_calls, shared_layers
from passes.search.layers.trace_values import source_of
from passes.strategies.enumerate_strategies import SearchSpace


class RecipeKind(NamedTuple):
    """The fields of a recipe that decide how values are split: flags, and whether each axis has several ranks."""

    tensor: bool
    sequence_parallel: bool
    context: bool
    expert: bool
    expert_tensor: bool
    fused: bool

    @classmethod
    def of(cls, recipe: Execution) -> RecipeKind:
        """Return the kind of a recipe."""
        has_context, has_experts = recipe.context > 1, recipe.expert > 1
        split, fused = recipe.expert_tensor > 1, recipe.runtime.fused
        return cls(recipe.tensor > 1, recipe.sequence_parallel, has_context, has_experts, split, fused)


@dataclass
class CountedModel:
    """A model's data for prices: its blocks, and the layer classes of each kind of recipe.

    Args:
        blocks: the layer class of every block, in order.
        tokens: elements of the first integer input of one sequence; 0 without such an input.
        count: function from a kind of recipe to its layer classes by name.
        has_experts: whether the model has experts to share out.
    """

    blocks: tuple[str, ...]
    tokens: int
    count: Callable[[RecipeKind], Mapping[str, LayerClass]] = field(repr=False)
    has_experts: bool = False
    _pricers: dict[tuple[object, ...], LayerPricer] = field(default_factory=dict, init=False, repr=False)
    _splits: dict[RecipeKind, frozenset[tuple[int, tuple[str, ...]]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _cores: dict[RecipeKind, bool] = field(default_factory=dict, init=False, repr=False)

    def splits(self, kind: RecipeKind) -> frozenset[tuple[int, tuple[str, ...]]]:
        """Return the dims that axes split in the blocks, as pairs (size for one sequence, axes that split the dim).

        For a model without blocks, the dims of all layer classes are returned.
        """
        if kind not in self._splits:
            self._splits[kind] = frozenset().union(*(each.splits for each in self._blocks_of(kind)))
        return self._splits[kind]

    def has_core(self, kind: RecipeKind) -> bool:
        """Whether blocks have values that selective recomputation recomputes. Fused attention has none."""
        if kind not in self._cores:
            parts = (part for each in self._blocks_of(kind) for part in (*each.forward.kernels, *each.saved))
            self._cores[kind] = bool(self.blocks) and any(part.is_core for part in parts)
        return self._cores[kind]

    def _blocks_of(self, kind: RecipeKind) -> list[LayerClass]:
        layers = self.count(kind)
        return [layers[name] for name in dict.fromkeys(self.blocks) or layers]

    def layer_prices(
        self, recipe: Execution, cluster: Cluster, batch: int | None = None, sizes: Mapping[str, int] | None = None
    ) -> Mapping[str, LayerPrice]:
        """Return the price of each layer class under a recipe, by name.

        `batch` replaces the recipe's micro-batch. `sizes` replaces the numbers of tensor, context and expert ranks.
        """
        runtime, kind, batch = recipe.runtime, RecipeKind.of(recipe), batch or recipe.micro_batch
        sizes = sizes or {"tensor": recipe.tensor, "context": recipe.context, "expert": recipe.expert}
        key = (cluster.device, runtime.attention, recipe.precision, runtime.separate_experts)
        if key not in self._pricers:
            device = cluster.device if runtime.attention is None else cluster.device.with_attention(runtime.attention)
            self._pricers[key] = LayerPricer(KernelPricer(device, recipe.precision, runtime.separate_experts))
        pricer = self._pricers[key]
        return {name: pricer.price((kind, name), layer, batch, sizes) for name, layer in self.count(kind).items()}


@dataclass
class PricedModel:
    """A folded program with its data for prices, each computed when it is first read."""

    folded: FoldedProgram
    _tensor: dict[tuple[bool, bool], AxisLayout] = field(default_factory=dict)
    _layers: dict[RecipeKind, dict[str, LayerClass]] = field(default_factory=dict)

    @cached_property
    def counted(self) -> CountedModel:
        """The part of the model's data from which recipes are priced."""
        return CountedModel(self.folded.blocks, self.tokens, self.layers, bool(self._experts))

    @cached_property
    def _space(self) -> SearchSpace:
        return axis_space(self.folded.single)

    @cached_property
    def digest(self) -> str:
        """A short hash of the folded program's text; equal programs have equal digests."""
        return self.folded.single.digest()

    @cached_property
    def tokens(self) -> int:
        """Tokens of one sequence: the number of elements of the first integer input; 0 without such an input."""
        program = self.folded.single
        nodes = program.nodes_by_name()
        values = (nodes[slot.node].meta["val"] for slot in program.inputs_of(InputKind.INPUT))
        return next((value.numel() for value in values if may_be_tokens(value.shape, value.dtype)), 0)

    def layers(self, kind: RecipeKind) -> Mapping[str, LayerClass]:
        """Return the layer classes by name, with their tensors split as a kind of recipe splits them."""
        if kind not in self._layers:
            self._layers[kind] = count_layers(self.folded, self.layouts(kind), fused=kind.fused)
        return self._layers[kind]

    def layouts(self, kind: RecipeKind) -> dict[str, AxisLayout]:
        """Return how each axis of a kind of recipe splits the program, by axis.

        Raises:
            RecipeError: the recipe divides experts among ranks, and the model has none.
        """
        result: dict[str, AxisLayout] = {}
        if kind.context:
            result["context"] = self._context
        if kind.tensor:
            key = (kind.sequence_parallel, kind.expert_tensor)
            if key not in self._tensor:
                self._tensor[key] = self._tensor_layout(kind)
            result["tensor"] = self._tensor[key]
        if kind.expert and not self._experts:
            raise RecipeError("expert > 1 shares out experts, but no parameter of the model is a stack of weights.")
        if kind.expert:
            result["expert"] = self._expert
        return result

    @cached_property
    def _context(self) -> AxisLayout:
        nodes = self.folded.single.nodes_by_name()
        slots = self.folded.single.inputs_of(InputKind.INPUT)
        inputs = {slot.node: PartitionSpec(None, AXIS) for slot in slots if nodes[slot.node].meta["val"].ndim > 1}
        return propagate_axis(self._space, Policy(inputs=inputs, routed=self._routed))

    def _tensor_layout(self, kind: RecipeKind) -> AxisLayout:
        whole = {} if kind.expert_tensor else dict.fromkeys(self._experts, WHOLE)
        sequence = self._context if kind.sequence_parallel else None
        routed = self._routed if sequence is not None and whole else {}
        policy = Policy(splits_parameters=True, parameters=whole, sequence=sequence, routed=routed)
        return propagate_axis(self._space, policy)

    @cached_property
    def _expert(self) -> AxisLayout:
        split, routed = dict.fromkeys(self._experts, PartitionSpec(AXIS)), shared_layers(self.folded, AXIS)
        return propagate_axis(self._space, Policy(parameters=split, exchanges=True, routed=routed))

    @cached_property
    def _routed(self) -> dict[str, Strategy]:
        return routed_calls(self.folded, AXIS)

    @cached_property
    def _experts(self) -> tuple[str, ...]:
        """Names of the parameters that have a matrix for each expert.

        They are operands of experts' operators (`kernels.experts`). A model without these operators may have stacks of
        matrices: parameters of three dims that batched or grouped products read. Each parameter of three dims with as
        many experts as a stack counts too, such as a bias.
        """
        if layers := matrices_of_layers(self.folded):
            return tuple(dict.fromkeys(source_of(node)[0].name for node in layers))
        nodes = self.folded.single.nodes_by_name()
        slots = self.folded.single.inputs_of(InputKind.PARAMETER)
        stacks = [nodes[slot.node] for slot in slots if nodes[slot.node].meta["val"].ndim == 3]
        counts = {node.meta["val"].shape[0] for node in stacks if _is_multiplied(node)}
        return tuple(node.name for node in stacks if node.meta["val"].shape[0] in counts)


def _is_multiplied(stack: fx.Node) -> bool:
    """Whether a batched or grouped product reads the parameter `stack`, or a view of this parameter."""
    users = [*stack.users, *(late for user in stack.users for late in user.users)]
    batched = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
    return any(user.target in batched or "grouped_mm" in str(user.target) for user in users)
