"""Names of repeated blocks, of which a program leaves out the inner ones."""

from __future__ import annotations

from dataclasses import asdict

from autoshard.ir.read_json import read
from autoshard.ir.repeat import Repeat, names_represented_by

PAIRS = Repeat("model.layers", period=2, before=4, behind=12)


def test_units_lie_around_the_gap() -> None:
    """The kept units of two blocks start at 2, 4, 12 and 14, and blocks 6 to 11 are three left-out units."""
    assert PAIRS.left_out == 3
    assert PAIRS.units == (2, 4, 12, 14)


def test_a_path_has_a_place_in_its_unit() -> None:
    """A path in a kept unit has the unit's number and the path within, and any other path has None."""
    assert PAIRS.place("model.layers.3.mlp") == (0, "1.mlp")
    assert PAIRS.place("model.layers.12") == (2, "0.")
    assert PAIRS.place("model.layers.6.mlp") is None
    assert PAIRS.place("model.layers_too.3.mlp") is None
    assert PAIRS.place("norm.weight") is None


def test_repeated_paths_lead_to_the_paths_that_stand_for_them() -> None:
    """The path of a left-out block leads to the same block of the unit that stands for it."""
    assert PAIRS.unit("model.layers.9.mlp") == (8, "model.layers.13.mlp")
    assert PAIRS.unit("model.layers.12.mlp") == (12, "model.layers.12.mlp")
    assert PAIRS.unit("model.layers.5.mlp") is None
    assert PAIRS.unit("model.layers.14.mlp") is None


def test_names_stand_for_those_of_repeated_blocks() -> None:
    """In the unit that stands for left-out units, a name represents its namesakes there. Any other name represents
    itself."""
    assert names_represented_by((PAIRS,), "exp_avg:model.layers.13.w") == tuple(
        f"exp_avg:model.layers.{number}.w" for number in (7, 9, 11, 13)
    )
    assert names_represented_by((PAIRS,), "model.layers.4.w") == ("model.layers.4.w",)
    assert names_represented_by((PAIRS,), "head.w") == ("head.w",)


def test_a_repeat_survives_json() -> None:
    """A repeat that a plan saves as JSON is read back equal."""
    assert read(Repeat, asdict(PAIRS)) == PAIRS
