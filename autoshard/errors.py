"""Errors that a user can meet: one class per kind of mistake, all derived from `AutoshardError`.

A message names the user's value (`name=repr`), the place (node and source line), and the way out.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class AutoshardError(Exception):
    """Base class of every error that autoshard raises on purpose."""


class MeshError(AutoshardError):
    """A mesh is malformed, or does not match the running processes."""


class InvalidSpecError(AutoshardError):
    """A partition spec cannot be: an axis twice, an unknown axis, more dims than the tensor has."""


class TraceError(AutoshardError):
    """A model cannot be captured as a graph, or the graph does not cover the call."""


class ChangedInPlaceError(AutoshardError, RuntimeError):
    """A tensor needed by a backward was changed in place after its forward."""


class NoShardingRuleError(AutoshardError):
    """An operator has no sharding rule, and `strict=True` forbids replicating it."""


class OperatorError(AutoshardError, ValueError):
    """The argument names no operator or several, the operator already has a sharding rule, or it refuses the call."""


class RuleInferenceError(AutoshardError):
    """Running an operator reveals no sharding rule: it is random, in-place, or refuses the sampled operands."""


class DoesNotFitError(AutoshardError):
    """No plan fits in the memory limit.

    Args:
        smallest_bytes: the smallest limit known to suffice; 0 if none is known.
    """

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle the error for another process."""
        return partial(DoesNotFitError, smallest_bytes=self.smallest_bytes), self.args


class RecipeError(AutoshardError):
    """A recipe contradicts itself, or does not fit the model or the cluster."""


class PlanMismatchError(AutoshardError):
    """A plan was made for another model, mesh or input signature."""


class VerificationError(AutoshardError):
    """The lowered program could not be proven equal to the traced program."""


class RankMismatchError(AutoshardError):
    """Ranks of one run disagree about the plan, the program or package versions."""


class LostRankError(AutoshardError):
    """Another rank of the run stopped, or did not answer in time, during communication with this rank."""


class UnknownHardwareError(AutoshardError):
    """No hardware file describes a device, link or cluster of this name."""


class CheckpointError(AutoshardError):
    """A checkpoint cannot be written, is damaged, or is of another model; it names the file and the tensor."""


class FormulaError(AutoshardError):
    """A plan has no formula of this name, or a cost is no expression in the requested sizes."""


class KernelError(AutoshardError):
    """A Triton kernel does not cover the inputs, or cannot run on the device."""


class WeightsError(AutoshardError):
    """Files of weights are damaged, or do not match the model."""


class NotAvailableError(AutoshardError):
    """This release cannot do this yet, or not in this situation."""
