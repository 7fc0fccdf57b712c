"""Generated kernels as operators: other layouts of operands, literals with a sign of zero, and names of values."""

from __future__ import annotations

import torch

from autoshard.kernels.generated.define import NamedGroup, define_kernels, generated_kernel
from autoshard.kernels.generated.group import Group, GroupStep, Ref, ValueShape
from tests.kernels.fused import DEVICE, draw

_aten = torch.ops.aten


def _scaled(factor: float, x: torch.Tensor) -> Group:
    form = ValueShape.of(x)
    product = GroupStep(_aten.mul.Tensor, (Ref(0), factor), (), form)
    return Group((form,), (product, GroupStep(_aten.tanh.default, (Ref(1),), (), form)), (2,))


def test_an_operand_that_lies_otherwise_is_copied() -> None:
    """A kernel generated for a contiguous operand gives the same values for operands with other strides."""
    x = draw(6, 10)
    group = _scaled(2.0, x)
    kernel = define_kernels([NamedGroup(group, ("x", "twice", "out"), "tanh(2 x).")], "A test.")[group]
    for operand in (x, x.t().contiguous().t(), x.repeat(1, 2)[:, :10]):
        torch.testing.assert_close(kernel.operator(operand), torch.tanh(2 * operand))
    torch.testing.assert_close(kernel.operator(x), group.run([x])[0])


def test_expanded_operands_are_read_once() -> None:
    """A kernel generated for an operand whose one row is expanded to all rows is right for it and for a contiguous
    copy."""
    x = draw(1, 10).expand(6, 10)
    group = _scaled(3.0, x)
    kernel = define_kernels([NamedGroup(group, ("x", "twice", "out"), "tanh(3 x).")], "A test.")[group]
    for operand in (x, x.contiguous()):
        torch.testing.assert_close(kernel.operator(operand), torch.tanh(3 * operand))


def test_literals_tell_groups_apart() -> None:
    """0.0 and -0.0 as factors make different groups with separate kernels, and equal groups share one kernel."""
    x = torch.ones(4, device=DEVICE)
    groups = [_scaled(0.0, x), _scaled(-0.0, x), _scaled(0.0, x)]
    assert groups[0] == groups[2] != groups[1]
    named = [NamedGroup(group, ("x", "product", "out"), "Signs.") for group in groups[:2]]
    kernels = define_kernels(named, "A test.")
    assert [kernels[group].operator(x).signbit().all().item() for group in groups] == [False, True, False]
    assert generated_kernel(kernels[groups[0]].operator) is kernels[groups[2]]


def test_names_may_be_words_of_the_kernel() -> None:
    """A value whose name is used in the kernel's own code gets another name there."""
    x = draw(5)
    group = _scaled(5.0, x)
    kernel = define_kernels([NamedGroup(group, ("tl", "index", "index"), "Names.")], "A test.")[group]
    torch.testing.assert_close(kernel.operator(x), torch.tanh(5 * x))
