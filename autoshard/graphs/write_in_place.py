"""Turns functional updates into updates in place, so that new parameters and state overwrite the old ones.

Before: the graph returns a new value `f(p)` for the input `p`. After: the graph runs `p.copy_(f(p))` after the last use
of `p`, and returns `p`. `update(p, g, m)`, an optimizer's call that returns new `p` and `m`, becomes
`update_(p, g, m)`. If a later call reads the old value, the graph copies the old value first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.graphs.copy_nodes import copied
from autoshard.graphs.lazy_module import lazy_module

_aten = torch.ops.aten
_UPDATES = ("sgd_update", "momentum_update", "adam_update", "amsgrad_update", "muon_update")
_GRADIENT = 1
"""Index of the gradient among the operands of an update.

An in-place update overwrites the parameter, which comes before the gradient, and the state, which comes after it.
"""


def write_in_place(graph_module: fx.GraphModule, written: Mapping[int, int]) -> fx.GraphModule:
    """Return a copy of a graph in which some results overwrite inputs.

    Args:
        graph_module: a graph without in-place operators; its placeholders are not views of each other.
        written: index of the placeholder that a result overwrites, by the index of the result.
    """
    return lazy_module(graph_module, written_in_place(graph_module.graph, written))


def written_in_place(graph: fx.Graph, written: Mapping[int, int]) -> fx.Graph:
    """Return a copy of `graph` in which results overwrite inputs.

    `written` maps the index of a result to the index of the placeholder that the result overwrites.
    """
    made, _ = copied(graph.nodes)
    _Writing(made, dict(written)).run()
    return made


@dataclass(slots=True)
class _Writing:
    graph: fx.Graph
    written: dict[int, int]
    order: dict[fx.Node, int] = field(init=False)
    placeholders: list[fx.Node] = field(init=False)
    overwritten: set[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self._number()
        self.placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.overwritten = {self.placeholders[place] for place in self.written.values()}

    def run(self) -> None:
        self._keep_results()
        in_place = {_update(name): _twin(name) for name in _UPDATES}
        for node in list(self.graph.nodes):
            if node.target in in_place:
                self._update_in_place(node, in_place[node.target])
        self._number()
        output = self.graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        for index, place in self.written.items():
            results[index] = self._write(results[index], self.placeholders[place])
        output.args = (tuple(results),)
        self.graph.lint()

    def _keep_results(self) -> None:
        """Clone each result that may be a view of an overwritten input, right after the result's own call."""
        output = self.graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        for index, result in enumerate(results):
            is_unchanged = index in self.written and result is self.placeholders[self.written[index]]
            if isinstance(result, fx.Node) and not is_unchanged and self.overwritten & roots_of(result):
                made = result if result.op != "placeholder" else self.placeholders[-1]
                with self.graph.inserting_after(made):
                    results[index] = self._add(_aten.clone.default, (result,), made)
        output.args = (tuple(results),)
        self._number()

    def _number(self) -> None:
        self.order = {node: index for index, node in enumerate(self.graph.nodes)}

    def _update_in_place(self, node: fx.Node, twin: torch._ops.OpOverload) -> None:
        """Replace a functional optimizer update, `node`, by `twin`, its operator in place.

        An operand that later calls read is cloned first, and the clone is overwritten.
        """
        selections = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        count = len(selections) and 1 + max(index for index in selections if isinstance(index, int))
        operands = [index for index in range(max(1, count) + 1) if index != _GRADIENT]
        args = list(node.args)
        with self.graph.inserting_before(node):
            for index in operands:
                operand = args[index]
                assert isinstance(operand, fx.Node)
                if not self._dies_at(operand, node):
                    args[index] = self._add(_aten.clone.default, (operand,), node)
            self._add(twin, tuple(args), node)
        for position, index in enumerate(operands):
            result = selections.get(position) if selections else node
            if result is not None:
                written = args[index]
                assert isinstance(written, fx.Node)
                result.replace_all_uses_with(written)
                if selections:
                    self.graph.erase_node(result)
        self.graph.erase_node(node)

    def _dies_at(self, value: fx.Node, reader: fx.Node) -> bool:
        """Whether `reader` may overwrite the memory of `value`.

        `reader` must use this memory once, after all other readers. The memory must belong to no input that the graph
        keeps.
        """
        roots = roots_of(value)
        if any(root.op == "placeholder" and root not in self.overwritten for root in roots):
            return False
        aliases = _aliases(roots)
        users = [user for alias in aliases for user in alias.users if user not in aliases]
        reads_once = sum(argument in aliases for argument in reader.args) == 1
        return reads_once and all(user is reader or self.order[user] < self.order[reader] for user in users)

    def _write(self, result: fx.Node, target: fx.Node) -> fx.Node:
        """Add `target.copy_(result)` after the last use of the old content of `target`, and return `target`.

        In-place updates of `result` count as uses too. If `result` is `target`, add nothing.
        """
        if result is target:
            return target
        uses = [user for alias in _aliases({target, *roots_of(result)}) for user in alias.users]
        last = max([result, *(user for user in uses if user.op != "output")], key=self.order.__getitem__)
        with self.graph.inserting_after(last):
            copied = self._add(_aten.copy_.default, (target, result), last)
        if target in roots_of(result):  # updated in place, and possibly a view of `target`
            with self.graph.inserting_before(copied):
                copied.replace_input_with(result, self._add(_aten.clone.default, (result,), last))
        return target

    def _add(self, target: torch._ops.OpOverload, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = {key: item for key, item in like.meta.items() if key != "val"}
        self.order[made] = self.order[like]
        return made


def _update(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.autoshard, name).default


def _twin(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.autoshard, f"{name}_").default


def roots_of(value: fx.Node) -> set[fx.Node]:
    """Return the nodes that allocate the memory of `value`: `value` itself, or the nodes of which `value` is a view."""
    found: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        operands = aliased_operands(one)
        waiting += operands
        if not operands:
            found.add(one)
    return found


def _aliases(roots: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return `roots`, their views, and the views of these views, as the keys of a dict."""
    found = dict.fromkeys(roots)
    waiting = list(found)
    while waiting:
        one = waiting.pop()
        views = [user for user in one.users if user not in found and one in aliased_operands(user)]
        found.update(dict.fromkeys(views))
        waiting += views
    return found
