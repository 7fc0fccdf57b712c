"""Load only the rows that a rank computes with.

By default each rank passes the whole batch and computes its part. `sampler` makes a rank load its rows alone. The rank
passes a DTensor of these rows, and the program reads the rows in place. `rows` says which rows these are.
"""

from autoshard.data.rank_sampler import RankSampler, sampler
from autoshard.data.rows import Layout, Rows

__all__ = ["Layout", "RankSampler", "Rows", "sampler"]
