"""An `Unread` is a tensor of a file, whose regions are read when they are needed, also through functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoshard.errors import WeightsError
from autoshard.runtime.weights.unread import Region, Unread, shape_of, whole_region

FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "cat": lambda given: torch.cat(given, dim=1),
    "stack": lambda given: torch.stack(given, dim=1),
    "stack, then cat": lambda given: torch.cat([torch.stack(given), torch.stack(given[::-1])], dim=-1),
    "chunk": lambda given: torch.chunk(given[0], 3, dim=0),
    "chunk, unevenly, of several": lambda given: torch.chunk(torch.cat(given), 4),
    "split by sizes": lambda given: torch.split(given[0], [1, 2, 2], dim=0),
    "transpose": lambda given: torch.transpose(given[0], dim0=0, dim1=1).contiguous(),
    "squeeze a chunk of a stack": lambda given: torch.chunk(torch.stack(given), 2)[1].squeeze(0),
    "squeeze of all": lambda given: torch.stack(torch.chunk(given[0].unsqueeze(0), 2)).squeeze(),
    "squeeze where nothing is": lambda given: given[0].squeeze(0),
    "unsqueeze": lambda given: given[0].unsqueeze(-1),
    "reshape, which is computed": lambda given: given[0].reshape(2, 10).transpose(0, 1),
    "arithmetic, which is computed": lambda given: torch.add(given[0], given[1]) if len(given) > 1 else given[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_regions_of_results_are_those_of_the_whole(name: str) -> None:
    """Any region of a function of unread tensors equals that region of the function of whole tensors."""
    wholes = [torch.randn(5, 4), torch.randn(5, 4)]
    expected = FUNCTIONS[name](wholes)
    found = FUNCTIONS[name]([Unread(whole.shape, whole.dtype, whole.__getitem__) for whole in wholes])
    pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    for want, have in pairs:
        assert have.shape == want.shape
        assert have.dtype == want.dtype
        for region in _regions(tuple(want.shape)):
            torch.testing.assert_close(have.read(region), want[region], rtol=0, atol=0)


def test_only_what_is_needed_is_read() -> None:
    """A region of a stack of three tensors reads only the needed slices of one tensor."""
    read: list[tuple[int, Region]] = []

    def expert(number: int) -> Unread:
        def values(region: Region) -> torch.Tensor:
            read.append((number, region))
            return torch.zeros(shape_of(region))

        return Unread((6, 4), torch.float32, values)

    experts = torch.stack([expert(number) for number in range(3)])
    assert experts.read((slice(1, 2), slice(0, 6), slice(1, 3))).shape == (1, 6, 2)
    assert read == [(1, (slice(0, 6), slice(1, 3)))]


def test_parts_that_do_not_fit_are_refused() -> None:
    """Concatenating unread tensors that differ in another dim raises before they are read."""
    parts = [Unread((2, size), torch.float32, torch.zeros(2, size).__getitem__) for size in (3, 4)]
    with pytest.raises(WeightsError, match=r"shape=\(2, 4\).*cannot be joined along dim 0"):
        torch.cat(parts)


def test_what_tensors_have_not_is_not_there() -> None:
    """An attribute that tensors lack raises `AttributeError`."""
    with pytest.raises(AttributeError, match="nonsense"):
        _ = Unread((1,), torch.float32, torch.zeros(1).__getitem__).nonsense


def _regions(shape: tuple[int, ...]) -> list[Region]:
    whole = whole_region(shape)
    regions = [whole]
    for dim, size in enumerate(shape):
        for start, stop in ((0, 0), (0, 1), (size // 2, size), (size, size)):
            regions.append((*whole[:dim], slice(start, stop), *whole[dim + 1 :]))
    return regions
