"""The data of a run: each rank loads only the rows that it computes with.

By default each rank passes the whole batch and computes its part. `loader` makes a rank load its rows alone, and keeps
its place in the data; `sampler` does so for a `DataLoader` of the user's own. A rank passes a DTensor of its rows, and
the program reads the rows in place.

* `rows` says which rows a rank loads, and makes DTensors of them;
* `sources` reads datasets and streams, in workers;
* `run_loader` has `loader`, `rank_sampler` has `sampler`;
* `packing` puts several documents into a row.
"""

from autoshard.data.packing import PackedRows, document_mask, pack
from autoshard.data.rank_sampler import RankSampler, sampler
from autoshard.data.rows import Layout, RankRows
from autoshard.data.run_loader import Loader, loader

__all__ = [
    "Layout",
    "Loader",
    "PackedRows",
    "RankRows",
    "RankSampler",
    "document_mask",
    "loader",
    "pack",
    "sampler",
]
