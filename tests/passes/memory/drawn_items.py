"""Drawn values with their lifetimes and sizes in memory."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from passes.memory.liveness import Interval
from passes.memory.memory_usage import UsedBytes

OPTIONS = (3, 1, 4)
"""Number of options of each variable."""


@st.composite
def items(draw: st.DrawFn, points: int) -> UsedBytes:
    """Draw an item: a lifetime in `points` points, and its bytes for each option of one or two variables."""
    birth = draw(st.integers(0, points - 1))
    interval = Interval(birth, draw(st.integers(birth, points - 1)))
    variables = tuple(draw(st.lists(st.sampled_from(range(len(OPTIONS))), min_size=1, max_size=2)))
    shape = tuple(OPTIONS[variable] for variable in variables)
    sizes = draw(st.lists(st.integers(0, 1000), min_size=16, max_size=16))
    return UsedBytes(interval, np.array(sizes[: int(np.prod(shape))], dtype=np.float64).reshape(shape), variables)
