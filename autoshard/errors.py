"""Errors for users: one class per kind of mistake, each derived from `AutoshardError`.

A message names the request, the found value (`name=repr`), the place (node and source line), and the way out.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class AutoshardError(Exception):
    """Base class of every error that autoshard raises on purpose."""


class MeshError(AutoshardError):
    """A mesh is malformed, or does not match the processes that run."""


class InvalidSpecError(AutoshardError):
    """A partition spec is wrong: an axis twice, an unknown axis, or more dims than the tensor has."""


class TraceError(AutoshardError):
    """A model cannot be captured as a graph, or an argument of a public function has the wrong type.

    The message names the line of the model and a change that avoids the error. The limits are in
    docs/reference/tracing.md.
    """


class ChangedInPlaceError(AutoshardError, RuntimeError):
    """A tensor of the forward was changed in place, and the backward needs its old value."""


class NoShardingRuleError(AutoshardError):
    """An operator has no sharding rule, and `strict=True` forbids to run the operator whole on every rank."""


class OperatorError(AutoshardError, ValueError):
    """An operator name is unknown or ambiguous, has a rule already, or does not accept the given arguments."""


class RuleInferenceError(AutoshardError):
    """`infer_rule` cannot infer a sharding rule; write the rule by hand with `autoshard.sharding_rule`.

    The operator is random, writes to an operand, returns no tensors, or fails on most generated operands. Or the sample
    has tensors without data (meta device).
    """


class DoesNotFitError(AutoshardError):
    """No plan fits in the memory limit.

    `smallest_bytes` is the smallest memory limit per device for which a plan is known; 0 if there is no such plan.
    """

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by message and limit, because exceptions are unpickled without keyword arguments."""
        return partial(DoesNotFitError, smallest_bytes=self.smallest_bytes), self.args


class RecipeError(AutoshardError):
    """A field of a `Recipe` or `Runtime` is invalid, or a recipe does not fit the model, the mesh or the cluster."""


class PlanMismatchError(AutoshardError):
    """A plan was made for another model, mesh or input signature, or its file cannot be read."""


class VerificationError(AutoshardError):
    """A program is not proven to equal its traced program, or a checked value differs from one device.

    The usual cause is a bug in autoshard or a wrong custom rule. Please report the message. `compile(verify=False)`
    runs the program without a proof, so its results may be wrong.
    """


class RankMismatchError(AutoshardError):
    """Ranks of one run disagree about the plan, the program or the versions they run."""


class LostRankError(AutoshardError):
    """Another rank of the run stopped, or did not answer in time, during a communication."""


class UnknownHardwareError(AutoshardError):
    """A `Cluster` cannot be made: its hardware is unknown, its parts do not fit together, or its file is invalid.

    For an unknown name, the message lists the known names. They are the names of the files in `cost_models/data`.
    """


class CheckpointError(AutoshardError):
    """A checkpoint cannot be written, is damaged, or is of another model; the message names file and tensor."""


class FormulaError(AutoshardError):
    """A plan has no such formula, or a cost is no expression in the given sizes."""


class KernelError(AutoshardError):
    """A Triton kernel does not support these inputs, or does not run on this device."""


class WeightsError(AutoshardError):
    """Files of weights are damaged, or lack tensors of the model."""


class NonFiniteError(AutoshardError):
    """The loss or a gradient of a training step is infinite or not a number (`Options(on_nonfinite="raise")`)."""


class NotAvailableError(AutoshardError):
    """An argument is out of range, or this release or this machine does not have the requested feature."""
