"""Value numbering: give nodes of a graph that compute equal values the same number.

Two nodes have the same number if they call the same operator on equal literals and on operands with equal numbers
(Alpern, Wegman, Zadeck 1988). Each call that draws random numbers has a number of its own. Constants are equal if their
bytes are. A fan-out, or a copy to or from the host, has the number of its operand. Numbers count from 0 in the order of
the graph, so an operand's number is below its users'.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.fan_out import fan_out

Key = tuple[Any, ...]
"""The structure of a call: its kind and target, then its arguments as `freeze` returns them."""

_COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(slots=True)
class Numbering:
    """The numbers of the nodes of one or several graphs.

    Args:
        numbers: node to its number.
        nodes: the first node with each number, by number.
        keys: structure of a call (operator, literals, numbers of operands) to its number.
        users: for each number, the numbers of the calls that read it.
    """

    numbers: dict[fx.Node, int] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    keys: dict[Key, int] = field(default_factory=dict)
    users: list[list[int]] = field(default_factory=list)
    _calls: list[Key] = field(default_factory=list)
    _draws: dict[Key, int] = field(default_factory=dict)

    def add_graph(self, graph_module: fx.GraphModule, *, commuted: bool = False) -> None:
        """Give the nodes of a graph numbers. Placeholders at the same position of several graphs share a number.

        With `commuted`, `a + b` may get the number of an earlier `b + a`.
        """
        placeholders = 0
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                self.add(node, ("placeholder", placeholders))
                placeholders += 1
            elif node.op != "output":
                self.add_node(node, graph_module, commuted=commuted)

    def add_node(self, node: fx.Node, graph_module: fx.GraphModule, *, commuted: bool = False) -> int:
        """Give a node a number, and return it. The node's operands must have numbers.

        Args:
            graph_module: the module that owns the graph's constants.
            commuted: whether `a + b` may get the number of an earlier `b + a`; the same for products.

        Raises:
            VerificationError: an operand has no number.
        """
        if node.op == "get_attr":
            return self.add(node, constant_key(graph_module, node))
        if node.target is fan_out or node.target in TRANSFERS:
            (operand,) = node.all_input_nodes
            self.numbers[node] = self.number_for(operand, node)
            return self.numbers[node]
        key = self.structure(node)
        other = mirrored_key(key) if commuted and key not in self.keys else None
        return self.add(node, other if other in self.keys else key)

    def structure(self, node: fx.Node) -> Key:
        """Return the structure of a call: its operator, its literals, and the numbers of its operands.

        Raises:
            VerificationError: an operand has no number.
        """
        return call_key(node.op, node.target, node.args, node.kwargs, lambda operand: self.number_for(operand, node))

    def number_for(self, operand: fx.Node, reader: fx.Node) -> int:
        """Return the number of an operand of `reader`.

        Raises:
            VerificationError: the operand has no number, because it is computed after `reader`.
        """
        if operand not in self.numbers:
            raise VerificationError(f"{reader.format_node()} reads {operand.name!r} before it is computed.")
        return self.numbers[operand]

    def key_of(self, number: int) -> Key:
        """Return the structure of the calls with this number."""
        return self._calls[number]

    def selection(self, number: int, index: int) -> int | None:
        """Return the number of result `index` of the calls with this number, which have several results.

        None is returned if no node selects this result.
        """
        args = (LIST, (OPERAND, number), (LITERAL, int, index))
        return self.keys.get(("call_function", operator.getitem, args, (DICT,)))

    def add(self, node: fx.Node, key: Key) -> int:
        """Give `node` the number of the structure `key`, and return the number. A new structure gets a new number."""
        if draws_numbers(node.target):
            key = (*key, self._next_draw(key))
        number = self.keys.setdefault(key, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
            self.users.append([])
            self._calls.append(key)
            for operand in dict.fromkeys(operands_of(key)):
                self.users[operand].append(number)
        self.numbers[node] = number
        return number

    def find(self, key: Key, places: Sequence[int], values: Sequence[frozenset[int]]) -> frozenset[int]:
        """Return the numbers of all calls that match a pattern.

        Args:
            key: the pattern: a structure in which each operand is an index into `values`.
            places: the indices that occur in the pattern.
            values: sets of numbers. An operand matches any number of the set at its index.
        """
        if all(len(values[place]) == 1 for place in places):
            number = self.keys.get(_with_single_operands(key, values))
            return frozenset() if number is None else frozenset({number})
        widest = max((values[place] for place in places), key=len)
        users = {user for operand in widest for user in self.users[operand]}
        return frozenset(user for user in users if _fits(key, self._calls[user], values))

    def draw_of(self, number: int) -> int:
        """Return the number of equal random calls that come before the random call with this number."""
        return self._calls[number][-1]

    def restart_draws(self) -> None:
        """Count equal random calls from 0 again.

        A graph that repeats the random calls of an earlier graph then gets the same numbers.
        """
        self._draws.clear()

    def _next_draw(self, key: Key) -> int:
        self._draws[key] = self._draws.get(key, -1) + 1
        return self._draws[key]


def number_graph(graph_module: fx.GraphModule) -> Numbering:
    """Return the numbers of all nodes of a graph except its output."""
    numbering = Numbering()
    numbering.add_graph(graph_module)
    return numbering


def draws_numbers(target: Any) -> bool:
    """Whether an operator draws from a generator of random numbers, so that equal calls yield different values."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def call_key(kind: str, target: Any, args: Any, kwargs: Any, operand: Callable[[Any], Any]) -> Key:
    """Return the structure of a call, as nested tuples.

    `operand` returns the key of each operand, which is a node or proxy.
    """
    return (kind, target, freeze(args, operand), freeze(kwargs, operand) if kwargs else (DICT,))


