"""The text of a profile."""

from __future__ import annotations

from dataclasses import replace

from tests.ir.test_profile import profile_of, step_of


def test_the_table_of_a_profile() -> None:
    """The table has a row for each part and one for the step, and the largest differences follow in sentences."""
    text = str(profile_of(step_of(6, 9), step_of(10, 9)))
    assert "Profile of 1 step on 2 ranks, beside the prediction for h100_sxm:1x2" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["forward", "8 ms", "4 ms", "2.00"] in rows
    assert rows[-1] == ["step", "20 ms", "20 ms", "1.00"]
    assert "* data: all-reduce of head took 9 ms, 8 ms more than predicted" in text
    assert "* forward: layers.*.up mm took 8 ms, 4 ms more than predicted" in text


def test_simulated_ranks_are_named() -> None:
    simulated = replace(profile_of(step_of(6, 9)), is_simulated=True)
    assert "One process simulated all ranks" in str(simulated)
