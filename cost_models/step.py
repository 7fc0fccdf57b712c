"""Kernels and collectives in a training step of several GPUs, beside what they take in benchmarks of their own.

Kernels are slower there (clocks under sustained power; collectives take processors and bandwidth), and so are
collectives between nodes: they start when the last rank does, and groups share links. Collectives within a node follow
each other on channels that are filled already, so their bandwidth does not ramp up again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from cost_models import constants


@dataclass(frozen=True, slots=True)
class InStep:
    """Factors on times of a benchmark.

    Args:
        kernels: of all kernels, whatever bounds them.
        network: of collectives between nodes.
        ramp: of the time in which the bandwidth of collectives within a node ramps up.
    """

    kernels: float = 1.0
    network: float = 1.0
    ramp: float = 1.0


ALONE = InStep()
"""One GPU, and CPUs: their times are measured in steps, or as they run there."""


@lru_cache(maxsize=1)
def in_step() -> InStep:
    """The factors of groups of GPUs, fitted to published runs (`data/runtime/step.toml`)."""
    file = constants.load("runtime", "step")
    return InStep(**{item.name: file.number(item.name, "1") for item in fields(InStep)})