def mirrored_key(key: Key) -> Key | None:
    """Return the structure of a sum or product with its two operands exchanged, or None for any other call."""
    _, target, args, kwargs = key
    if target not in _COMMUTATIVE or len(args) != 3 or kwargs != (DICT,):
        return None
    word, first, second = args
    return (*key[:2], (word, second, first), kwargs)


def constant_key(graph_module: fx.GraphModule, node: fx.Node) -> Key:
    """Return the structure of a constant: its type, shape and a hash of its bytes.

    A constant without bytes (on the meta device, or no tensor) has its name in the structure instead.
    """
    value = operator.attrgetter(str(node.target))(graph_module)
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return ("get_attr", str(node.target))
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return ("constant", value.dtype, tuple(value.shape), hashlib.sha256(content).hexdigest())


OPERAND, LIST, DICT, SLICE, LITERAL = "operand", "list", "dict", "slice", "literal"
"""The first entry of a frozen argument, which tells its kind."""

_LONG = 16
"""Longer lists of integers are frozen as one literal. An all-to-all over a thousand ranks lists as many sizes."""


def freeze(value: Any, operand: Callable[[Any], Any]) -> Key:
    """Return an argument of a call as nested tuples, which can be compared and hashed.

    Two results are equal exactly if a call treats the two arguments alike. `operand` returns the key of each node or
    proxy in the argument.
    """
    if isinstance(value, (fx.Node, fx.Proxy)):
        return (OPERAND, operand(value))
    if isinstance(value, (list, tuple)):
        if len(value) > _LONG and all(type(item) is int for item in value):
            return (LITERAL, list, tuple(value))
        return (LIST, *(freeze(item, operand) for item in value))
    if isinstance(value, dict):
        return (DICT, *((name, freeze(value[name], operand)) for name in sorted(value)))
    if isinstance(value, slice):
        return (SLICE, *(freeze(item, operand) for item in (value.start, value.stop, value.step)))
    if isinstance(value, (float, complex)):
        return (LITERAL, type(value), repr(value))  # tells -0.0 from 0.0, and takes nan for equal to itself
    return (LITERAL, type(value), value)


def operands_of(key: Key) -> Iterator[Any]:
    """Yield the keys of all operands in a structure, or in a part of a structure, in order."""
    if key and key[0] == OPERAND:
        yield key[1]
    elif not (key and key[0] == LITERAL):
        for item in key:
            if isinstance(item, tuple):
                yield from operands_of(item)


def _with_single_operands(key: Key, values: Sequence[frozenset[int]]) -> Key:
    """Return a pattern with each index replaced by the only number of the set at that index in `values`."""
    if key and key[0] == OPERAND:
        (number,) = values[key[1]]
        return (OPERAND, number)
    if key and key[0] == LITERAL:
        return key
    return tuple(_with_single_operands(item, values) if isinstance(item, tuple) else item for item in key)


def _fits(pattern: Key, key: Key, values: Sequence[frozenset[int]]) -> bool:
    """Whether the structure `key` matches a pattern.

    An index in the pattern matches each number of its set in `values`.
    """
    if pattern and pattern[0] == OPERAND:
        return bool(key) and key[0] == OPERAND and key[1] in values[pattern[1]]
    if (pattern and pattern[0] == LITERAL) or len(pattern) != len(key):
        return pattern == key
    return all(
        _fits(left, right, values) if isinstance(left, tuple) and isinstance(right, tuple) else left == right
        for left, right in zip(pattern, key, strict=True)
    )
