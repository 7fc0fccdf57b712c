"""`CheckReport`: the values of a run on a mesh, compared with the values of a run on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from autoshard.errors import VerificationError
from autoshard.ir.plan import Plan

ABSOLUTE_FLOOR = 1e-6
"""Absolute differences up to this value count as rounding, at any scale of the compared values."""

TOLERANCE = 1e-5
"""The largest difference that counts as rounding in float32, relative to the largest element of a value."""

PRECISE_TOLERANCE = 1e-9
"""The largest difference that counts as rounding in float64, relative to the largest element of a value.

One rounding in float32 is about 1e-7.
"""

SAMPLES = 4
"""The most further runs of one device, on parameters and inputs moved by one rounding, to sample rounding errors."""

ROUNDING_FACTOR = 4.0
"""The mesh's rounding error may be this many times one device's error, because it sums in another order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One value of a checked run, on the simulated mesh and on one device.

    Args:
        name: for example "output:0", "gradient layers.0.weight" or "parameter layers.0.weight".
        difference: largest absolute difference of an element between mesh and one device. It is infinite if one of the
            values is missing, their shapes differ, or a difference is NaN.
        scale: largest absolute value of a finite element on one device.
        rounding: largest rounding error of an element on one device, measured against a run in a wider dtype. 0, the
            default, without such a run.
    """

    name: str
    difference: float
    scale: float
    rounding: float = 0.0

    def is_close(self, tolerance: float) -> bool:
        """Whether the difference counts as rounding.

        It may be at most 1e-6 (`ABSOLUTE_FLOOR`), `tolerance * scale`, or 4 times `rounding` (`ROUNDING_FACTOR`).
        """
        return self.difference <= max(ABSOLUTE_FLOOR, tolerance * self.scale, ROUNDING_FACTOR * self.rounding)

    def beside(self, nearby: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> Comparison:
        """`CheckReport.sampled` calls this: return the comparison with one more sample of the rounding error.

        `rounding` becomes the largest difference between `nearby` and `exact`, if this is larger.

        Args:
            nearby: values, by name, of one device's run on parameters and inputs moved by one rounding.
            exact: values, by name, of one device's run in a wider dtype.
        """
        if self.name not in nearby or self.name not in exact:
            return self
        return replace(self, rounding=max(self.rounding, _distance(nearby[self.name], exact[self.name])))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of `check_plan` or `check_calls`: values on the mesh, compared with one device. It prints as text.

    Args:
        plan: the plan of the run on the mesh.
        comparisons: one comparison for each value.
        tolerance: the largest difference that counts as rounding, relative to a value's largest element.
        small_failure: a Python script that runs a few operator calls which still differ, by `check_calls`. It is ""
            (default) if no value differs, or no such calls were found.
        precisely: comparisons of a second run, in which mesh and one device compute in the wider dtype of
            `check_plan(precise=)`. Empty (default) if the second run was not needed, or not possible.
    """

    plan: Plan
    comparisons: tuple[Comparison, ...]
    tolerance: float
    small_failure: str = ""
    precisely: tuple[Comparison, ...] = ()

    @property
    def differing(self) -> tuple[Comparison, ...]:
        """The comparisons whose difference exceeds rounding; empty if all values are equal up to rounding.

        They are taken from `precisely`. If it is empty, they are taken from `comparisons`.
        """
        if self.precisely:
            return tuple(item for item in self.precisely if not item.is_close(PRECISE_TOLERANCE))
        return tuple(item for item in self.comparisons if not item.is_close(self.tolerance))

    @property
    def is_equal(self) -> bool:
        """Whether all compared values of the mesh and of one device are equal up to rounding."""
        return not self.differing

    def sampled(
        self, run_nearby: Callable[[int], Mapping[str, torch.Tensor]], exact: Mapping[str, torch.Tensor]
    ) -> CheckReport:
        """`check_plan` calls this: return the report with more samples of one device's rounding errors.

        At most `SAMPLES` runs are made, and none once every value is equal up to rounding.

        Args:
            run_nearby: takes the number of a run; returns one device's values, by name, for parameters and inputs that
                are moved by one rounding. Each number moves them in other directions.
            exact: values, by name, of one device's run in a wider dtype.
        """
        report = self
        for number in range(SAMPLES):
            if report.is_equal:
                break
            nearby = run_nearby(number)
            report = replace(report, comparisons=tuple(item.beside(nearby, exact) for item in report.comparisons))
        return report

    def raise_if_different(self) -> None:
        """Raise `VerificationError` if a value differs by more than rounding; the message names all such values."""
        if not self.is_equal:
            raise VerificationError(str(self))

    def __str__(self) -> str:
        if self.is_equal:
            return f"{len(self.comparisons)} values on {self.plan.mesh} equal one device."
        lines = [f"  {item.name}: off by {item.difference:.2e} at scale {item.scale:.2e}" for item in self.differing]
        if self.small_failure:
            lines += ["A part of the program that differs by itself:", "", self.small_failure]
        return "\n".join([f"values on {self.plan.mesh} that differ from one device:", *lines])


def compare_all(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor] = {}
) -> tuple[Comparison, ...]:
    """Compare all values of a run on a mesh with those on one device, by name.

    Args:
        actual: values on the mesh.
        expected: values on one device.
        exact: values of a more precise run on one device.
    """
    names = dict.fromkeys((*expected, *actual))
    return tuple(compare(name, actual.get(name), expected.get(name), exact.get(name)) for name in names)


def compare(
    name: str, actual: torch.Tensor | None, expected: torch.Tensor | None, exact: torch.Tensor | None = None
) -> Comparison:
    """Return the comparison of a value on the mesh (`actual`) with the value on one device (`expected`).

    None for either means that the value is missing. `exact` is the value of a more precise run on one device, or None
    without such a run.
    """
    if actual is None or expected is None or actual.shape != expected.shape:
        return Comparison(name, float("inf"), 0.0)
    if not expected.numel():
        return Comparison(name, 0.0, 0.0)
    rounding = 0.0 if exact is None else _distance(expected, exact)
    sizes = _wide(expected).abs()
    scale = float(torch.where(sizes.isfinite(), sizes, 0.0).max())
    return Comparison(name, _distance(actual, expected), scale, rounding)


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest absolute difference between elements of two tensors; infinite if a difference is NaN.

    Two equal infinities do not differ.
    """
    one, two = _wide(first), _wide(second)
    difference = torch.where(one == two, 0.0, (one - two).abs()).max()
    return float(difference.nan_to_num(float("inf")))


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
