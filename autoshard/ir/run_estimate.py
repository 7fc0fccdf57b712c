"""Length of a whole training run on a cluster that fails now and then: the answer of `Plan.run`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.errors import NotAvailableError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_parts import ParameterPlan, Prediction
from autoshard.ir.show import text_of
from cost_models.restarts import checkpoint_interval, expected_time, restart_figures

_HOUR_S, _DAY_S = 3600.0, 86400.0
_LONGEST = 100.0
"""`estimate_run` raises an error if a run takes more than this many times its steps and saves.

Such a run makes hardly any progress.
"""


_MOST_STEPS = 10**12
"""The most steps of an estimated run."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Answer of `Plan.run`: length and cost of a run, and the distance of checkpoints that loses least time.

    Args:
        hardware: name of the cluster that priced the plan.
        devices: number of devices of the run.
        steps: number of steps.
        tokens: number of tokens; None if the inputs of the plan are no tokens.
        step_time_s: predicted seconds of a step.
        mtbf_hours: mean hours between failures that stop the run; infinite without failures.
        days: expected days of the run: steps, checkpoints, restarts, and steps that are done again.
        device_hours: expected hours of all devices together.
        checkpoint_bytes: bytes of a checkpoint.
        save_s: seconds that training waits for a save.
        restart_s: seconds from a failure to the first new step.
        checkpoint_every: number of steps between two checkpoints, for `Checkpoints(every=)`.
        failures: expected number of failures.
        lost_to_checkpoints: share of the run that is spent on saves.
        lost_to_failures: share of the run that is spent on restarts and on steps that are done again.
    """

    hardware: str
    devices: int
    steps: int
    tokens: float | None
    step_time_s: float
    mtbf_hours: float
    days: float
    device_hours: float
    checkpoint_bytes: int
    save_s: float
    restart_s: float
    checkpoint_every: int
    failures: float
    lost_to_checkpoints: float
    lost_to_failures: float

    @property
    def days_of_steps(self) -> float:
        """Days of the steps alone, on a cluster without failures and checkpoints."""
        return self.steps * self.step_time_s / _DAY_S

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON data, with null for an infinite `mtbf_hours`."""
        return {**asdict(self), "mtbf_hours": None if math.isinf(self.mtbf_hours) else self.mtbf_hours}

    def __str__(self) -> str:
        return text_of(self)


def steps_of(predicted: Prediction, tokens: float | None, steps: int | None) -> tuple[int, float | None]:
    """Return the number of steps of a run, and its number of tokens, which is None if the inputs are no tokens.

    Raises `NotAvailableError` unless exactly one of `tokens` and `steps` is given, or if the value is out of range.
    """
    if (tokens is None) == (steps is None):
        raise NotAvailableError(f"run(tokens={tokens!r}, steps={steps!r}): pass one of tokens= and steps=.")
    of_a_step = None if predicted.tokens_per_s is None else round(predicted.tokens_per_s * predicted.step_time_s)
    if steps is not None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise NotAvailableError(f"steps={steps!r} must be a whole number, at least 1.")
        if steps > _MOST_STEPS:
            raise NotAvailableError(f"steps= is above {_MOST_STEPS:,}, more than any run takes.")
        return steps, None if of_a_step is None else float(steps * of_a_step)
    check_above("tokens", tokens, "tokens")
    if not of_a_step:
        raise NotAvailableError(
            f"run(tokens={tokens!r}): the plan does not count tokens, because its model has no input of integers. "
            "Pass steps=."
        )
    assert tokens is not None, "one of both is given"
    return math.ceil(tokens / of_a_step), float(tokens)


def bytes_of_checkpoint(
    parameters: Mapping[str, ParameterPlan], mesh: Mesh, given: int | None, *, updates: bool
) -> int:
    """Return `given`. If `given` is None, return the bytes of all parameters and optimizer states, each counted once.

    Each tensor of state counts as much as its parameter. `updates` tells whether the plan has an optimizer. Raises
    `NotAvailableError` if `given` is None and the plan has no optimizer.
    """
    if given is not None:
        check_above("checkpoint_bytes", given, "bytes")
        return int(given)
    if not updates:
        raise NotAvailableError(
            "run() knows no size of checkpoints, because this plan lists no optimizer state. Pass optimizer= to "
            "autoshard.plan, or checkpoint_bytes= here."
        )
    total = 0
    for item in parameters.values():
        local = max(math.prod(item.spec.local_shape(item.shape, mesh)), 1)
        total += item.local_bytes * math.prod(item.shape) // local * (1 + len(item.state))
    return total


def estimate_run(
    predicted: Prediction,
    hardware: str,
    devices: int,
    steps: int,
    tokens: float | None,
    checkpoint_bytes: int,
    *,
    mtbf_hours: float,
    save_s: float | None,
    restart_s: float | None,
) -> RunEstimate:
    """Return the estimate of a run of `steps` steps. The keyword arguments are those of `Plan.run`."""
    check_above("mtbf_hours", mtbf_hours, "hours", may_be_infinite=True)
    figures, step_s, mtbf_s = restart_figures(), predicted.step_time_s, mtbf_hours * _HOUR_S
    save_s = checkpoint_bytes / (figures.write_bytes_per_s * devices) if save_s is None else save_s
    restart_s = figures.restart_s if restart_s is None else restart_s
    check_above("save_s", save_s, "seconds")
    check_above("restart_s", restart_s, "seconds")
    every = round(min(max(checkpoint_interval(save_s, mtbf_s) / step_s, 1), steps))
    work_s, saves_s = steps * step_s, steps / every * save_s
    run_s = expected_time(work_s, interval_s=every * step_s, save_s=save_s, restart_s=restart_s, mtbf_s=mtbf_s)
    if run_s > _LONGEST * (work_s + saves_s):
        raise NotAvailableError(
            f"run(mtbf_hours={mtbf_hours!r}): a save takes {save_s:.0f} s and a restart {restart_s:.0f} s, so the run "
            f"would take more than {_LONGEST:.0f} times its steps and saves. Give a smaller save_s or restart_s."
        )
    return RunEstimate(
        hardware=hardware,
        devices=devices,
        steps=steps,
        tokens=tokens,
        step_time_s=step_s,
        mtbf_hours=mtbf_hours,
        days=run_s / _DAY_S,
        device_hours=run_s / _HOUR_S * devices,
        checkpoint_bytes=checkpoint_bytes,
        save_s=save_s,
        restart_s=restart_s,
        checkpoint_every=every,
        failures=run_s / mtbf_s,
        lost_to_checkpoints=saves_s / run_s,
        lost_to_failures=max(run_s - work_s - saves_s, 0.0) / run_s,
    )


def check_above(name: str, value: object, unit: str, *, may_be_infinite: bool = False) -> None:
    """Raise `NotAvailableError` unless `value` is a number above 0. Infinity is refused unless `may_be_infinite`."""
    largest = math.inf if may_be_infinite else sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
        raise NotAvailableError(f"{name}={value!r} must be a number of {unit} above 0.")
