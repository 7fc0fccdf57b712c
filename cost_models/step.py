"""Slowdown of kernels and collectives in a training step of several GPUs, compared with separate benchmarks.

Kernels are slower there (clocks under sustained power; collectives take processors and bandwidth). So are collectives
between nodes, which start with the last rank, and whose groups share links. Collectives within a node follow each other
on filled channels, so their bandwidth does not ramp up a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from cost_models import constants


@dataclass(frozen=True, slots=True)
class InStep:
    """Factors on times of a benchmark.

    Args:
        kernels: factor of all kernels.
        network: factor of collectives between nodes.
        ramp: factor of the time in which the bandwidth of collectives within a node ramps up.
    """

    kernels: float = 1.0
    network: float = 1.0
    ramp: float = 1.0


ALONE = InStep()
"""One GPU, and CPUs: their times are measured in steps, or are equal in steps."""


@lru_cache(maxsize=1)
def in_step() -> InStep:
    """The factors of groups of GPUs, fitted to published runs (`data/runtime/step.toml`)."""
    file = constants.load("runtime", "step")
    return InStep(**{item.name: file.number(item.name, "1") for item in fields(InStep)})
