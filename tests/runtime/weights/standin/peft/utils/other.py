"""Modules that are trained beside adapters."""

from torch import nn


class AuxiliaryTrainingWrapper(nn.Module):
    """A module that wraps another, which is trained in another way."""
