"""The errors a user can meet: one class per kind of mistake, all derived from `AutoshardError`.

A message says what was asked, what was found (`name=repr`), where (node and the user's source line) and
what to do about it.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class AutoshardError(Exception):
    """Base of every error that autoshard raises on purpose."""


class MeshError(AutoshardError):
    """A mesh is malformed, or does not match the processes that run."""


class InvalidSpecError(AutoshardError):
    """A partition spec cannot be: an axis twice, an unknown axis, more dims than the tensor has."""


class TraceError(AutoshardError):
    """A model cannot be captured as a graph, or is called in a way that its graph does not cover."""


class ChangedInPlaceError(AutoshardError, RuntimeError):
    """A tensor that a backward needs was changed in place since its forward."""


class NoShardingRuleError(AutoshardError):
    """An operator has no sharding rule, and `strict=True` forbids running it replicated."""


class OperatorError(AutoshardError, ValueError):
    """What is named as an operator is none, or several; it has a sharding rule already; or it refuses the call."""


class RuleInferenceError(AutoshardError):
    """No sharding rule can be found by running an operator: it is random, in-place, or refuses what is drawn."""


class DoesNotFitError(AutoshardError):
    """No plan fits in the memory limit.

    Args:
        smallest_bytes: the smallest limit that is known to do; 0 where none is.
    """

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """How to send it to another process."""
        return partial(DoesNotFitError, smallest_bytes=self.smallest_bytes), self.args


class RecipeError(AutoshardError):
    """A recipe contradicts itself, or does not fit the model or the cluster that it is priced for."""


class PlanMismatchError(AutoshardError):
    """A plan was made for another model, mesh or input signature."""


class VerificationError(AutoshardError):
    """The lowered program could not be shown equal to the traced one."""


class RankMismatchError(AutoshardError):
    """Ranks of one run disagree about the plan, the program or the versions they run."""


class LostRankError(AutoshardError):
    """Another rank of the run stopped, or did not answer in time, while this one communicated with it."""


class UnknownHardwareError(AutoshardError):
    """A device, link or cluster name that no hardware file describes."""


class CheckpointError(AutoshardError):
    """A checkpoint cannot be written, is damaged, or is of another model; it names the file and the tensor."""


class FormulaError(AutoshardError):
    """A plan has no such formula, or a cost is no expression in the sizes that were asked for."""


class KernelError(AutoshardError):
    """A Triton kernel was asked for inputs that it does not cover, or on a device that cannot run it."""


class WeightsError(AutoshardError):
    """Files of weights are damaged, or do not hold what the model does."""


class NotAvailableError(AutoshardError):
    """An argument asks for what this release cannot do yet, or not here."""
