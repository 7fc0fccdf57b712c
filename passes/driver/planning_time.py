"""Estimates of how long planning takes, the same on every machine: a search that would take too long is not begun."""

from __future__ import annotations

from torch import nn

_STAGES_S, _BLOCKS_S, _ALIKE_S = 0.2, 0.05, 20.0
"""Seconds for each parameter of a model in stages, and of one whose blocks are not alike; the most of one whose blocks
are. All blocks of a Qwen3-30B-A3B, of 48 layers and 531 parameters, took 61 s of one core."""


def planning_s(model: nn.Module, *, in_stages: bool = False, are_alike: bool = True) -> float:
    """Seconds of the search for the specs of a model's step, about.

    Args:
        model: the model.
        in_stages: whether it is cut into stages.
        are_alike: whether blocks that repeat are planned once.
    """
    count = len(list(model.parameters()))
    if in_stages:
        return _STAGES_S * count
    return min(_STAGES_S * count, _ALIKE_S) if are_alike else _BLOCKS_S * count
