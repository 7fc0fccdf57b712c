"""`LocalPart` is a rank's part of a tensor, and `index_of` its place in the whole."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard.errors import NotAvailableError
from autoshard.runtime.weights.local_part import LocalPart, index_of


def _chunk_of(whole: torch.Tensor, placements: list, sizes: list[int], coordinate: tuple[int, ...]) -> torch.Tensor:
    """Return a rank's part of a DTensor: for each mesh dim in turn, take the rank's chunk of the part so far."""
    for placement, size, place in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_the_index_of_each_rank_is_that_of_its_chunk(shape: list[int], sizes: list[int], data: st.DataObject) -> None:
    dims = st.sampled_from([None, *range(len(shape))])
    drawn = [data.draw(dims) for _ in sizes]
    placements = [Replicate() if dim is None else Shard(dim) for dim in drawn]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for coordinate in product(*map(range, sizes)):
        chunk = _chunk_of(whole, placements, sizes, coordinate)
        assert torch.equal(whole[index_of(shape, placements, sizes, coordinate)], chunk)


def test_a_plain_tensor_is_its_own_part() -> None:
    tensor = torch.zeros(2, 3)
    part = LocalPart.of(tensor)
    part.tensor.fill_(1.0)
    assert (part.offset, part.shape) == ((0, 0), (2, 3))
    assert bool((tensor == 1.0).all())


def test_what_ranks_add_up_has_no_place() -> None:
    with pytest.raises(NotAvailableError, match="only shards have an index"):
        index_of((4,), [Partial()], [2], [0])
