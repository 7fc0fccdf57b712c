"""Which calls of a folded program run as one kernel, and what that kernel reads from memory.

`Chains` is what sections are counted by. `LibraryChains` are those of the libraries that people train with: a chain of
pointwise operators is one kernel, which a softmax or norm may end; intermediate values are neither written nor saved,
and the backward makes them again from the chain's operands. `KernelChains` (`kernel_chains.py`) are our own kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cost_models.counting import TABLE
from passes.sections.fold_program import FoldedProgram, is_layout
from passes.sections.trace_values import readers_of, source_of
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.operator_names import operator_name

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ChainDemand:
    """What a chain asks of memory and of the host, beside its results.

    Args:
        operands: calls of the chain, each with the place of an operand that is read.
        values: results of other calls that are read whole, each with its place among these.
        launches: how many kernels are launched.
        later_bytes: read and written by those behind the first, for any batch.
    """

    operands: tuple[tuple[fx.Node, int], ...]
    values: tuple[tuple[fx.Node, int], ...] = ()
    launches: int = 1
    later_bytes: int = 0


class Chains(ABC):
    """The chains of a program."""

    @abstractmethod
    def chain_of(self, call: fx.Node) -> str:
        """A name that the calls of a chain have in common."""

    @abstractmethod
    def is_fused(self, chain: Sequence[fx.Node]) -> bool:
        """Whether a chain is a kernel of its own, rather than the kernel of its one call."""

    @abstractmethod
    def readers(self, node: fx.Node, index: int | None = None) -> list[fx.Node]:
        """The calls whose kernels read a node's results, or one of them, or that are in the chain that makes it."""

    @abstractmethod
    def asked(self, chain: Sequence[fx.Node]) -> ChainDemand:
        """What the calls of a chain in one section ask for."""

    def phase_of(self, call: fx.Node) -> str:
        """The phase that a call runs in."""
        return call.meta["phase"]


class LibraryChains(Chains):
    """The chains of the usual libraries.

    Args:
        folded: the program.
        working: names of its calls that do work.
        varying: names of the values that depend on inputs or parameters.
        fused: whether there are chains of several calls.
    """

    def __init__(
        self,
        folded: FoldedProgram,
        working: Collection[str],
        varying: Collection[str],
        *,
        fused: bool,
    ) -> None:
        self.folded, self.working, self.varying = folded, working, varying
        self.nodes = folded.single.nodes_by_name()
        self.remade = self._cheap_values() if fused else frozenset()
        self.last = self._chains() if fused else {}

    def chain_of(self, call: fx.Node) -> str:
        """The chain's last call."""
        return self.last.get(call.name, call.name)

    def is_fused(self, chain: Sequence[fx.Node]) -> bool:
        """Whether it has several calls."""
        return len(chain) > 1

    def readers(self, node: fx.Node, index: int | None = None) -> list[fx.Node]:
        """All but those that make the value again."""
        return [item for item in readers_of(node, index) if not self._is_remade(node, item)]

    def asked(self, chain: Sequence[fx.Node]) -> ChainDemand:
        """Every operand that the chain does not make, those that it makes again too, in place of what they are made of.

        What several calls of a chain read alike is read once.
        """
        inside = {node.name for node in chain}
        found: dict[tuple[str, int], tuple[fx.Node, int]] = {}
        for node in chain:
            for index, operand in enumerate(operands_of(node)):
                if source_of(operand)[0].name not in inside:
                    found[operand.name, 0 if len(chain) > 1 else index] = node, index
        return ChainDemand(tuple(found.values()))

    def _cheap_values(self) -> frozenset[str]:
        """Forward calls whose results the backward makes again: pointwise, of what is saved anyway or never varies,
        and not read by products."""
        cheap: set[str] = set()
        for node in self.folded.single.graph.nodes:
            if node.op == "call_function" and node.meta["phase"] == "forward" and self._is_pointwise(node):
                late = [user for user in readers_of(node) if user.meta["phase"] == "backward"]
                kept = all(self._is_kept(operand, cheap) for operand in node.all_input_nodes)
                if late and kept and all(_is_memory_bound(user) for user in late):
                    cheap.add(node.name)
        return frozenset(cheap)

    def _is_kept(self, operand: fx.Node, cheap: set[str]) -> bool:
        owner, index = source_of(operand)
        return (
            owner.op != "call_function"
            or owner.name not in self.varying
            or owner.name in cheap
            or any(user.meta["phase"] == "backward" for user in readers_of(owner, index))
        )

    def _is_pointwise(self, node: fx.Node) -> bool:
        return _is_memory_bound(node) and node.target not in _ENDS and not is_layout(node)

    def _chains(self) -> dict[str, str]:
        """Call to the last call of its chain."""
        order = [node for node in self.folded.single.graph.nodes if node.name in self.working]
        last = {node.name: node.name for node in order}
        for node in reversed(order):
            if not self._is_pointwise(node):
                continue
            readers = self.readers(node)
            targets = {last.get(item.name, "") for item in readers}
            found = self.nodes.get(next(iter(targets), ""))
            if len(targets) == 1 and found is not None and all(self._joins(node, item) for item in readers):
                last[node.name] = found.name
        return last

    def _is_remade(self, node: fx.Node, reader: fx.Node) -> bool:
        return node.name in self.remade and reader.meta["phase"] == "backward"

    def _joins(self, node: fx.Node, reader: fx.Node) -> bool:
        same = self.folded.section_of.get(node.name) == self.folded.section_of.get(reader.name)
        is_near = same and node.meta["phase"] == reader.meta["phase"]
        return is_near and _is_memory_bound(reader) and reader.name in self.working


_ENDS = frozenset({
    aten._softmax.default, aten._softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default,
    aten.sum.dim_IntList, aten.embedding.default, aten.embedding_dense_backward.default, aten.index_select.default,
    aten.index_add.default, aten.topk.default, aten.sort.default, aten.scatter.src,
    torch.ops.autoshard.cross_entropy.default, torch.ops.autoshard.cross_entropy_backward.default,
})  # fmt: skip
"""Memory-bound operators that nothing is fused behind: they end a chain, or stand alone."""

_ALONE = frozenset({
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default, aten.embedding.default, aten.embedding_dense_backward.default,
    aten.index_select.default, aten.index_add.default, aten.topk.default, aten.sort.default, aten.scatter.src,
    aten.sum.dim_IntList, torch.ops.autoshard.cross_entropy.default, torch.ops.autoshard.cross_entropy_backward.default,
})  # fmt: skip
"""Those of them that stand alone."""


def _is_memory_bound(node: fx.Node) -> bool:
    """Whether a call moves bytes and does little else, so that it may be part of a chain."""
    name = operator_name(node)
    return isinstance(node.target, torch._ops.OpOverload) and name not in TABLE and node.target not in _ALONE
