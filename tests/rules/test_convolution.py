"""Convolutions: batch, groups, output and input channels are split, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules import strategies
from tests.rules.recording import check_database, check_splits, tensor

aten = torch.ops.aten


@given(
    space=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    channels=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    transposed=st.booleans(),
    biased=st.booleans(),
)
def test_convolution(space: int, groups: int, channels: tuple[int, int], transposed: bool, biased: bool) -> None:
    """Any number of groups and of channels in a group."""
    inner, outer = channels
    x = tensor(4, groups * inner, *[4] * space)
    weight_channels = (groups * inner, outer) if transposed else (groups * outer, inner)
    weight = tensor(*weight_channels, *[2] * space)
    bias = tensor(groups * outer) if biased else None
    options: tuple[Any, ...] = ([1] * space, [0] * space, [1] * space, transposed, [0] * space, groups)
    check_splits(aten.convolution.default, x, weight, bias, *options)
    grad = tensor(*aten.convolution(x, weight, bias, *options).shape)
    sizes = [groups * outer] if biased else None
    check_splits(aten.convolution_backward.default, grad, x, weight, sizes, *options, [True, True, biased])


@pytest.mark.parametrize("mask", [[False, True, True], [True, False, True], [False, False, True]])
def test_only_some_gradients(mask: list[bool]) -> None:
    """The bias's gradient is whole where input channels are split, at whatever place it is among the results."""
    options: tuple[Any, ...] = ([1], [0], [1], False, [0], 1)
    check_splits(
        aten.convolution_backward.default, tensor(4, 8, 3), tensor(4, 4, 4), tensor(8, 4, 2), [8], *options, mask
    )


def test_a_bias_is_added_once() -> None:
    """Where input channels are split, the bias must be a pending sum."""
    args = (tensor(4, 8, 4), tensor(4, 8, 2), tensor(4), [1], [0], [1], False, [0], 1)
    found = strategies(aten.convolution.default, args, {}, 2)
    assert [str(inputs[2]) for inputs, _ in found if inputs[0].is_shard(1)] == ["P(sum)"]


def test_on_the_samples_of_pytorch() -> None:
    """PyTorch's own samples run under every strategy, forward and backward."""
    tally = check_database(["nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d"], limit=2)
    assert not tally.failures, "\n".join(tally.failures)
