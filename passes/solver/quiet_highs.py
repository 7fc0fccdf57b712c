"""HiGHS without output: since 1.16 its banner goes to standard output before a program can turn output off."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """A solver whose output is off before its first message, at the time it enables its callbacks."""

    def enableCallbacks(self) -> None:  # noqa: N802
        """Turn output off, then enable callbacks; called by the constructor."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
