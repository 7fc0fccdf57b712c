"""Intervals of predictions, from the errors of past predictions.

Split conformal prediction (Papadopoulos et al. 2002; Vovk, Gammerman, Shafer 2005) uses n past errors r_i =
|log(predicted / measured)|, which are exchangeable with the next error. The k-th smallest error, k = ceil((n + 1) *
coverage), bounds the next error with probability `coverage` or more, under any distribution. The interval is relative:

    [predicted * exp(-w), predicted * exp(w)],   w = r_(k)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite

from cost_models import constants
from cost_models.errors import CostArgumentError
from cost_models.intervals import Uncertainty


def conformal(log_errors: Sequence[float], coverage: float = 0.9) -> Uncertainty:
    """Return the uncertainty of past errors.

    Args:
        log_errors: log(predicted / measured) of predictions whose measurements played no part in the fit.
        coverage: probability with which the interval shall hold the measurement.

    Raises:
        CostArgumentError: too few errors for the coverage (0.9 needs 9), an infinite error, or a coverage that is no
            probability.
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


def keep_step_time_uncertainty(kind: str, uncertainty: Uncertainty, source: str, date: str) -> None:
    """Write the uncertainty of a kind of prediction to its data file, beside the other kinds.

    Args:
        kind: a key of `RECIPES`.
        uncertainty: the uncertainty of past errors.
        source: the errors and their measurement.
        date: ISO date.
    """
    known = dict(constants.load("runtime", "step_time").constants) if "step_time" in constants.names("runtime") else {}
    known[f"{kind}.log_half_width"] = constants.Constant(round(uncertainty.log_half_width, 4), "1", source, date)
    known[f"{kind}.coverage"] = constants.Constant(uncertainty.coverage, "1", source, date)
    path = constants.DATA / "runtime" / "step_time.toml"
    path.write_text(constants.dump({"name": "step_time"}, known), encoding="utf-8")
