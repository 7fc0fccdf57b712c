"""Measured block sizes: `triton.autotune` chooses among a heuristic's neighbours, once per class of launches.

Tuning is off by default; `tune_kernels` or the variable AUTOSHARD_TUNE turn it on. It needs a GPU: a kernel in Triton's
interpreter is only tuned with a given timer. Measurements are kept in a folder (`tuning_store.py`), from which later
processes read them.

*Results.* Every candidate computes the same function; sums over other blocks may differ in the last place. A kernel
runs many times while it is measured, so the tensors that it reads and writes are saved before and restored after. A
kernel whose copies would exceed 256 MiB keeps the heuristic's choice. So does a kernel that is first launched while a
CUDA graph is captured, until it is launched outside of a capture.

*Ranks.* Ranks that compute the same values (replicas of a norm, say) must get equal bits, and therefore use one choice.
They launch a kernel with the same key, and the folder holds one choice per key, that of the first rank to publish. A
rank uses only published choices. Ranks launch kernels at different times, so they do not communicate about choices.
Instead, before a program runs, they compare whether they tune, and in which folder (`folder_identity`). Damaged files
and full disks during the run are not covered.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import torch
import triton
from torch import Tensor

from autoshard.kernels.candidates import Choice, neighbours
from autoshard.kernels.tuning_store import Key, Store
from autoshard.kernels.tuning_switch import VARIABLE, Timer, Tuning

_LOGGER = logging.getLogger(__name__)

_MAX_COPIED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel whose block sizes and warps are still to be chosen.

    Args:
        kernel: the `@triton.jit` function.
        grid: maps all arguments by name, including block sizes, to the number of programs.
        device: the device of the tensors; the caller has made it the current device.
        arguments: the arguments that are not `constexpr`, in order.
        constants: the `constexpr` arguments that do not vary.
        follow: computes the arguments that follow from the block sizes.
        changes: the tensors that the kernel reads and writes.
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
        """Launch the kernel with a choice."""
        options = {"num_warps": choice.num_warps, "enable_fp_fusion": True}
        self.kernel[self.grid](*self.arguments, **self.constants, **self.blocks(choice), **options)

    def blocks(self, choice: Choice) -> dict[str, int]:
        """A choice's block sizes, and the arguments that follow from them."""
        return dict(choice.blocks) | dict(self.follow(dict(choice.blocks)))


@dataclass(slots=True)
class Tuner:
    """Chooses for launches, and remembers the choices.

    Args:
        store: the choices that processes share.
        timer: measures in place of `triton.testing.do_bench`; it also tunes interpreted kernels.
    """

    store: Store
    timer: Timer | None = None
    _known: dict[tuple[object, ...], Choice] = field(default_factory=dict)
    _lock: Any = field(default_factory=Lock)
    _measures: bool = True

    def choose(self, launch: Launch, heuristic: Choice) -> Choice:
        """The choice for a launch: a known choice, or else one measured now, or else the heuristic's."""
        if launch.is_interpreted and self.timer is None:
            return heuristic
        arguments = tuple(_class_of(argument) for argument in launch.arguments)
        short = (launch.kernel, launch.device, heuristic, arguments, *launch.constants.items())
        if short in self._known:
            return self._known[short]
        with self._lock:  # autograd runs the backward in other threads
            key = _key(launch, heuristic, arguments)
            choice = self.store.read(key)
            if choice is None:
                if _is_capturing(launch.device):
                    return heuristic
                choice = self._measure(launch, key) or heuristic
        self._known[short] = choice
        return choice

    def _measure(self, launch: Launch, key: Key) -> Choice | None:
        """Measure, and return the published choice; None if measuring or publishing is impossible."""
        copied = sum(tensor.numel() * tensor.element_size() for tensor in launch.changes)
        if not self._measures or copied > _MAX_COPIED_BYTES or len(key.candidates) == 1:
            return None
        with _restored(launch.changes):
            times_ms = measure(launch, key.candidates, self.timer)
        choice = min(times_ms, key=times_ms.__getitem__)
        try:
            return self.store.publish(key, choice, times_ms)
        except OSError as error:
            self._measures = False
            _LOGGER.warning(
                "Measured block sizes cannot be kept in %s (%s): kernels without a known choice run with the "
                "heuristic's. Free disk space, or set another folder in %s.", self.store.folder, error, VARIABLE,
            )  # fmt: skip
            return None


def measure(launch: Launch, candidates: Sequence[Choice], timer: Timer | None) -> dict[Choice, float]:
    """Every candidate's median time in milliseconds, by `triton.autotune`; infinite above the device's limits."""
    configs = {
        triton.Config(launch.blocks(choice), choice.num_warps, None): choice  # type: ignore[arg-type]
        for choice in candidates
    }
    names = launch.kernel.arg_names
    sizes = [name for name, value in zip(names, launch.arguments, strict=False) if isinstance(value, int)]
    tuner = triton.autotune(list(configs), key=sizes, do_bench=timer)(launch.kernel)
    tuner[launch.grid](*launch.arguments, **launch.constants, enable_fp_fusion=True)
    return {configs[config]: times[0] for config, times in tuner.configs_timings.items()}


@cache
def tuner_of(tuning: Tuning) -> Tuner:
    """The tuner for the setting `tuning`; the same each time."""
    return Tuner(tuning.store, tuning.timer)


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
    """A tensor's dtype, or an integer's next power of two and whether 16 divides it, so that 16 bytes load at once."""
    if isinstance(argument, Tensor):
        return str(argument.dtype)
    if isinstance(argument, int):
        return f"{1 << max(0, argument - 1).bit_length()}{'' if argument % 16 else ', a multiple of 16'}"
    return type(argument).__name__


@cache
def _source_digest(kernel: Any) -> str:
    """A digest of a kernel's source and the functions it calls; for an interpreted kernel, only of its own source."""
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
    """Within the context, tensors may change; afterwards they have their old values."""
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
