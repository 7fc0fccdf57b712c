"""Time that a run loses to checkpoints and failures, and the interval between checkpoints that loses least.

Failures come at random at a constant rate (a Poisson process with mean time `mtbf_s`). Training waits during a save. A
failure costs the restart, and the work since the last complete checkpoint. Source: Daly 2006, A higher order estimate
of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22, equations 20 and 37. The
first term is the result of Young 1974, Communications of the ACM 17, 530-531.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cost_models import constants
from cost_models.errors import CostArgumentError

_LARGEST_EXPONENT = 700.0
"""The largest exponent in `expected_time`, near the limit of floats. A run with a larger exponent never ends."""


@dataclass(frozen=True, slots=True)
class RestartFigures:
    """Usual figures of restarts: bytes that each device writes to storage per second, and seconds of a restart."""

    write_bytes_per_s: float
    restart_s: float


@lru_cache(maxsize=1)
def restart_figures() -> RestartFigures:
    """Return the figures of published runs (`data/runtime/restarts.toml`)."""
    file = constants.load("runtime", "restarts")
    return RestartFigures(file.number("write_bytes_per_s", "B/s"), file.number("restart_s", "s"))


def checkpoint_interval(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves for which the expected run is shortest.

    With the save `d` and the mean time `M` between failures, and `x = d / (2 M)`, the interval is
    `sqrt(2 d M) (1 + sqrt(x) / 3 + x / 9) - d` for `d < 2 M`, and `M` otherwise. It is infinite without failures.

    Args:
        save_s: seconds that training waits for a save, above 0.
        mtbf_s: mean seconds between failures of the run, above 0; `math.inf` for no failures.

    Raises:
        CostArgumentError: an argument is not above 0.

    Example:
        >>> round(checkpoint_interval(5 * 60, 24 * 3600) / 60)
        117
    """
    _check(save_s=save_s, mtbf_s=mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def expected_time(work_s: float, *, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected seconds of a run: work, saves, restarts, and work that is done again.

    With the work `T`, the interval `t`, the save `d`, the restart `R` and the mean time `M` between failures, the run
    takes `(T / t) M exp(R / M) (exp((t + d) / M) - 1)`. Without failures, it takes `T + (T / t) d`.

    Args:
        work_s: seconds of the steps alone.
        interval_s: seconds of work between two saves.
        save_s: seconds that training waits for a save.
        restart_s: seconds from a failure to the first new step; may be 0.
        mtbf_s: see `checkpoint_interval`.

    Returns:
        Seconds; infinite where failures come so fast that a float cannot hold the time.

    Raises:
        CostArgumentError: an argument is not above 0, or `restart_s` is below 0 or infinite.

    Example:
        >>> expected_time(100.0, interval_s=10.0, save_s=1.0, restart_s=5.0, mtbf_s=math.inf)
        110.0
    """
    _check(work_s=work_s, interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s)
    if not 0 <= restart_s < math.inf:
        raise CostArgumentError(f"restart_s={restart_s!r} must be a number of seconds, at least 0.")
    segments = work_s / interval_s
    if math.isinf(mtbf_s):
        return work_s + segments * save_s
    if (restart_s + interval_s + save_s) / mtbf_s > _LARGEST_EXPONENT:
        return math.inf
    return segments * mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)


def _check(**seconds: float) -> None:
    for name, value in seconds.items():
        if not value > 0:
            raise CostArgumentError(f"{name}={value!r} must be a number of seconds above 0.")
