"""The clock of matrix products inside a step, from what else the step does.

A device that multiplies without a break runs into its power limit, which holds the clock below what it could be: that
is the rate that benchmarks of products show, and the files of devices hold. In a step, products take turns with kernels
bound by memory, collectives and waiting, which draw less. The limit holds for the mean over many kernels (about a
second), so products may run faster then:

    duty * speed**exponent + (1 - duty) * other_share = 1,     1 <= speed <= headroom

with `duty` the part of the time in which products run, and power in units of the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models import constants
from cost_models.errors import CostArgumentError

_NEVER = 1e-12
"""The least duty that counts: the clock is the highest far above it."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """How a device's clock follows its power.

    Args:
        headroom: highest clock over that of products without a break.
        other_share: power beside products, over the limit.
        exponent: power grows as the clock to this.
    """

    headroom: float
    other_share: float
    exponent: float

    def speed(self, duty: float) -> float:
        """How much faster products run in a step than alone, `duty` of whose time they take.

        Example:
            >>> limit = PowerLimit(headroom=1.12, other_share=0.5, exponent=2.5)
            >>> limit.speed(1.0), round(limit.speed(0.8), 3), limit.speed(0.1)
            (1.0, 1.048, 1.12)

        Raises:
            CostArgumentError: a duty that is no share.
        """
        if not 0 <= duty <= 1:
            raise CostArgumentError(f"duty={duty!r} is no share of the time between 0 and 1.")
        return float(self.speeds(np.array([duty]))[0])

    def speeds(self, duties: NDArray[np.float64]) -> NDArray[np.float64]:
        """`speed` of many duties, each of 0 to 1."""
        budgets = self.other_share + (1 - self.other_share) / np.maximum(duties, _NEVER)
        return np.minimum(self.headroom, budgets ** (1 / self.exponent))


@lru_cache(maxsize=1)
def power_limit() -> PowerLimit:
    """That of GPUs, from `data/runtime/power.toml`."""
    file = constants.load("runtime", "power")
    return PowerLimit(*(file.number(name, "1") for name in ("headroom", "other_share", "exponent")))
