"""Intervals of predictions, from the errors of past predictions (fitted by `tests/benchmarks/uncertainty.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from cost_models import constants


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How far predictions of one kind are off: by a factor of exp(log_half_width) at most, in `coverage` of cases."""

    log_half_width: float
    coverage: float

    def interval(self, predicted: float) -> tuple[float, float]:
        """The interval of a prediction, in its unit.

        Example:
            >>> low, high = Uncertainty(log_half_width=0.1, coverage=0.9).interval(2.0)
            >>> round(low, 2), round(high, 2)
            (1.81, 2.21)
        """
        factor = exp(self.log_half_width)
        return predicted / factor, predicted * factor


RECIPES, EIGHT_BITS, KERNELS, MEASURED = "gpu", "gpu_f8", "gpu_kernels", "cpu"
"""Kinds of predicted step times. For recipes (products in 16 bits or more, or in 8) the fitted step model weighs the
parts. For searched plans on GPUs, kernels and collectives are priced as if alone. The last kind are searched plans on a
calibrated machine.
"""


def step_time_uncertainty(kind: str) -> Uncertainty | None:
    """The uncertainty that past errors of a kind of prediction support; None without past predictions.

    The numbers are in `data/runtime/step_time.toml`: `[gpu.log_half_width]` and `[gpu.coverage]`, unit "1".
    """
    if "step_time" not in constants.names("runtime"):
        return None
    file = constants.load("runtime", "step_time")
    if f"{kind}.log_half_width" not in file.constants:
        return None
    return Uncertainty(file.number(f"{kind}.log_half_width", "1"), file.number(f"{kind}.coverage", "1"))
