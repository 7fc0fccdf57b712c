"""A model made ready to be priced under any recipe: traced and folded once, its layouts and sections kept.

What depends on the recipe's kind only (which axes there are, sequence parallelism, fusion) is found at the first recipe
of that kind; what is left for each recipe is arithmetic.
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
from autoshard.ir.program import InputKind
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from passes.search.layers.count_layers import Section, count_sections, splits_of
from passes.search.layers.fold_program import FoldedProgram
from passes.search.layers.price_layers import LayerPricer, Products, SectionPrice
from passes.search.layers.propagate_axis import AXIS, WHOLE, AxisLayout, Policy, axis_space, propagate_axis
from passes.search.layers.route_tokens import matrices_of_layers, routed_calls, shared_layers
from passes.search.layers.trace_values import source_of
from passes.strategies.enumerate_strategies import SearchSpace


class RecipeKind(NamedTuple):
    """What of a recipe decides how values are split."""

    tensor: bool
    sequence_parallel: bool
    context: bool
    expert: bool
    expert_tensor: bool
    fused: bool

    @classmethod
    def of(cls, recipe: Execution) -> RecipeKind:
        """The kind of a recipe."""
        runtime = recipe.runtime
        return cls(
            recipe.tensor > 1,
            recipe.sequence_parallel,
            recipe.context > 1,
            recipe.expert > 1,
            recipe.expert_tensor > 1,
            runtime.fused,
        )


@dataclass
class CountedModel:
    """What prices need of a model: its blocks, and the sections of each kind of recipe.

    Args:
        blocks: the section of every block, in order.
        tokens: elements of the first integer input of one sequence; 0 without such an input.
        count: the sections under the layouts of a kind of recipe.
        has_experts: whether there are experts to share out.
    """

    blocks: tuple[str, ...]
    tokens: int
    count: Callable[[RecipeKind], Mapping[str, Section]] = field(repr=False)
    has_experts: bool = False
    _pricers: dict[tuple[object, ...], LayerPricer] = field(default_factory=dict, init=False, repr=False)
    _splits: dict[RecipeKind, frozenset[tuple[int, tuple[str, ...]]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _cores: dict[RecipeKind, bool] = field(default_factory=dict, init=False, repr=False)

    def splits(self, kind: RecipeKind) -> frozenset[tuple[int, tuple[str, ...]]]:
        """The dims that a kind of recipe splits in blocks (in everything, where there are none), with their axes."""
        if kind not in self._splits:
            sections = self.count(kind)
            self._splits[kind] = splits_of([sections[name] for name in dict.fromkeys(self.blocks) or sections])
        return self._splits[kind]

    def has_core(self, kind: RecipeKind) -> bool:
        """Whether blocks have what selective recomputation computes again; fused attention has no such core."""
        if kind not in self._cores:
            sections = self.count(kind)
            blocks = [sections[name] for name in dict.fromkeys(self.blocks)]
            parts = (part for block in blocks for part in (*block.forward.kernels, *block.saved))
            self._cores[kind] = any(part.is_core for part in parts)
        return self._cores[kind]

    def section_prices(
        self, recipe: Execution, cluster: Cluster, batch: int | None = None, sizes: Mapping[str, int] | None = None
    ) -> Mapping[str, SectionPrice]:
        """The price of each section under a recipe; `batch` and `sizes` in place of its micro-batch and axes' sizes."""
        kind, pricer = RecipeKind.of(recipe), self._pricer(recipe, cluster)
        batch, sizes = batch or recipe.micro_batch, sizes or _axis_sizes(recipe)
        return {name: pricer.price((kind, name), section, batch, sizes) for name, section in self.count(kind).items()}

    def _pricer(self, recipe: Execution, cluster: Cluster) -> LayerPricer:
        key = (cluster.device, recipe.runtime.attention, recipe.precision, recipe.runtime.separate_experts)
        if key not in self._pricers:
            attention = recipe.runtime.attention
            device = cluster.device if attention is None else cluster.device.with_attention(attention)
            self._pricers[key] = LayerPricer(Products(device, recipe.precision, recipe.runtime.separate_experts))
        return self._pricers[key]


def _axis_sizes(recipe: Execution) -> dict[str, int]:
    return {"tensor": recipe.tensor, "context": recipe.context, "expert": recipe.expert}


