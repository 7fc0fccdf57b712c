"""Tunes block sizes and warps of Triton kernels: measures candidates with `triton.autotune`, and uses the fastest.

A kernel is measured once for each key, such as the dtypes and rounded sizes of its arguments. Tuning is off by default.
`tune_kernels` or the variable AUTOSHARD_TUNE turn it on. It needs a GPU. Later processes read the measurements from a
folder (`tuning_store.py`).

*Results.* Every candidate computes the same function. Sums over other blocks may differ in the last place. A kernel
runs many times while it is measured, so the tensors that it both reads and writes are saved before and restored after.
A kernel keeps the default if these copies would exceed 256 MiB, or during the capture of a CUDA graph.

*Ranks.* Ranks that compute the same values (replicas of a norm, say) must get equal bits, and therefore use the same
configuration. The folder has one choice for each key, from the first rank that published a choice, and a rank uses only
published choices. Before a program runs, ranks compare whether they tune, and in which folder (`folder_identity`).
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from autoshard.kernels.candidates import Choice, neighbours
from autoshard.kernels.tuning_store import Key
from autoshard.kernels.tuning_switch import VARIABLE, Timer, Tuning

_LOGGER = logging.getLogger(__name__)

_MAX_COPIED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel whose block sizes and warps are not yet chosen.

    Args:
        kernel: the `@triton.jit` function.
        grid: maps all arguments by name, including block sizes, to the number of programs along each axis of the grid.
        device: the device of the tensors. The caller has made it the current device.
        arguments: the arguments that are not `constexpr`, in order.
        constants: the `constexpr` arguments that tuning keeps.
        follow: maps the block sizes to further `constexpr` arguments that depend on them.
        changes: the tensors that the kernel both reads and writes.
    """

    kernel: Any
    grid: Callable[[Mapping[str, Any]], tuple[int, ...]]
    device: torch.device
    arguments: tuple[object, ...]
    constants: Mapping[str, object]
    follow: Callable[[Mapping[str, int]], Mapping[str, int]]
    changes: Sequence[Tensor] = ()

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernel was loaded for Triton's interpreter."""
        return not isinstance(self.kernel, triton.JITFunction)

    def run(self, choice: Choice) -> None:
        """Launch the kernel with the block sizes and warps of `choice`."""
        options = {"num_warps": choice.num_warps, "enable_fp_fusion": True}
        self.kernel[self.grid](*self.arguments, **self.constants, **self.blocks(choice), **options)

    def blocks(self, choice: Choice) -> dict[str, int]:
        """Return the block sizes of `choice`, and the `constexpr` arguments that depend on them, by name."""
        return dict(choice.blocks) | dict(self.follow(dict(choice.blocks)))


def choose(tuning: Tuning, launch: Launch, heuristic: Choice) -> Choice:
    """Return block sizes and warps for a launch: known already, read from the store, or measured.

    If no measurement is possible, return the default `heuristic`. All choices are remembered, but not a default that is
    returned during the capture of a CUDA graph.
    """
    if launch.is_interpreted and tuning.timer is None:
        return heuristic
    arguments = tuple(_class_of(argument) for argument in launch.arguments)
    short = (launch.kernel, launch.device, heuristic, arguments, *launch.constants.items())
    if short in tuning.known:
        return tuning.known[short]
    with tuning.lock:
        key = _key(launch, heuristic, arguments)
        choice = tuning.store.read(key)
        if choice is None:
            if _is_capturing(launch.device):
                return heuristic
            choice = _measured(tuning, launch, key) or heuristic
    tuning.known[short] = choice
    return choice


def _measured(tuning: Tuning, launch: Launch, key: Key) -> Choice | None:
    """Measure all candidates, publish the fastest in the store, and return the store's choice.

    Return None if the launch cannot be measured, or if the store cannot be written. After the latter, log a warning and
    measure no other launch.
    """
    copied = sum(tensor.numel() * tensor.element_size() for tensor in launch.changes)
    if not tuning.measures or copied > _MAX_COPIED_BYTES or len(key.candidates) == 1:
        return None
    with _restored(launch.changes):
        times_ms = measure(launch, key.candidates, tuning.timer)
    choice = min(times_ms, key=times_ms.__getitem__)
    try:
        return tuning.store.publish(key, choice, times_ms)
    except OSError as error:
        tuning.measures = False
        _LOGGER.warning(
            "Measured block sizes cannot be kept in %s (%s): kernels without a known choice run with the "
            "heuristic's. Free disk space, or set another folder in %s.", tuning.store.folder, error, VARIABLE,
        )  # fmt: skip
        return None


def measure(launch: Launch, candidates: Sequence[Choice], timer: Timer | None) -> dict[Choice, float]:
    """Return the median time of each candidate in milliseconds, infinite for a candidate that the device cannot run."""
    configs = {
        triton.Config(launch.blocks(choice), choice.num_warps, None): choice  # type: ignore[arg-type]
        for choice in candidates
    }
    names = launch.kernel.arg_names
    sizes = [name for name, value in zip(names, launch.arguments, strict=False) if isinstance(value, int)]
    tuner = triton.autotune(list(configs), key=sizes, do_bench=timer)(launch.kernel)
    tuner[launch.grid](*launch.arguments, **launch.constants, enable_fp_fusion=True)
    return {configs[config]: times[0] for config, times in tuner.configs_timings.items()}


def _key(launch: Launch, heuristic: Choice, arguments: Sequence[str]) -> Key:
    facts = {
        "source": _source_digest(launch.kernel),
        "triton": triton.__version__,
        "device": _device_name(launch.device),
        "arguments": dict(zip(launch.kernel.arg_names, arguments, strict=False)),
        "constants": {name: str(value) for name, value in launch.constants.items()},
    }
    return Key(launch.kernel.fn.__name__, facts, neighbours(heuristic, launch.constants))


def _class_of(argument: object) -> str:
    """Return a text that is equal for arguments which share one measurement.

    The text has a tensor's dtype. For an integer, it has the next power of two, and says whether 16 divides the
    integer. Triton compiles multiples of 16 to wider loads.
    """
    if isinstance(argument, Tensor):
        return str(argument.dtype)
    if isinstance(argument, int):
        return f"{1 << max(0, argument - 1).bit_length()}{'' if argument % 16 else ', a multiple of 16'}"
    return type(argument).__name__


@cache
def _source_digest(kernel: Any) -> str:
    """Return a digest of a kernel's source. Unless the kernel is interpreted, called functions are included."""
    if isinstance(kernel, triton.JITFunction):
        return kernel.cache_key
    return hashlib.sha256(inspect.getsource(kernel.fn).encode()).hexdigest()


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def _restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
