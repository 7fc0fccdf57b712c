"""`QuietHighs` prints nothing."""

from __future__ import annotations

import highspy
import pytest

from passes.solver.quiet_highs import QuietHighs


def test_output_is_off_before_the_first_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output is off before callbacks are enabled, when HiGHS 1.16 prints its banner, and nothing is printed."""
    was_on: list[bool] = []
    enable = highspy.Highs.enableCallbacks

    def enable_callbacks(highs: highspy.Highs) -> None:
        was_on.append(bool(highs.getOptionValue("output_flag")[1]))
        enable(highs)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", enable_callbacks)
    solver = QuietHighs()
    solver.addVar(0.0, 1.0)
    solver.run()
    assert was_on == [False]
    assert capfd.readouterr().out == ""
