"""Memory that contexts, communicators and workspaces take from a device."""

import pytest

from cost_models.constants import load
from cost_models.device import device
from cost_models.errors import UnknownHardwareError
from cost_models.memory import (
    communicator_bytes,
    context_bytes,
    room_bytes,
    workspace_bytes,
)
from cost_models.units import KIB, MIB


def test_communicators_hold_a_buffer_of_each_protocol():
    """For each channel and connection, a communicator holds 4 MiB for protocol Simple, 512 KiB for LL and 4.7 MiB
    for LL128."""
    nccl = load("software", "nccl")
    pairs = nccl.number("channels", "1") * nccl.number("connections", "1")
    assert communicator_bytes(1) == pairs * (4 * MIB + 512 * KIB + 120 * 640 * 8 * 8)
    assert communicator_bytes(3) == 3 * communicator_bytes(1)
    assert communicator_bytes(0) == 0


def test_room_is_what_a_device_has_less_what_lies_beside() -> None:
    """An H100 has less room with more axes, and keeps a share for fragmentation. A CPU has its file's memory."""
    h100, cpu = device("h100_sxm"), device("cpu_laptop")
    beside = context_bytes() + communicator_bytes(6) + workspace_bytes()
    assert room_bytes(h100, 3) == int((h100.memory_bytes - beside) / 1.07)
    assert room_bytes(h100, 0) > room_bytes(h100, 1) > room_bytes(h100, 3) > 0.85 * h100.memory_bytes
    assert room_bytes(cpu, 3) == cpu.memory_bytes


def test_unknown_software_says_how_to_add_it():
    """Unknown software is refused with the file to add."""
    with pytest.raises(UnknownHardwareError, match=r"data/software/tpu_runtime\.toml"):
        load("software", "tpu_runtime")
