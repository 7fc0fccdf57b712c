"""The pictures of the documentation are drawn by the code."""

import pytest

from tests.docs.pictures import FOLDER, block, schedule


def test_the_schedule_is_drawn_as_the_code_draws_it() -> None:
    """`python -m tests.docs.pictures` draws the picture anew."""
    assert schedule() == (FOLDER / "schedule.svg").read_text()


@pytest.mark.slow
def test_a_block_is_drawn_from_its_program() -> None:
    """Each product has its weight's spec; sums over ranks are there."""
    picture = block()
    assert "self_attn.o_proj: weight P(None, 'model')" in picture
    assert "reduce_scatter" in picture
