"""Expert layers count FLOPs of the chosen experts, the busiest rank, and the bytes of exchanges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.exchanges import EXCHANGES, WORKSPACE_BYTES
from cost_models.experts import busiest_rows
from cost_models.operators import work
from cost_models.work import TensorInfo

TOKENS, CHOSEN, HIDDEN, INNER, EXPERTS = 64, 2, 16, 24, 8
CONSTANTS = (EXPERTS, "silu", False, False, 1.0, 0.0)


def floats(*shape: int) -> TensorInfo:
    return TensorInfo(shape, 2, "bf16")


def operands(tokens: int = TOKENS, held: int = EXPERTS) -> list[TensorInfo]:
    """Operands of a layer of experts: `tokens` rows, and weights of `held` experts."""
    index = TensorInfo((tokens, CHOSEN), 8, "i64")
    matrices = [floats(held, 2, INNER, HIDDEN), floats(held, HIDDEN, INNER)]
    return [floats(tokens, HIDDEN), index, floats(tokens, CHOSEN), *matrices]


ROW_FLOPS = 2 * HIDDEN * 3 * INNER


def flops(name: str, inputs: list[TensorInfo], group: tuple[str, ...] = ()) -> float:
    backward = "backward" in name
    before = [floats(inputs[0].shape[0], HIDDEN)] if backward else []
    nothing = (None,) * (7 if backward else 6)
    return work(f"autoshard.{name}.default", [*before, *inputs], [inputs[0]], (*nothing, *CONSTANTS, *group)).flops


def test_whole_layers_compute_each_row_once() -> None:
    """A whole layer computes each row of each chosen expert once, and its backward takes 2 + 2/3 times the FLOPs."""
    rows = TOKENS * CHOSEN
    assert flops("experts", operands()) == rows * ROW_FLOPS
    assert flops("experts_backward", operands()) == pytest.approx(rows * ROW_FLOPS * (2 + 2 / 3))


def test_ranks_with_other_experts_wait_for_the_busiest() -> None:
    """A rank with a quarter of the experts counts more than a quarter of the rows, with and without an exchange."""
    rows = TOKENS * CHOSEN / 4
    alone = flops("experts", operands(held=2))
    assert rows * ROW_FLOPS < alone < 2 * rows * ROW_FLOPS
    assert flops("exchanged_experts", operands(TOKENS // 4, held=2), ("expert",)) == alone


@given(rows=st.floats(1, 1e9), ranks=st.integers(1, 512))
def test_the_busiest_rank_has_between_the_mean_and_all(rows: float, ranks: int) -> None:
    """The rows of the busiest rank are at least the mean and at most all. Their share falls with more rows."""
    assert rows / ranks <= busiest_rows(rows, ranks) <= rows
    assert busiest_rows(4 * rows, ranks) / (4 * rows) <= busiest_rows(rows, ranks) / rows * (1 + 1e-12)


def test_rows_travel_there_and_back() -> None:
    """A forward sends rows to their experts and back, and a backward sends rows and gradients."""
    inputs = operands(TOKENS // 4, held=2)
    rows = busiest_rows(TOKENS * CHOSEN, 4)
    counts, there, back = sent("exchanged_experts", (None,) * 6, inputs)
    assert counts == 8 * EXPERTS
    assert there == back == rows * HIDDEN * 2
    backward = sent("exchanged_experts_backward", (None,) * 7, [inputs[0], *inputs], overlapped=[2 / 8, 3 / 8])
    assert sum(backward) == pytest.approx(counts + 3 * there + 2 * rows * 2)


def test_what_is_kept_is_neither_sent_nor_computed_again() -> None:
    """A backward with kept rows sends gradients alone, and makes fewer products than one that sends rows again."""
    inputs = operands(TOKENS // 4, held=2)
    rows = busiest_rows(TOKENS * CHOSEN, 4)
    kept = [floats(1, HIDDEN), floats(1, 2 * INNER), TensorInfo((2, 4, 2), 8, "i64")]
    arguments = (None,) * 9
    there, _, back, _ = sent("exchanged_experts_kept_backward", arguments, [*inputs, *kept], overlapped=[0.5])
    assert there == back == rows * HIDDEN * 2
    both = [
        work(f"autoshard.{name}.default", operands, inputs[:1], (*nothing, *CONSTANTS, "expert")).flops
        for name, operands, nothing in (
            ("exchanged_experts_kept_backward", [*inputs, *kept], arguments),
            ("exchanged_experts_backward", [inputs[0], *inputs], (None,) * 7),
        )
    ]
    assert both[0] == pytest.approx(both[1] * 6 / 8)


@pytest.mark.parametrize("tokens", [61, 64])
def test_odd_numbers_of_rows_are_not_misaligned(tokens: int) -> None:
    """Rows of an expert count as multiples of 8, so no product of a grouped kernel is priced as misaligned."""
    inputs = operands(tokens, held=2)
    done = work("autoshard.experts_backward.default", [inputs[0], *inputs], inputs[:1], ((None,) * 7 + CONSTANTS))
    assert all(shape.n % 8 == 0 and shape.k % 8 == 0 for shape in done.products)


def sent(
    name: str, before: tuple[None, ...], inputs: list[TensorInfo], overlapped: Sequence[float] = ()
) -> list[float]:
    """The bytes of each exchange of a call. `overlapped` must list the exchanges' shares of overlap above zero, in
    order."""
    found = EXCHANGES[f"autoshard.{name}.default"](inputs, (*before, *CONSTANTS, "expert"))
    assert not any(each.is_shift for each in found)
    assert [each.overlapped_share for each in found if each.overlapped_share] == list(overlapped)
    return [each.size_bytes for each in found]


def test_the_workspace_grows_with_rows() -> None:
    """The workspace grows in proportion to the tokens, and holds at least the rows and their first products."""
    count = WORKSPACE_BYTES["autoshard.experts.default"]
    arguments = (None,) * 6 + CONSTANTS
    few, many = (count(operands(tokens), arguments) for tokens in (TOKENS, 2 * TOKENS))
    assert math.isclose(many, 2 * few)
    assert few >= TOKENS * CHOSEN * 2 * (HIDDEN + 3 * INNER)


def test_rows_of_other_experts_are_in_memory() -> None:
    """A rank with some of the experts has the workspace of all rows, because the host does not wait
    for their number."""
    for name in ("experts", "experts_backward"):
        before = [floats(TOKENS, HIDDEN)] if name.endswith("backward") else []
        count, arguments = WORKSPACE_BYTES[f"autoshard.{name}.default"], (None,) * (6 + len(before)) + CONSTANTS
        assert count([*before, *operands(held=2)], arguments) == count([*before, *operands()], arguments)
