"""Formulas in the sizes of inputs are fitted exactly, or refused with the name of the size."""

from __future__ import annotations

import math

import pytest
import torch

from autoshard import FormulaError
from cost_models.formulas import Point, size_symbol
from passes.questions.fit_sizes import DoesNotRunError, InputSize, Observation, fit_numbers, input_sizes, resize

BATCH, LENGTH = InputSize("batch", ((0, 0),), 4), InputSize("sequence", ((0, 1),), 16)
B, S = size_symbol("batch"), size_symbol("sequence")


def _observed(*numbers: int) -> Observation:
    return Observation(("op",), numbers, ("one",) * len(numbers))


def test_numbers_are_fitted_with_as_few_observations_as_they_need() -> None:
    """A formula that is linear in each of two sizes is fitted with five observations.

    A square of a size is fitted too.
    """
    seen: list[Point] = []

    def linear(point: Point) -> Observation:
        seen.append(point)
        batch, length = point
        return _observed(7, batch, 3 * batch * length + 1)

    assert fit_numbers((BATCH, LENGTH), linear) == (7, B, 3 * B * S + 1)
    assert len(seen) == 5
    square = fit_numbers((LENGTH,), lambda point: _observed(2 * point[0] ** 2 + 1))
    assert square == (2 * S**2 + 1,)


def test_what_is_rounded_is_refused_with_its_name() -> None:
    """A number that is rounded up, such as a number of windows, is refused by name, with advice to use `fixed=`."""
    with pytest.raises(FormulaError, match=r"size of one is no polynomial.*fixed="):
        fit_numbers((LENGTH,), lambda point: _observed(-(-point[0] // 5)))


def test_a_limit_between_the_points_is_seen() -> None:
    """A number that stops growing at a limit between two fitted sizes is refused."""
    with pytest.raises(FormulaError, match="reaches a constant limit"):
        fit_numbers((LENGTH,), lambda point: _observed(min(point[0], 10)))


def test_sizes_at_which_the_model_does_not_run_need_no_formula() -> None:
    """Sizes at which the model does not run are skipped. If the model's own size does not run, its error is raised."""

    def patches(point: Point) -> Observation:
        if point[0] % 4:
            raise DoesNotRunError("no such image")
        return _observed(point[0] // 4)

    assert fit_numbers((LENGTH,), patches) == (S / 4,)
    with pytest.raises(DoesNotRunError, match="no such image"):
        fit_numbers((InputSize("sequence", ((0, 1),), 6),), patches)


def test_other_operators_at_other_sizes_are_refused() -> None:
    """A model that runs other operators at another size is refused, and the error names both operators and the size."""

    def observe(point: Point) -> Observation:
        return Observation(("mm" if point == (16,) else "bmm",), (1,), ("one",))

    with pytest.raises(FormulaError, match="runs bmm in place of mm for sequence="):
        fit_numbers((LENGTH,), observe)


def test_batch_and_sequence_are_found() -> None:
    """By default, "batch" is the first dim of inputs and "sequence" the second dim of token inputs.

    Images have no sequence.
    """
    tokens, image = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 3, 16, 16)
    found = input_sizes((tokens,), {"mask": torch.ones(4, 16), "other": torch.ones(2, 7)}, None)
    assert found == (InputSize("batch", ((0, 0), (1, 0)), 4), InputSize("sequence", ((0, 1), (1, 1)), 16))
    assert [size.name for size in input_sizes((image,), {}, None)] == ["batch"]


def test_users_name_other_dims() -> None:
    """Users name dims by their number for all inputs or for one input. A dim that no input has is refused."""
    image = torch.zeros(4, 3, 16, 8)
    found = input_sizes((image,), {}, {"batch": 0, "height": 2, "width": {"input:0": 3}})
    assert [(size.name, size.value) for size in found] == [("batch", 4), ("height", 16), ("width", 8)]
    for dims in ({"depth": 4}, {"depth": {"input:1": 0}}, {"depth": {"input:0": 4}}):
        with pytest.raises(FormulaError, match=r"'depth': .* is no dim of the inputs, which are input:0"):
            input_sizes((image,), {}, dims)


def test_inputs_are_repeated_or_cut() -> None:
    """`resize` repeats or cuts the example inputs to other sizes."""
    tokens = torch.arange(8).view(2, 4)
    sizes = input_sizes((tokens,), {}, None)
    (grown,), _ = resize((tokens,), {}, sizes, (4, 2))
    assert grown.tolist() == [[0, 1], [4, 5], [0, 1], [4, 5]]


@pytest.mark.parametrize("value", range(1, 10))
def test_an_odd_size_shares_no_factor_with_the_example(value: int) -> None:
    """The odd size of an input is above 1 and shares no factor with the example's size."""
    odd = InputSize("batch", ((0, 0),), value).odd
    assert math.gcd(odd, value) == 1
    assert odd > 1
