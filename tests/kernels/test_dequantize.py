"""`autoshard::dequantize_nf4`: the weights of bitsandbytes, bit for bit, also for a piece of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.kernels.dequantize import dequantize_nf4

bnb = pytest.importorskip("bitsandbytes")


def quantised(*shape: int, nested: bool, blocksize: int = 64) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Packed weights, the bytes of their scales, the bytes of nested scales or None, and the weights as bitsandbytes
    dequantises them."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type="nf4"
    )
    scales = (
        state.absmax if not nested else bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    )
    is_whole = shape[-1] % blocksize == 0  # else the library's kernel for CPUs is wrong (0.50.2), its definition is not
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default if is_whole else definition_of_4_bits
    expected = dequantize(packed, scales, blocksize, "nf4", shape, torch.float32)
    if not nested:
        return packed, state.absmax.view(torch.uint8), None, expected
    floats = torch.cat([state.state2.code, state.offset.view(1), state.state2.absmax])
    return packed, state.absmax, floats.view(torch.uint8), expected


def definition_of_4_bits(packed: Tensor, scales: Tensor, blocksize: int, kind: str, *rest: Any) -> Tensor:
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    code = bnb.functional.get_4bit_type(kind, device="cpu")
    return _dequantize_4bit_compute.__wrapped__(packed.flatten(), scales, code, blocksize, *rest)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_to_bitsandbytes(nested: bool, dtype: torch.dtype) -> None:
    """Weights with more than one group of scales equal those of bitsandbytes bit for bit in each result type."""
    packed, absmax, scales, expected = quantised(300, 128, nested=nested)
    found = dequantize_nf4(packed, absmax, scales, [300, 128], 64, 0, dtype)
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "blocksize"), [((3, 5 * 2), 64), ((7, 96), 64), ((4, 64), 32), ((2, 256), 128)])
def test_any_shape_and_block(nested: bool, shape: tuple[int, int], blocksize: int) -> None:
    """Weights equal bitsandbytes' where the last block is not full, where rows are no whole blocks, and for other
    block sizes."""
    packed, absmax, scales, expected = quantised(*shape, nested=nested, blocksize=blocksize)
    found = dequantize_nf4(packed, absmax, scales, list(shape), blocksize, 0, torch.float32)
    assert torch.equal(found, expected)


def test_a_piece_of_the_rows() -> None:
    """The last rows equal a slice of the whole, although their scales begin within a group of scales."""
    packed, absmax, scales, expected = quantised(300, 128, nested=True)
    rows, blocks = 40, 40 * 2
    found = dequantize_nf4(packed[-rows * 64 :], absmax[-blocks:], scales, [rows, 128], 64, 520, torch.float32)
    assert torch.equal(found, expected[-rows:])


@pytest.mark.parametrize("nested", [False, True])
def test_opcheck(nested: bool) -> None:
    """Torch's checks of schema and fake tensors pass."""
    packed, absmax, scales, _ = quantised(4, 64, nested=nested)
    arguments = (packed, absmax, scales, [4, 64], 64, 0, torch.bfloat16)
    torch.library.opcheck(dequantize_nf4, arguments, test_utils=("test_schema", "test_faketensor"))
