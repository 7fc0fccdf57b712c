"""The base class of all adapters."""

from torch import nn


class BaseTuner(nn.Module):
    """A model whose layers are replaced."""


class BaseTunerLayer(nn.Module):
    """A layer that wraps another."""
