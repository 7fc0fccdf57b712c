"""States as JSON: values are read back equal, and reading runs no code."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard import CheckpointError
from autoshard.checkpoints.values import Slot, StepCount, packed, unpacked
from tests.checkpoints.hostile import RunsCode

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, of equal types and in equal order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None), getattr(other, "default_factory", None)
        return factories[0] is factories[1] and same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@given(PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    """Plain values are read back with the same types, order and bits."""
    assert same(unpacked(packed(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        random.getstate(),
        np.random.get_state(),
        np.random.default_rng(0).bit_generator.state,
        {"kinds": {np.dtype("i4").type(3), np.float64(0.1)}},
        [Slot("model.weight", is_sharded=True), StepCount(3.0, torch.float32, torch.Size([]))],
        [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), {1, 2}, frozenset({"a"}), bytearray(b"x")],
        deque([1, 2], maxlen=3),
        [Counter("aab"), defaultdict(int, a=1), defaultdict(None), defaultdict(list, {2: [1]})],
        [float("inf"), -float("inf"), -0.0, 2**53, -(2**63), 2**64, 10**40],
        {(1, "a"): 1, None: 2, 3: 3},
    ],
    ids=lambda value: type(value).__name__,
)
def test_states_of_libraries_come_back(value: Any) -> None:
    """States of random generators, torch's own types, and numbers without JSON text are read back equal."""
    assert same(unpacked(packed(value)), value)


def test_nan_comes_back() -> None:
    """NaN is read back as NaN."""
    assert np.isnan(unpacked(packed([float("nan")]))[0])


def test_sparse_tensors_come_back() -> None:
    """A sparse tensor is read back equal."""
    assert torch.equal(unpacked(packed(torch.eye(3).to_sparse())).to_dense(), torch.eye(3))


def test_text_is_json() -> None:
    """Any JSON reader can read the text of a state."""
    assert json.loads(packed({"a": [1, (2.5, None)]})) == {"dict": {"a": [1, {"tuple": [2.5, None]}]}}


def test_equal_sets_have_one_text() -> None:
    """Equal sets have one text, whatever their order."""
    assert packed({8, 16, "a"}) == packed({"a", 16, 8})


class Own:
    """A class of a user."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Own(), "Own"),
        (len, "len"),
        ({"a": [Own]}, "Own"),
        (os.system, "system"),
        (np.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
    ],
)
def test_what_only_pickle_writes_is_refused(value: Any, name: str) -> None:
    """A value that only pickle could write is refused, and the error names its class and `add_safe_globals`."""
    with pytest.raises(CheckpointError, match=rf"{name}, which only pickle can read.*add_safe_globals\(\[{name}\]\)"):
        packed(value)


def test_a_function_without_a_name_is_refused() -> None:
    """A lambda is refused without advice to allow it, because no reader could find it."""
    with pytest.raises(CheckpointError, match=r"<lambda>, which only pickle can read.* in state_dict\.$"):
        packed(lambda: 0)


def test_classes_that_the_user_allows() -> None:
    """A class that the user has allowed with `safe_globals` is saved and read."""
    own = Own()
    own.number = 3  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([Own]):
        assert unpacked(packed({"own": own}))["own"].number == 3


def test_a_state_that_holds_itself_is_refused() -> None:
    """A state that contains itself is refused."""
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        packed(state)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"tuple":' * 100_000,
        b"\xff",
        b'{"unknown":1}',
        b"{}",
        b'{"tuple":[],"set":[]}',
        b'{"tuple":3}',
        b'{"int":5}',
        b'{"slot":["a"]}',
        b'{"slot":[1,2]}',
        b'{"dtype":"load"}',
        b'{"dtype":"float32.x"}',
        b'{"array":["O",[1],"AAAAAAAAAAA="]}',
        b'{"array":["|O",[1],"AAAAAAAAAAA="]}',
        b'{"array":["f4",[9],""]}',
        b'{"bytes":"?"}',
        b'{"set":[[]]}',
        b'{"size":["a"]}',
        b'{"torch":"AAAA"}',
        b"NaN",
        b"1" * 100,
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_other_texts_are_refused(text: bytes) -> None:
    """Text that is no state is refused with a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        unpacked(text)


def test_a_pickle_within_runs_no_code(tmp_path: Path) -> None:
    """A pickle within a state is refused, and its code does not run."""
    import base64
    import io

    file = io.BytesIO()
    torch.save(RunsCode(tmp_path / "ran"), file)
    text = json.dumps({"torch": base64.b64encode(file.getvalue()).decode()}).encode()
    with pytest.raises(ValueError, match="did not write this state"):
        unpacked(text)
    assert not (tmp_path / "ran").exists()
