"""The pictures of the documentation are as the code draws them."""

import pytest

from tests.docs.pictures import FOLDER, block, schedule


def test_the_schedule_is_drawn_as_the_code_draws_it() -> None:
    """`schedule()` draws the picture that is in the folder."""
    assert schedule() == (FOLDER / "schedule.svg").read_text()


@pytest.mark.slow
def test_a_block_is_drawn_from_its_program() -> None:
    """The picture of a block has the spec of each product's weight, and the collectives."""
    picture = block()
    assert "self_attn.o_proj: weight P(None, 'model')" in picture
    assert "reduce_scatter" in picture
