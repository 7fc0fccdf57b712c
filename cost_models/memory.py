"""Bytes of device memory that a run needs beside the program's values, and the memory that is left for values.

The table lists the classes of a run's memory, and marks the measurements that include them with x.

| class | torch.cuda.max_memory_allocated | max_memory_reserved | nvidia-smi |
|---|---|---|---|
| parameters, gradients, optimizer state, activations, buffers of collectives: values of the program | x | x | x |
| workspace of the matrix library (`workspace_bytes`) | x | x | x |
| rounding to blocks of 512 B | x | x | x |
| free parts of the allocator's segments (`fragmentation`) | | x | x |
| NCCL's buffers (`communicator_bytes`), the CUDA context (`context_bytes`) | | | x |
"""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.constants import load
from cost_models.device import Device

# Values that an optimizer keeps per element of a parameter (torch.optim and others). `step` is one float32 scalar.
MOMENTS: Mapping[str, int] = {
    "sgd": 0,
    "sgd_momentum": 1,
    "adam": 2,
    "adamw": 2,
    "adam_amsgrad": 3,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "adadelta": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "rprop": 2,
    "lion": 1,
    "muon": 1,
}


def workspace_bytes() -> int:
    """Bytes of cuBLAS workspaces that PyTorch takes from its allocator, for two threads: forward and autograd.

    The bytes are those of NVIDIA's Hopper, the most of any architecture.
    """
    file = load("software", "torch_cublas")
    return int(file.number("workspace.hopper", "B") * file.number("handles.training", "1"))


def communicator_bytes(communicators: int) -> int:
    """Bytes of NCCL's buffers: for each communicator, channel and receiving connection, one buffer of each protocol.

        communicators * channels * connections * (Simple 4 MiB + LL 0.5 MiB + LL128 4.7 MiB)

    Communicators of one rank have no buffers. The channels and connections are those of eight devices behind NVSwitch.
    """
    file = load("software", "nccl")
    buffers = sum(file.family("buffer", "B").values())
    return int(communicators * file.number("channels", "1") * file.number("connections", "1") * buffers)


def context_bytes() -> int:
    """Bytes of one process's CUDA context, with the kernels that a training step loads."""
    return int(load("software", "cuda_context").number("context", "B"))


def room_bytes(device: Device, axes: int) -> int:
    """Bytes that a plan's values may take on a device, if the user gives no memory limit.

        (memory - context - communicators - cuBLAS workspaces) / fragmentation

    On a CPU, values may take all memory of `Device`. On a GPU each of the mesh's `axes` axes larger than one has two
    communicators: one for values, one for gradients or parameters. Fragmentation is the allocator's memory over the
    memory of its tensors.
    """
    if not device.dispatch_s:
        return device.memory_bytes
    beside = context_bytes() + communicator_bytes(2 * axes) + workspace_bytes()
    fragmentation = load("software", "torch_cuda_allocator").number("fragmentation", "1")
    return max(0, int((device.memory_bytes - beside) / fragmentation))
