"""Find the calls of a folded program that usual training libraries run as one fused kernel, and the kernel's operands.

A chain of pointwise operators is one kernel. A softmax may end the chain. A norm that is one operator is a kernel of
its own. Intermediate values of a chain are neither written nor saved. The backward computes them again from the chain's
operands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from cost_models.counting import TABLE
from passes.search.layers.fold_program import FoldedProgram, is_layout
from passes.search.layers.trace_values import readers_of, source_of
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.operator_names import operator_name

aten = torch.ops.aten


class Chains:
    """The chains of fused calls of a program.

    Args:
        working: names of the calls that run a kernel.
        varying: names of the values that depend on inputs or parameters.
        fused: whether calls are fused; otherwise each call is a chain of its own.
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
        """Return the name of the chain that contains `call`. A chain has the name of its last call."""
        return self.last.get(call.name, call.name)

    def readers(self, node: fx.Node, index: int | None = None) -> list[fx.Node]:
        """Return the calls that read the results of a node from memory; with `index`, only the readers of this result.

        Calls of the backward that recompute the value are left out.
        """
        return [item for item in readers_of(node, index) if not self._is_remade(node, item)]

    def operands(self, chain: Sequence[fx.Node]) -> tuple[tuple[fx.Node, int], ...]:
        """Return the values that a chain reads from memory, each as (call of the chain, index of the call's operand).

        A chain of several calls reads each value once. A forward value that a backward chain recomputes is also
        returned.
        """
        inside = {node.name for node in chain}
        found: dict[tuple[str, int], tuple[fx.Node, int]] = {}
        for node in chain:
            for index, operand in enumerate(operands_of(node)):
                if source_of(operand)[0].name not in inside:
                    found[operand.name, 0 if len(chain) > 1 else index] = node, index
        return tuple(found.values())

    def _cheap_values(self) -> frozenset[str]:
        """Return the names of forward calls whose results the backward recomputes instead of reading them.

        These calls are pointwise. Their operands are constant or saved anyway, and in the backward only memory-bound
        calls read their results.
        """
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
        same = self.folded.layer_of.get(node.name) == self.folded.layer_of.get(reader.name)
        is_near = same and node.meta["phase"] == reader.meta["phase"]
        return is_near and _is_memory_bound(reader) and reader.name in self.working


_ALONE = frozenset({
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default, aten.embedding.default, aten.embedding_dense_backward.default,
    aten.index_select.default, aten.index_add.default, aten.topk.default, aten.sort.default, aten.scatter.src,
    aten.sum.dim_IntList, torch.ops.autoshard.cross_entropy.default, torch.ops.autoshard.cross_entropy_backward.default,
})  # fmt: skip
"""Memory-bound operators that are never part of a chain."""

_ENDS = frozenset({aten._softmax.default, aten._softmax_backward_data.default})
"""Operators that may only be the last of a chain."""


def _is_memory_bound(node: fx.Node) -> bool:
    """Whether a call moves bytes and does little else, so that it may join a chain."""
    name = operator_name(node)
    return isinstance(node.target, torch._ops.OpOverload) and name not in TABLE and node.target not in _ALONE
