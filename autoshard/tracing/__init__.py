"""Tracing: a model and example inputs become a `Program`, one graph of forward and backward.

Only this folder uses private interfaces of torch.
"""

import autoshard.tracing.grouped_products  # noqa: F401  (registers its kernel)
from autoshard.tracing.calling import check_apart
from autoshard.tracing.guards import check_guards
from autoshard.tracing.initialisers import record_initialisation
from autoshard.tracing.leave_out_blocks import ModelWithGaps, leave_out_blocks, without
from autoshard.tracing.shorten import BlockList, ShortModel, shorten
from autoshard.tracing.trace import trace

__all__ = [
    "BlockList",
    "ModelWithGaps",
    "ShortModel",
    "check_apart",
    "check_guards",
    "leave_out_blocks",
    "record_initialisation",
    "shorten",
    "trace",
    "without",
]
