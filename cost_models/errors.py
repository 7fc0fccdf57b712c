"""Errors of the cost models: what is unknown raises, and says how to add it."""

from __future__ import annotations


class CostModelError(Exception):
    """Base of every error raised here."""


class UnknownHardwareError(CostModelError, LookupError):
    """A device, node type or number of it is not in the data files."""


class UnknownOperatorError(CostModelError, LookupError):
    """An operator that contracts its operands has no cost formula."""


class HardwareFileError(CostModelError, ValueError):
    """A hardware TOML file is malformed, or a constant in it lacks value, unit, source or date."""


class TopologyError(CostModelError, ValueError):
    """A mesh or cluster shape that cannot exist."""


class CostArgumentError(CostModelError, ValueError):
    """A negative byte, FLOP or group size, or a timeline that is not a DAG."""
