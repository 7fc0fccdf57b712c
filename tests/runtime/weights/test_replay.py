"""`Replay` computes any part of an initialised weight, equal to that part of the whole weight bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autoshard.ir.initialisation import Box
from autoshard.runtime.weights import replay
from autoshard.runtime.weights.replay import Replay
from autoshard.tracing import record_initialisation


class Weight(nn.Module):
    """A module with one weight and a given initialiser."""

    def __init__(self, shape: tuple[int, ...], init: Callable[[Tensor], object], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.init = init

    def reset_parameters(self) -> None:
        self.init(self.weight)


def _thirds(weight: Tensor) -> None:
    """Initialise each third of a fused projection with its own deviation."""
    for number, third in enumerate(weight.chunk(3)):
        nn.init.normal_(third, std=0.1 * (number + 1))


def _scaled(weight: Tensor) -> None:
    with torch.no_grad():
        weight.normal_().clamp_(-1, 1).mul_(0.5).exp_().sub_(weight.mean(), alpha=0.0)


BY_PARTS: dict[str, Callable[[Tensor], object]] = {
    "uniform": nn.init.kaiming_uniform_,
    "normal": nn.init.xavier_normal_,
    "truncated": nn.init.trunc_normal_,
    "constant": lambda weight: nn.init.constant_(weight, 0.5),
    "a row of zeros": lambda weight: weight.data.normal_()[1].zero_(),
    "thirds": _thirds,
    "made of new tensors": lambda weight: weight.data.copy_(torch.randn(weight.shape) * 0.02 + 1.0),
    "in place by elements": lambda weight: weight.data.normal_().clamp_(-1, 1).mul_(0.5).exp_(),
    "erfinv": lambda weight: weight.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.02),
    "its own square": lambda weight: weight.data.normal_().mul_(weight.data.abs()),
    "twice": lambda weight: (weight.data.normal_(), weight.data.fill_(2.0), weight.data.uniform_()),
    "a scalar tensor": lambda weight: weight.data.fill_(torch.tensor(3.0)).mul_(torch.rand(())),
}
WHOLE: dict[str, Callable[[Tensor], object]] = {
    "orthogonal": nn.init.orthogonal_,
    "identity": nn.init.eye_,
    "sparse": lambda weight: nn.init.sparse_(weight, 0.3),
    "of its mean": _scaled,
    "broadcast": lambda weight: weight.data.copy_(torch.arange(weight.shape[-1]).expand(weight.shape)),
    "transposed": lambda weight: weight.data.t().normal_(),
    "drawn in another shape": lambda weight: weight.data.copy_(torch.randn(weight.numel()).view(weight.shape)),
    "sorted": lambda weight: weight.data.copy_(torch.randn(weight.shape).sort(0).values),
    "rows by index": lambda weight: weight.data.zero_().index_fill_(0, torch.tensor([1, 2]), 5.0),
}


@cache
def _replay(name: str, dtype: torch.dtype = torch.float32) -> Replay:
    module = Weight((6, 5), (BY_PARTS | WHOLE)[name], dtype)
    record = record_initialisation(module, torch.device("cpu"))
    assert record.sources() == {"weight": frozenset()}

    def refuse(name: str) -> Tensor:
        raise AssertionError(f"{name} is gathered")

    return Replay(record, torch.tensor(7), refuse)


def _part(found: Replay, box: Box, shape: tuple[int, ...] = (6, 5)) -> Tensor:
    dtype = found.record.ends["weight"].dtype
    result = torch.full(box.size, 9, dtype=dtype)
    for piece, value in found.pieces("weight", box, result.clone()):
        piece.of(result).copy_(value)
    return result


@pytest.mark.parametrize("name", [*BY_PARTS, *WHOLE])
@settings(max_examples=10)
@given(first=st.integers(0, 5), rows=st.integers(0, 6), column=st.integers(0, 4), columns=st.integers(0, 5))
def test_a_part_is_that_of_the_whole(name: str, first: int, rows: int, column: int, columns: int) -> None:
    found = _replay(name)
    whole = _part(found, Box.whole((6, 5)))
    box = Box((first, column), (min(rows, 6 - first), min(columns, 5 - column)))
    assert torch.equal(_part(found, box), box.of(whole))


@pytest.mark.parametrize("name", BY_PARTS)
def test_what_can_be_is_computed_by_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of these weights are computed without memory for a whole tensor, except for scalars."""
    found = _replay(name)
    computed: list[int] = []
    memory = Replay._memory

    def watched(self: Replay, number: int, time: int) -> Tensor:
        computed.append(self.record.numels[number])
        return memory(self, number, time)

    monkeypatch.setattr(Replay, "_memory", watched)
    _part(found, Box((2, 0), (2, 5)))
    assert max(computed, default=1) == 1


@pytest.mark.parametrize("name", BY_PARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pieces_do_not_change_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is computed three elements at a time has the same bits."""
    found = _replay(name, dtype)
    whole = _part(found, Box.whole((6, 5)))
    monkeypatch.setattr(replay, "_AT_ONCE", 3)
    assert torch.equal(_part(found, Box.whole((6, 5))), whole)


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated", "erfinv"])
def test_bits_of_many_numbers_do_not_depend_on_the_part(name: str) -> None:
    """Parts of a large weight, at odd offsets of vector instructions, equal the whole bit by bit."""
    module = Weight((257, 263), BY_PARTS[name], torch.float32)
    found = Replay(record_initialisation(module, torch.device("cpu")), torch.tensor(3), lambda name: module.weight)
    whole = _part(found, Box.whole((257, 263)))
    for box in (Box((0, 1), (257, 131)), Box((3, 0), (101, 263)), Box((200, 37), (57, 1))):
        assert torch.equal(_part(found, box), box.of(whole))
