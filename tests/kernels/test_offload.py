"""Transfers between a device and the host, of `autoshard/kernels/offload.py`."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from autoshard.kernels.offload import TRANSFERS, from_host, to_host


@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.randn(4, 3).T, torch.arange(5), torch.tensor(1.5).bfloat16()])
def test_a_value_comes_back_as_it_went(x):
    """A tensor that goes to the host and back is equal bit for bit, with the same strides and in its own memory."""
    back = from_host(to_host(x))
    assert torch.equal(back, x)
    assert back.stride() == x.stride()
    assert back.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("operator", TRANSFERS)
def test_operators_are_well_defined(operator):
    """Torch's checks of schema and fake tensors pass, and a fake result keeps the strides of a transposed tensor."""
    torch.library.opcheck(operator, (torch.randn(3, 4),), test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode() as mode:
        fake = operator(mode.from_tensor(torch.randn(4, 3).T))
    assert (tuple(fake.shape), fake.stride()) == ((3, 4), (1, 3))


@pytest.mark.gpu
def test_on_a_gpu_the_host_holds_it():
    """A CUDA tensor is sent to pinned memory of the host, and comes back equal."""
    x = torch.randn(1000, device="cuda")
    host = to_host(x)
    assert host.device.type == "cpu"
    assert host.is_pinned()
    assert torch.equal(from_host(host), x)
