"""Intervals around predictions, from the errors of past predictions (fitted by `tests/benchmarks/uncertainty.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from cost_models import constants


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """The error of predictions of one kind: a factor of at most exp(log_half_width), in a share `coverage` of cases."""

    log_half_width: float
    coverage: float

    def interval(self, predicted: float) -> tuple[float, float]:
        """Return the lower and the upper end of the interval around a prediction, in the prediction's unit.

        Example:
            >>> low, high = Uncertainty(log_half_width=0.1, coverage=0.9).interval(2.0)
            >>> round(low, 2), round(high, 2)
            (1.81, 2.21)
        """
        factor = exp(self.log_half_width)
        return predicted / factor, predicted * factor


RECIPES, EIGHT_BITS, KERNELS, MEASURED = "gpu", "gpu_f8", "gpu_kernels", "cpu"
"""Kinds of predicted step times.

* `RECIPES`: recipes with products in 16 bits or more. A fitted model of the step weighs the parts of the prediction.
* `EIGHT_BITS`: recipes with products in 8 bits, predicted like `RECIPES`.
* `KERNELS`: searched plans on GPUs. Kernels and collectives are priced as if they ran alone.
* `MEASURED`: searched plans on a machine that was calibrated.
"""


def step_time_uncertainty(kind: str) -> Uncertainty | None:
    """Return the uncertainty of predicted step times of `kind`, from past errors, or None without past predictions.

    The file `data/runtime/step_time.toml` has two tables for a kind such as "gpu". `[gpu.log_half_width]` is the
    logarithm of the interval's factor, and `[gpu.coverage]` the share of past steps within the interval.
    """
    if "step_time" not in constants.names("runtime"):
        return None
    file = constants.load("runtime", "step_time")
    if f"{kind}.log_half_width" not in file.constants:
        return None
    return Uncertainty(file.number(f"{kind}.log_half_width", "1"), file.number(f"{kind}.coverage", "1"))