@dataclass
class PricedModel:
    """A folded program with what was found out about it so far."""

    folded: FoldedProgram
    _layouts: dict[object, AxisLayout] = field(default_factory=dict)
    _sections: dict[RecipeKind, dict[str, Section]] = field(default_factory=dict)

    @cached_property
    def counted(self) -> CountedModel:
        """What prices need of it."""
        return CountedModel(self.folded.blocks, self.tokens, self.sections, bool(self._experts()))

    @cached_property
    def space(self) -> SearchSpace:
        """The strategies of one axis."""
        return axis_space(self.folded.single)

    @cached_property
    def digest(self) -> str:
        """The digest of the folded program."""
        return self.folded.single.digest()

    @cached_property
    def tokens(self) -> int:
        """Elements of the first integer input of one sequence; 0 without such an input."""
        program = self.folded.single
        nodes = program.nodes_by_name()
        values = (nodes[slot.node].meta["val"] for slot in program.inputs_of(InputKind.INPUT))
        return next((value.numel() for value in values if not value.dtype.is_floating_point), 0)

    def sections(self, kind: RecipeKind) -> Mapping[str, Section]:
        """The sections under the layouts of a kind of recipe."""
        if kind not in self._sections:
            self._sections[kind] = count_sections(
                self.folded,
                self.layouts(kind),
                fused=kind.fused,
            )
        return self._sections[kind]

    def layouts(self, kind: RecipeKind) -> dict[str, AxisLayout]:
        """How each axis of a kind of recipe splits the program.

        Raises:
            RecipeError: the recipe shares out experts, and the model has none.
        """
        result: dict[str, AxisLayout] = {}
        if kind.context:
            result["context"] = self._context()
        if kind.tensor:
            result["tensor"] = self._tensor(kind)
        if kind.expert:
            result["expert"] = self._expert()
        return result

    def _context(self) -> AxisLayout:
        if "context" not in self._layouts:
            nodes = self.folded.single.nodes_by_name()
            inputs = {
                slot.node: PartitionSpec(None, AXIS)
                for slot in self.folded.single.inputs_of(InputKind.INPUT)
                if nodes[slot.node].meta["val"].ndim > 1
            }
            self._layouts["context"] = propagate_axis(self.space, Policy(inputs=inputs, routed=self._routed))
        return self._layouts["context"]

    def _tensor(self, kind: RecipeKind) -> AxisLayout:
        key = ("tensor", kind.sequence_parallel, kind.expert_tensor)
        if key not in self._layouts:
            whole = {} if kind.expert_tensor else dict.fromkeys(self._experts(), WHOLE)
            sequence = self._context() if kind.sequence_parallel else None
            routed = self._routed if sequence is not None and whole else {}
            policy = Policy(splits_parameters=True, parameters=whole, sequence=sequence, routed=routed)
            self._layouts[key] = propagate_axis(self.space, policy)
        return self._layouts[key]

    @cached_property
    def _routed(self) -> dict[str, Strategy]:
        return routed_calls(self.folded, AXIS)

    def _expert(self) -> AxisLayout:
        if "expert" not in self._layouts:
            experts = self._experts()
            if not experts:
                raise RecipeError("expert > 1 shares out experts, but no parameter of the model is a stack of weights.")
            split = dict.fromkeys(experts, PartitionSpec(AXIS))
            policy = Policy(parameters=split, exchanges=True, routed=shared_layers(self.folded, AXIS))
            self._layouts["expert"] = propagate_axis(self.space, policy)
        return self._layouts["expert"]

    def _experts(self) -> tuple[str, ...]:
        """Parameters with a matrix for each expert: of layers that are one operator, or else stacks.

        Stacks have three dims and are read by batched or grouped products, or are as many as such stacks (biases).
        """
        if layers := matrices_of_layers(self.folded):
            return tuple(dict.fromkeys(source_of(node)[0].name for node in layers))
        nodes = self.folded.single.nodes_by_name()
        slots = self.folded.single.inputs_of(InputKind.PARAMETER)
        stacks = [nodes[slot.node] for slot in slots if nodes[slot.node].meta["val"].ndim == 3]
        counts = {
            node.meta["val"].shape[0] for node in stacks if any(_is_stacked_product(user) for user in _all_users(node))
        }
        return tuple(node.name for node in stacks if node.meta["val"].shape[0] in counts)


def _all_users(node: fx.Node) -> list[fx.Node]:
    """Users, and users of views."""
    return [*node.users, *(late for user in node.users for late in user.users)]


def _is_stacked_product(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default) or "grouped_mm" in str(
        node.target
    )
