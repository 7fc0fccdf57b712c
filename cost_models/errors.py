"""Errors of the cost models. Messages about unknown hardware or operators say how to add them."""

from __future__ import annotations


class CostModelError(Exception):
    """Base class of all errors of the cost models."""


class UnknownHardwareError(CostModelError, LookupError):
    """The data files lack a device, a node type, or one of its numbers."""


class UnknownOperatorError(CostModelError, LookupError):
    """An operator that contracts its operands has no cost formula."""


class HardwareFileError(CostModelError, ValueError):
    """A hardware TOML file is malformed, or a constant in it lacks value, unit, source or date."""


class TopologyError(CostModelError, ValueError):
    """A mesh or cluster shape is impossible."""


class CostArgumentError(CostModelError, ValueError):
    """An argument of a cost model is impossible, e.g. a negative number of bytes, or an unknown pipeline schedule."""
