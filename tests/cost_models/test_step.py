"""The numbers of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cost_models.step import StepModel, fitted

SECONDS = st.floats(0, 1e3)


@given(SECONDS, SECONDS, st.floats(0, 0.5))
def test_side_by_side_lies_between_the_longer_and_the_sum(compute_s: float, sent_s: float, interference: float) -> None:
    """Overlap hides some communication and never makes things faster than the longer of both."""
    together = StepModel(interference=interference).beside(compute_s, sent_s)
    assert max(compute_s, sent_s) <= together <= compute_s + sent_s + 1e-9


def test_nothing_to_hide_costs_nothing() -> None:
    """Computation alone takes its own time."""
    assert StepModel().beside(2.0, 0.0) == 2.0


def test_the_data_file_is_physical() -> None:
    """Kernels and collectives in a step are about as fast as alone, or slower; overlap costs some of what it hides."""
    model = fitted()
    assert 0.8 <= min(model.matmul_slowdown, model.attention_slowdown, model.memory_slowdown) <= 2
    assert 0.8 <= min(model.fabric_slowdown, model.network_slowdown) <= 3
    assert 0 <= model.interference <= 0.5
