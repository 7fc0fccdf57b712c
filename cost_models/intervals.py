"""Intervals of predictions, from the errors of past predictions.

Split conformal prediction (Papadopoulos et al. 2002; Vovk, Gammerman, Shafer 2005): with n past errors r_i =
|log(predicted / measured)| that the next one is exchangeable with, the k-th smallest, k = ceil((n + 1) * coverage),
bounds the next with probability `coverage` or more, whatever the distribution. So the interval is relative:

    [predicted * exp(-w), predicted * exp(w)],   w = r_(k)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, isfinite

from cost_models import constants
from cost_models.errors import CostArgumentError


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


def conformal(log_errors: Sequence[float], coverage: float = 0.9) -> Uncertainty:
    """The uncertainty that past errors bear out.

    Args:
        log_errors: log(predicted / measured) of predictions whose measurements played no part in the fit.
        coverage: probability with which the interval shall hold the measurement.

    Raises:
        CostArgumentError: too few errors for the coverage (0.9 needs 9), one that is not finite, or a coverage that is
            no probability.
    """
    if not 0 < coverage < 1:
        raise CostArgumentError(f"coverage={coverage!r} is no probability between 0 and 1.")
    if not all(isfinite(error) for error in log_errors):
        raise CostArgumentError("An error is not finite; is a measurement zero?")
    place = ceil(round((len(log_errors) + 1) * coverage, 9))
    if place > len(log_errors):
        least = ceil(round(coverage / (1 - coverage), 9))
        raise CostArgumentError(f"{len(log_errors)} errors bear out no interval of coverage {coverage}; {least} do.")
    return Uncertainty(sorted(abs(error) for error in log_errors)[place - 1], coverage)


RECIPES, EIGHT_BITS, KERNELS, MEASURED = "gpu", "gpu_f8", "gpu_kernels", "cpu"
"""Kinds of predicted step times: of recipes, whose parts are weighed by the fitted step model, with products in 16 bits
or more, or in 8; of searched plans on GPUs, whose kernels and collectives are priced as alone; of searched plans on a
machine that was calibrated."""


def step_time_uncertainty(kind: str) -> Uncertainty | None:
    """What past errors of a kind of prediction bear out; None where there are none.

    The numbers stand in `data/runtime/step_time.toml`: `[gpu.log_half_width]` and `[gpu.coverage]`, unit "1".
    """
    if "step_time" not in constants.names("runtime"):
        return None
    file = constants.load("runtime", "step_time")
    if f"{kind}.log_half_width" not in file.constants:
        return None
    return Uncertainty(file.number(f"{kind}.log_half_width", "1"), file.number(f"{kind}.coverage", "1"))


def keep_step_time_uncertainty(kind: str, uncertainty: Uncertainty, source: str, date: str) -> None:
    """Write the uncertainty of a kind of prediction to its data file, beside those of other kinds.

    Args:
        kind: see `RECIPES`.
        uncertainty: what past errors bear out.
        source: which errors these are, and what measured them.
        date: ISO date.
    """
    known = dict(constants.load("runtime", "step_time").constants) if "step_time" in constants.names("runtime") else {}
    known[f"{kind}.log_half_width"] = constants.Constant(round(uncertainty.log_half_width, 4), "1", source, date)
    known[f"{kind}.coverage"] = constants.Constant(uncertainty.coverage, "1", source, date)
    path = constants.DATA / "runtime" / "step_time.toml"
    path.write_text(constants.dump({"name": "step_time"}, known), encoding="utf-8")
