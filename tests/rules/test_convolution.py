"""Convolutions split batch, groups, channels and spatial dims, with one device's results and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.rules import strategies
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule
from tests.rules.recording import MESH_PAIRS, check_database, check_splits, tensor

aten = torch.ops.aten


@given(
    space=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    channels=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    transposed=st.booleans(),
    biased=st.booleans(),
    pairs=st.tuples(MESH_PAIRS, MESH_PAIRS),
)
def test_convolution(
    space: int,
    groups: int,
    channels: tuple[int, int],
    transposed: bool,
    biased: bool,
    pairs: tuple[Sequence[Mesh], Sequence[Mesh]],
) -> None:
    """Under every strategy, convolutions of drawn groups and channels equal one device's, forward and backward."""
    inner, outer = channels
    x = tensor(4, groups * inner, *[4] * space)
    weight_channels = (groups * inner, outer) if transposed else (groups * outer, inner)
    weight = tensor(*weight_channels, *[2] * space)
    bias = tensor(groups * outer) if biased else None
    options: tuple[Any, ...] = ([1] * space, [0] * space, [1] * space, transposed, [0] * space, groups)
    check_splits(aten.convolution.default, x, weight, bias, *options, meshes=pairs[0])
    grad = tensor(*aten.convolution(x, weight, bias, *options).shape)
    options = (*options, [True, True, biased])
    sizes = [groups * outer] if biased else None
    check_splits(aten.convolution_backward.default, grad, x, weight, sizes, *options, meshes=pairs[1])


@given(st.data())
def test_space_is_split(data: st.DataObject) -> None:
    """Under every strategy, convolutions with drawn windows in one to three dims equal one device's, with gradients."""
    space, groups, transposed = (
        data.draw(st.sampled_from([1, 1, 2, 2, 3])),
        data.draw(st.integers(1, 2)),
        data.draw(st.booleans()),
    )
    kernel, stride, padding, dilation, sizes, out = ([] for _ in range(6))
    for _ in range(space):
        options = data.draw(st.tuples(*(st.integers(low, 3) for low in (1, 1, 0, 1))))
        # dilation (kernel - 1) + 1 = stride + 2 padding - e: what fits exactly
        kernel.append(options[0])
        stride.append(options[1])
        dilation.append(options[3])
        extent = options[3] * (options[0] - 1) + 1
        padding.append(max(0, -(-(extent - options[1]) // 2)) if data.draw(st.booleans()) else options[2])
        missing = options[1] + 2 * padding[-1] - extent
        out.append(missing if transposed and 0 <= missing < max(options[1], options[3]) else 0)
        windows = 4 * data.draw(st.integers(1, 2 if space < 3 else 1))
        sizes.append(windows if transposed else windows * options[1])
    x, bias = tensor(2, groups, *sizes), tensor(2 * groups)
    weight = tensor(groups, 2, *kernel) if transposed else tensor(2 * groups, 1, *kernel)
    args: tuple[Any, ...] = (stride, padding, dilation, transposed, out, groups)
    try:
        result = aten.convolution(x, weight, bias, *args)
    except RuntimeError:  # windows wider than the padded operand, or nothing is left of the result
        reject()
    meshes = (Mesh({"a": 2, "b": 2}),)
    check_splits(aten.convolution.default, x, weight, bias, *args, meshes=meshes)
    grad, mask = tensor(*result.shape), [True, True, data.draw(st.booleans())]
    check_splits(aten.convolution_backward.default, grad, x, weight, [2 * groups], *args, mask, meshes=meshes)


_THREE = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
_FOUR_TO_TWO = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)


@pytest.mark.parametrize(
    ("kernel", "options", "left_over"),
    [
        (3, _THREE, 1),  # alike in size
        (4, _FOUR_TO_TWO, 1),  # twice as large
        (2, ([2, 2], [0, 0], [1, 1], False, [0, 0], 1), 0),  # patches
    ],
)
def test_space_of_common_convolutions_is_split(kernel: int, options: tuple[Any, ...], left_over: int) -> None:
    """Two axes may split either spatial dim, or both; only overlapping windows need elements of neighbours."""
    x, weight = tensor(1, 1, 8, 16), tensor(1, 1, kernel, kernel)
    args = (x, weight, None, *options)
    result = aten.convolution.default(*args)
    rule = bound_rule(aten.convolution.default, args, {}, [result])
    assert rule is not None
    assert rule.exchanged == ({"o2": left_over, "o1": left_over} if left_over else {})
    found = {strategy.inputs[0] for strategy in enumerate_strategies(rule, Mesh({"a": 2, "b": 2}))}
    both = {
        P(None, None, "a", "b"),
        P(None, None, "b", "a"),
        P(None, None, ("a", "b")),
        P(None, None, None, ("a", "b")),
    }
    assert both <= found
    check_splits(aten.convolution.default, *args)
    backward = (tensor(*result.shape), x, weight, None, *options, [True, True, False])
    check_splits(aten.convolution_backward.default, *backward)


def test_space_that_does_not_fit_stays_whole() -> None:
    """Without padding, space is not split, because no piece of the operand fits the windows of a result's piece."""
    args = (tensor(1, 1, 8), tensor(1, 1, 3), None, [1], [0], [1], False, [0], 1)
    assert len(strategies(aten.convolution.default, args, {}, 2)) == 3


@pytest.mark.parametrize("mask", [[False, True, True], [True, False, True], [False, False, True]])
def test_only_some_gradients(mask: list[bool]) -> None:
    """Under every strategy, the backward has one device's gradients if only some gradients are asked for."""
    options: tuple[Any, ...] = ([1], [0], [1], False, [0], 1)
    check_splits(
        aten.convolution_backward.default, tensor(4, 8, 3), tensor(4, 4, 4), tensor(8, 4, 2), [8], *options, mask
    )


def test_a_bias_is_added_once() -> None:
    """If input channels are split, the bias must be a pending sum, because each rank adds its part."""
    args = (tensor(4, 8, 4), tensor(4, 8, 2), tensor(4), [1], [0], [1], False, [0], 1)
    found = strategies(aten.convolution.default, args, {}, 2)
    assert [str(inputs[2]) for inputs, _ in found if inputs[0].is_shard(1)] == ["P(sum)"]


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of convolutions, every strategy has one device's results, forward and backward."""
    tally = check_database(
        [
            "nn.functional.conv1d",
            "nn.functional.conv2d",
            "nn.functional.conv3d",
            "nn.functional.conv_transpose1d",
            "nn.functional.conv_transpose2d",
            "nn.functional.conv_transpose3d",
        ],
        limit=2,
    )
    assert not tally.failures, "\n".join(tally.failures)
