"""The page of step times shows what was measured and what was not."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.step_cases import CASES, COMPARISONS
from tests.benchmarks.step_time import expected, fill, markdown
from tests.benchmarks.two_hosts import TwoHosts


def found_of(times_s: list[float], loss: float = 1.0) -> dict[str, Any]:
    """The record of one contender's measurements."""
    cpu_s = [[seconds] for seconds in times_s]
    return {"times_s": times_s, "cpu_s": cpu_s, "received_bytes": 10, "collectives": {}, "losses": [loss]}


def test_every_case_has_a_row_for_each_rival() -> None:
    """On loopback each case has six rows, and on a link four, because a mesh of one has no link."""
    assert len(expected(link="loopback")) == len(CASES) * 6
    assert len(expected(link="1gbit")) == len(CASES) * 4


def test_the_ratio_is_the_median_of_pairs() -> None:
    """The ratio is the median over rounds of paired ratios, so that a slow round of both sides changes nothing."""
    (row,) = expected(CASES[:1], ["data"])
    found = {"data-parallel plan": found_of([1.0, 9.0, 1.2]), "DDP": found_of([1.0, 10.0, 1.0])}
    filled = replace(row, **fill(row, COMPARISONS["data"], found, {"data-parallel plan": 1, "DDP": 2}))
    assert filled.ratio == 1.0
    assert filled.is_met
    assert filled.memory_ratio == 0.5


def test_the_free_choice_races_the_fastest() -> None:
    """The free choice is compared with the rival that has the lowest median."""
    (row,) = expected(CASES[:1], ["free"])
    times = {"free choice": 1.0, "DDP": 3.0, "FSDP2": 2.0, "DTensor": 4.0}
    found = {name: found_of([seconds] * 3) for name, seconds in times.items()}
    filled = replace(row, **fill(row, COMPARISONS["free"], found, {}))
    assert (filled.fastest, filled.ratio) == ("FSDP2", 0.5)


def test_another_loss_is_an_error() -> None:
    """If the first losses differ, the target is not met and the page has the error."""
    (row,) = expected(CASES[:1], ["one"])
    found = {"mesh of one": found_of([1.0] * 3, loss=1.1), "eager": found_of([2.0] * 3)}
    filled = replace(row, **fill(row, COMPARISONS["one"], found, {}))
    assert not filled.is_met
    assert "losses differ" in markdown([filled])


def test_the_page_has_what_did_not_run() -> None:
    """The page lists rows that did not run, and errors."""
    first, second, *_ = expected(CASES[:1])
    page = markdown([first, replace(second, error="RuntimeError: no")])
    assert "not run" in page
    assert "RuntimeError: no" in page


def test_without_root_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, emulating two hosts is refused, and the message says to run as root or leave out `--link`."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"--link 1gbit .* takes root.* leave --link out"):
        TwoHosts("1gbit")
