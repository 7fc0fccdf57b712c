"""Checkpoints of a training run: saved asynchronously and atomically, by shards, and loaded by any number of ranks.

torch.distributed.checkpoint plans which rank writes and reads which bytes (`files`). The other modules:

* `state` lists the saved objects; `trees` splits their states into tensors and the rest;
* `optimizers` names an optimizer's state by parameters;
* `values` and `contents` write states and the table of contents without pickle;
* `snapshot` copies tensors, so that training need not wait;
* `folder` makes a checkpoint complete by one rename; `manifest` finds damage;
* `ranks` gives all ranks one outcome.
"""

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.files import CheckpointReader

__all__ = ["CheckpointReader", "Checkpoints"]
