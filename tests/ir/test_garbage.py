"""Garbage collection is rarer while autoshard compiles, and has the user's thresholds afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.ir.garbage import THRESHOLDS, seldom_collecting


@pytest.fixture(autouse=True)
def _own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@seldom_collecting
def thresholds() -> tuple[int, int, int]:
    return gc.get_threshold()


@seldom_collecting
def nested() -> list[tuple[int, int, int]]:
    return [thresholds(), gc.get_threshold()]


def test_they_are_rare_within() -> None:
    gc.set_threshold(700, 10, 10)
    assert nested() == [THRESHOLDS] * 2
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (10**6, 5, 5)], ids=["off", "rarer"])
def test_a_user_who_has_fewer_keeps_them(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    assert thresholds() == own
    assert gc.get_threshold() == own


def test_an_error_restores_them() -> None:
    @seldom_collecting
    def fails() -> None:
        raise ValueError("so")

    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="so"):
        fails()
    assert gc.get_threshold() == (700, 10, 10)


def test_threads_do_not_leave_them_raised() -> None:
    """When two calls in threads overlap, the thresholds stay raised until the last of them ends."""
    began, end = threading.Event(), threading.Event()

    @seldom_collecting
    def second() -> None:
        began.set()
        end.wait(10)

    other = threading.Thread(target=second)

    @seldom_collecting
    def first() -> None:
        other.start()
        began.wait(10)

    gc.set_threshold(700, 10, 10)
    first()
    assert gc.get_threshold() == THRESHOLDS
    end.set()
    other.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_planning_and_a_first_call_are_within() -> None:
    """While `plan` and a first compiled call trace a model, garbage collection has the rarer thresholds."""
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.get_threshold())
            return x * self.weight

    gc.set_threshold(700, 10, 10)
    x = torch.ones(4, 4)
    autoshard.plan(Looks(), Mesh({"data": 2}), example_inputs=(x,))
    autoshard.compile(Looks(), Mesh({"data": 2}))(x)
    assert set(seen) == {THRESHOLDS}
    assert gc.get_threshold() == (700, 10, 10)
