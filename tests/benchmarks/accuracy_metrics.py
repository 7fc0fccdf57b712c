"""Accuracy of predictions: errors, ranks within groups, and the regret of choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mape(log_errors: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean([abs(math.expm1(error)) for error in log_errors]))


def bias(log_errors: Sequence[float]) -> float:
    """The geometric mean of predicted over measured, minus one."""
    return math.expm1(float(np.mean(log_errors)))


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs.

    Example:
        >>> ranks([3.0, 1.0, 3.0])
        array([2.5, 1. , 2.5])
    """
    array = np.asarray(values, dtype=float)
    order = np.argsort(array, kind="stable")
    result = np.empty(len(array))
    result[order] = np.arange(1, len(array) + 1)
    for value in np.unique(array):
        result[array == value] = result[array == value].mean()
    return result


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation; 0 where one side does not vary.

    Example:
        >>> round(spearman([1, 2, 3], [1, 3, 2]), 3)
        0.5
    """
    a, b = ranks(one), ranks(two)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower, as measured, the choice by prediction is than the best.

    Example:
        >>> round(regret([1.0, 2.0], [11.0, 10.0]), 3)
        0.1
    """
    chosen = int(np.argmin(predicted))
    return measured[chosen] / min(measured) - 1


def attainable(inputs: Sequence[object], measured: Sequence[float]) -> float:
    """Best rank correlation that any prediction from the inputs reaches: equal inputs have equal predictions.

    Example:
        >>> round(attainable(["a", "a", "b"], [1.0, 3.0, 2.0]), 3)
        0.0
    """
    by_input: dict[object, list[float]] = {}
    for item, rank in zip(inputs, ranks(measured), strict=True):
        by_input.setdefault(item, []).append(float(rank))
    return spearman([float(np.mean(by_input[item])) for item in inputs], measured)


def repeatability(measured: Sequence[float], noise: float, draws: int = 400) -> float:
    """Return the mean rank correlation of measurements with their repetition.

    `noise` is the standard deviation of a measurement's logarithm.

    Example:
        >>> repeatability([1.0, 2.0, 4.0], noise=0.0)
        1.0
    """
    generator = np.random.default_rng(0)
    logs = np.log(np.asarray(measured))
    again = logs + noise * generator.standard_normal((draws, len(logs)))
    return float(np.mean([spearman(list(row), list(logs)) for row in again]))
