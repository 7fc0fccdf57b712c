"""The table of aliases knows each operator of torch that returns memory of its operand."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoshard.graphs.aliases import aliased_operands

aten = torch.ops.aten
OPERANDS = (
    torch.randn(2, 2), torch.arange(4).reshape(2, 2), torch.randn(()), torch.randn(1, 1, 2, 2), torch.randn(1, 2, 2),
)  # fmt: skip
LISTS = ([2, 2], [0], [1, 1], [2], [])
EQUATIONS = ("ij->ji", "linear")
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError)
"""Errors of operators whose operands do not fit."""


def undeclared() -> list[torch._ops.OpOverload]:
    """The overloads of aten whose schema declares no alias."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None) if namespace == "aten" else None
        is_own_test = packet.startswith(("_test", "_foobar", "_nested_compute"))
        items = () if operator is None or is_own_test else (*operator._schema.arguments, *operator._schema.returns)
        if items and all(item.alias_info is None for item in items):
            found.append(operator)
    return found


def fill(argument: Any, operand: Tensor, sizes: list[int], switch: bool) -> Any:
    """A value for an argument of an operator, or `NotImplemented` if no known value fits."""
    kind = str(argument.type)
    if argument.has_default_value() and kind != "bool":
        return argument.default_value
    known = {
        "Tensor": operand, "List[Tensor]": [operand], "int": 0, "float": 0.5, "number": 1, "bool": switch,
        "List[int]": sizes, "str": EQUATIONS[switch],
    }  # fmt: skip
    return known.get(kind, None if kind.startswith("Optional") else NotImplemented)


def calls(operator: torch._ops.OpOverload) -> Iterator[Mapping[str, Any]]:
    """Arguments of tiny calls of an operator, which may refuse some of them."""
    for operand in OPERANDS:
        for sizes in LISTS:
            for switch in (False, True):
                given = {item.name: fill(item, operand.clone(), sizes, switch) for item in operator._schema.arguments}
                if NotImplemented not in map(type, given.values()) and all(
                    x is not NotImplemented for x in given.values()
                ):
                    yield given


def shares(operator: torch._ops.OpOverload) -> bool:
    """Whether a result of some call lies in the memory of an operand."""
    for given in calls(operator):
        try:
            results = operator(**given)
        except _REFUSALS:
            continue
        if set(memory(given)) & set(memory(results)):
            return True
    return False


def memory(values: Any) -> Iterator[int]:
    """The address of each tensor's memory among `values`."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
            yield leaf.untyped_storage().data_ptr()


def found_by_running(operators: list[torch._ops.OpOverload]) -> list[str]:
    """The names of operators that share memory. They run in child processes, because an operator may read out of
    bounds."""
    found, first = [], 0
    while first < len(operators):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _try_all(operators[first:], writer)
        os.close(writer)
        with os.fdopen(reader) as lines:
            answers = lines.read().split()
        os.waitpid(child, 0)
        found += [str(operators[first + place]) for place, answer in enumerate(answers) if answer.endswith("1")]
        first += max(len(answers), 1)
    return found


def _try_all(operators: list[torch._ops.OpOverload], writer: int) -> None:
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        for operator in operators:
            os.write(writer, b"t")
            os.write(writer, b"1\n" if shares(operator) else b"0\n")
    finally:
        os._exit(0)  # whatever is raised, or this process would go on as a second pytest


@pytest.mark.slow
def test_the_table_knows_what_gives_back_an_operand() -> None:
    """Each operator of aten that is found to share memory with an operand, although its schema declares no alias,
    is in the table."""
    found = found_by_running(undeclared())
    assert {"aten._unsafe_view.default", "aten.type_as.default", "aten.dropout.default"} <= set(found)
    graph = fx.Graph()
    x = graph.placeholder("x")
    unknown = [
        name
        for name in found
        if not aliased_operands(
            graph.call_function(getattr(getattr(aten, name.split(".")[1]), name.split(".")[2]), (x,))
        )
    ]
    assert not unknown


@pytest.mark.parametrize(
    ("operator", "arguments", "expected"),
    [
        (aten.view.default, ("x", [-1]), ["x"]),
        (aten.expand_as.default, ("x", "y"), ["x"]),
        (aten.split.Tensor, ("x", 1), ["x"]),
        (aten.meshgrid.default, (["x", "y"],), ["x", "y"]),
        (aten.type_as.default, ("x", "y"), ["x", "y"]),
        (aten.mul.Tensor, ("x", "y"), []),
        (aten.clone.default, ("x",), []),
    ],
)
def test_schemas_and_the_table_name_operands(operator: Any, arguments: tuple[Any, ...], expected: list[str]) -> None:
    """For a call, the operands whose memory its result may share are named by the schema or the table."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "xy"}
    args = pytree.tree_map(lambda leaf: nodes.get(leaf, leaf), arguments)
    assert [node.name for node in aliased_operands(graph.call_function(operator, args))] == expected
