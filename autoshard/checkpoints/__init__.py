"""Checkpoints of a training run: saved asynchronously and atomically, by shards, and loaded by any number of ranks.

torch.distributed.checkpoint plans which rank writes and reads which bytes (`files`). Around it: what is
saved (`state`), without pickle (`values`, `contents`), the copy that training does not wait for (`snapshot`), how a
checkpoint becomes complete at one moment (`folder`), how damage is found (`manifest`), and how ranks share one outcome
(`ranks`).
"""

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.files import CheckpointReader

__all__ = ["CheckpointReader", "Checkpoints"]
