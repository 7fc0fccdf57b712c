"""The page of step times shows the measurements, and names missing measurements."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.step_cases import CASES, COMPARISONS
from tests.benchmarks.step_time import expected, fill, markdown
from tests.benchmarks.two_hosts import TwoHosts


def found_of(times_s: list[float], loss: float = 1.0) -> dict[str, Any]:
    """A rank's record of one contender."""
    cpu_s = [[seconds] for seconds in times_s]
    return {"times_s": times_s, "cpu_s": cpu_s, "received_bytes": 10, "collectives": {}, "losses": [loss]}


def test_every_case_has_a_row_for_each_rival() -> None:
    """Five models at two lengths have six rows each on loopback, and a link has no mesh of one."""
    assert len(expected(link="loopback")) == len(CASES) * 6
    assert len(expected(link="1gbit")) == len(CASES) * 4


def test_the_ratio_is_the_median_of_pairs() -> None:
    """A round that slows both sides counts as any other round in the median of pairs."""
    (row,) = expected(CASES[:1], ["data"])
    found = {"data-parallel plan": found_of([1.0, 9.0, 1.2]), "DDP": found_of([1.0, 10.0, 1.0])}
    filled = replace(row, **fill(row, COMPARISONS["data"], found, {"data-parallel plan": 1, "DDP": 2}))
    assert filled.ratio == 1.0
    assert filled.is_met
    assert filled.memory_ratio == 0.5


def test_the_free_choice_races_the_fastest() -> None:
    """The fastest of three rivals has the lowest median."""
    (row,) = expected(CASES[:1], ["free"])
    times = {"free choice": 1.0, "DDP": 3.0, "FSDP2": 2.0, "DTensor": 4.0}
    found = {name: found_of([seconds] * 3) for name, seconds in times.items()}
    filled = replace(row, **fill(row, COMPARISONS["free"], found, {}))
    assert (filled.fastest, filled.ratio) == ("FSDP2", 0.5)


def test_another_loss_is_an_error() -> None:
    """Sides that compute something else are no comparison, however fast."""
    (row,) = expected(CASES[:1], ["one"])
    found = {"mesh of one": found_of([1.0] * 3, loss=1.1), "eager": found_of([2.0] * 3)}
    filled = replace(row, **fill(row, COMPARISONS["one"], found, {}))
    assert not filled.is_met
    assert "losses differ" in markdown([filled])


def test_the_page_has_what_did_not_run() -> None:
    """Rows without figures are named, and so are errors."""
    first, second, *_ = expected(CASES[:1])
    page = markdown([first, replace(second, error="RuntimeError: no")])
    assert "not run" in page
    assert "RuntimeError: no" in page


def test_without_root_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, two hosts raise an error with the way out."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"--link 1gbit .* takes root.* leave --link out"):
        TwoHosts("1gbit")
