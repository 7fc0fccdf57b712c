"""Simplified graphs have no operand that a call does not read, and keep constants, types and names of inputs apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard import tracing
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.kernels.optimizers import SGD_HYPER

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x.new_zeros(4, 5),
    "ones": lambda x: x.new_ones((4, 5), dtype=torch.int64),
    "full": lambda x: x.new_full((4, 5), 7.5, dtype=torch.float64),
    "empty": lambda x: x.new_empty(4, 5).fill_(2.0),
}


class Maker(nn.Module):
    """A model that adds a new tensor to the input's sum."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x.exp()) + x.sum()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_new_tensor_needs_no_operand(name: str) -> None:
    """`x.new_zeros(size)` reads no element of `x`, so the traced call does not take `x`, and `x` is not computed."""
    model, x = Maker(OPERATORS[name]), torch.rand(2, 3)
    program = tracing.trace(model, (x,), grad=False)
    made = {str(node.target): node for node in program.graph.nodes if node.op == "call_function"}
    assert not any("new_" in target or "exp" in target for target in made)
    assert not any(node.all_input_nodes for target, node in made.items() if f"aten.{name}" in target)
    (found,) = program.graph_module(x)
    assert found.dtype == model(x).dtype
    torch.testing.assert_close(found, model(x))


class Constants(nn.Module):
    """A model that multiplies its input by two constant tensors."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.first, x * self.second


def test_constants_of_equal_bytes_keep_their_shapes_and_types() -> None:
    """Two constants that differ only in shape or dtype are two constants of the program."""
    numbers = torch.arange(4.0)
    for other in (numbers.view(2, 2), numbers.view(torch.int32)):
        model, x = Constants(numbers, other), torch.ones(1)
        program = tracing.trace(model, (x,), grad=False)
        for found, expected in zip(program.graph_module(x), model(x), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_operand_gives_a_concatenation_its_type(count: int) -> None:
    """An empty float32 tensor concatenated with integers makes a float32 result, also in the program."""
    model, x = Maker(lambda x: torch.cat([torch.tensor([]), *[x.long()] * count])), torch.arange(3.0)
    program = tracing.trace(model, (x,), grad=False)
    (found,) = program.graph_module(x)
    torch.testing.assert_close(found, model(x))
    assert found.dtype == program.graph.output_node().args[0][0].meta["val"].dtype


class AlmostEqualNames(nn.Module):
    """A model with parameters "a.b_c" and "a_b.c"."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b = nn.Module(), nn.Module()
        self.a.b_c = nn.Parameter(torch.full((3,), 2.0))
        self.a_b.c = nn.Parameter(torch.full((3,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a.b_c + self.a_b.c**2).sum()


def test_parameters_whose_names_differ_in_dots_are_two_inputs() -> None:
    """Parameters "a.b_c" and "a_b.c" are two inputs of the program, and all names of inputs are distinct with an
    optimizer's state."""
    rule = UpdateRule("momentum_update", ("momentum_buffer",), (False, False), SGD_HYPER)
    update = Update("SGD", (UpdateGroup(rule, ("a.b_c", "a_b.c")),), None)
    program = tracing.trace(AlmostEqualNames(), (torch.ones(3),), update=update)
    assert [slot.node for slot in program.inputs[:2]] == ["p_a_b_c", "p_a_b_c_1"]
    names = [node.target for node in program.graph.find_nodes(op="placeholder")]
    assert len(set(names)) == len(names)
