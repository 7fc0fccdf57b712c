"""Checkpoints of a training run: saved asynchronously and atomically, by shards, and loaded by any number of ranks.

The files are those of torch.distributed.checkpoint. Here is the policy around them: what is saved (`state`), the copy
that training does not wait for (`snapshot`), how a checkpoint becomes complete at one moment (`folder`), how damage is
found (`manifest`), and how ranks share one outcome (`ranks`).
"""

from autoshard.checkpoints.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
