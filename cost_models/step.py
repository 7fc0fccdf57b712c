"""Slowdown of kernels and collectives in a training step of several GPUs, compared with separate benchmarks.

In a step, kernels are slower, because sustained power lowers clocks, and collectives take processors and bandwidth.
Collectives between nodes are slower too: they start with the last rank, and their groups share links. Collectives
within a node follow each other on filled channels, so their bandwidth does not ramp up a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from cost_models import constants


@dataclass(frozen=True, slots=True)
class InStep:
    """Factors by which kernels, and collectives between nodes, take longer in a step than in a benchmark.

    `ramp` is the factor on the time in which the bandwidth of collectives within a node ramps up.
    """

    kernels: float = 1.0
    network: float = 1.0
    ramp: float = 1.0


ALONE = InStep()
"""All factors are 1, for one GPU and for CPUs. Their times are the same in a step, or were measured in steps."""


@lru_cache(maxsize=1)
def in_step() -> InStep:
    """Return the factors of groups of GPUs, fitted to published runs (`data/runtime/step.toml`)."""
    file = constants.load("runtime", "step")
    return InStep(**{item.name: file.number(item.name, "1") for item in fields(InStep)})
