"""Modules that are trained beside adapters."""

from torch import nn


class AuxiliaryTrainingWrapper(nn.Module):
    """A module that stands for another, which is trained otherwise."""
