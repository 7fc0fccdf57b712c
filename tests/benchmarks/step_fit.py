"""Fit the numbers of `cost_models.step.InStep` to published runs, and report on runs outside of the fit.

The fit is robust least squares in logarithms. Every source has the same weight, and errors beyond `_HUBER` count
linearly. Each number is held to its prior (1 for factors) with strength `_PRIOR`. One linearisation at the optimum of
all sources serves the fits without one source, whose optima are close. Reported predictions are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cost_models.step import InStep

Floats = NDArray[np.float64]
FITTED = ("kernels", "network")
_HUBER = 0.08
_PRIOR = 0.004
_STEP = 0.05
_LARGEST_MOVE = 0.4

Predict = Callable[[int, InStep], float]
"""Seconds of run `index` under a step model."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Measured runs: their sources, their times, and a function that predicts them."""

    sources: Sequence[str]
    measured_s: Sequence[float]
    predict: Predict

    def log_errors(self, model: InStep) -> Floats:
        """log(predicted / measured) of every run."""
        times = enumerate(self.measured_s)
        return np.array([math.log(self.predict(index, model) / measured) for index, measured in times])


def fit_all(runs: Runs, start: InStep, rounds: int = 3) -> tuple[InStep, Floats, Floats]:
    """The model fitted to all runs, the errors there, and their derivatives by the logarithms of the numbers."""
    x = _logarithms(start)
    for _ in range(rounds):
        errors, slopes = _linearise(runs, _model(start, x))
        x = x + _move(errors, slopes, _weights(runs.sources), x, _logarithms(start))
    model = _model(start, x)
    errors, slopes = _linearise(runs, model)
    return model, errors, slopes


def leave_one_out(runs: Runs, start: InStep, whole: tuple[InStep, Floats, Floats]) -> dict[str, InStep]:
    """Return for each source the model fitted to all other sources."""
    model, errors, slopes = whole
    at, prior = _logarithms(model), _logarithms(start)
    result = {}
    for source in dict.fromkeys(runs.sources):
        others = np.array([name != source for name in runs.sources])
        weights = _weights([name for name in runs.sources if name != source])
        x = at.copy()
        for _ in range(5):
            predicted = errors[others] + slopes[others] @ (x - at)
            x = x + _move(predicted, slopes[others], weights, x, prior)
        result[source] = _model(start, x)
    return result


def _linearise(runs: Runs, model: InStep) -> tuple[Floats, Floats]:
    errors = runs.log_errors(model)
    slopes = np.zeros((len(errors), len(FITTED)))
    for column, name in enumerate(FITTED):
        moved = replace(model, **{name: getattr(model, name) * math.exp(_STEP)})
        slopes[:, column] = (runs.log_errors(moved) - errors) / _STEP
    return errors, slopes


def _move(errors: Floats, slopes: Floats, weights: Floats, x: Floats, prior: Floats) -> Floats:
    """One Gauss-Newton step on the reweighted squares."""
    robust = weights * np.minimum(1.0, _HUBER / np.maximum(np.abs(errors), 1e-9))
    pull = _PRIOR * robust.sum()
    matrix = slopes.T @ (robust[:, None] * slopes) + pull * np.eye(len(x))
    step = np.linalg.solve(matrix, -slopes.T @ (robust * errors) - pull * (x - prior))
    return np.clip(step, -_LARGEST_MOVE, _LARGEST_MOVE)


def _weights(sources: Sequence[str]) -> Floats:
    counts: Mapping[str, int] = Counter(sources)
    return np.array([1 / counts[source] for source in sources])


def _logarithms(model: InStep) -> Floats:
    return np.array([math.log(getattr(model, name)) for name in FITTED])


def _model(start: InStep, x: Floats) -> InStep:
    return replace(start, **{name: math.exp(value) for name, value in zip(FITTED, x, strict=True)})
