"""HiGHS without output. HiGHS 1.16 and later print a banner before a program can turn output off."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """The solver HiGHS, with its output turned off before its first message."""

    def enableCallbacks(self) -> None:  # noqa: N802
        """Turn output off, then enable callbacks. HiGHS's constructor calls this method first."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
