"""States split into named tensors and a rest, and joined again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch

from autoshard.checkpoints.trees import join, own_slots, slots_in, split
from autoshard.checkpoints.values import Slot, packed, unpacked


def test_split_and_join() -> None:
    """A joined state has the order, the containers and the values of the split state, and equal names get a suffix."""
    state: dict[str, Any] = {
        "b": OrderedDict(x=torch.ones(2), y="text"),
        "a": [torch.zeros(3), (4, torch.arange(2))],
        "b.x": torch.full((2,), 7.0),
        3: None,
    }
    tensors, rest = split("k", state)
    assert list(tensors) == ["k.b.x", "k.a.0", "k.a.1.1", "k.b.x~2"]
    assert [slot.name for slot in slots_in(rest)] == list(tensors)
    found = join(unpacked(packed(rest)), tensors)
    assert list(found) == list(state)
    assert type(found["b"]) is OrderedDict
    assert found["b"]["x"] is state["b"]["x"]
    assert found["a"][1][1] is state["a"][1][1]
    assert found["b.x"] is state["b.x"]


def test_dicts_with_defaults_stay_so() -> None:
    """A dict with a default factory keeps a factory that is a Python type, and otherwise becomes a plain dict."""
    state = {
        "counts": Counter("aab"),
        "seen": defaultdict(list, a=[torch.ones(2)]),
        "own": defaultdict(lambda: 0, a=1),
    }
    tensors, rest = split("k", state)
    found = join(unpacked(packed(rest)), tensors)
    assert {name: type(item) for name, item in found.items()} == {"counts": Counter, "seen": defaultdict, "own": dict}
    assert (found["counts"], found["own"]) == (state["counts"], state["own"])
    assert found["seen"]["a"][0] is state["seen"]["a"][0]
    assert found["seen"]["b"] == []


def test_own_slots() -> None:
    """The slot of a value that is not sharded gets the suffix of its rank."""
    rest = own_slots({"a": Slot("k.a", is_sharded=False), "b": Slot("k.b", is_sharded=True)}, "@3")
    assert [slot.name for slot in slots_in(rest)] == ["k.a@3", "k.b"]
