"""Errors for users: one class per kind of mistake, each derived from `AutoshardError`.

A message names the request, the found value (`name=repr`), the place (node and source line), and the way out.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class AutoshardError(Exception):
    """Base class of all errors in `autoshard.errors`, so `except autoshard.AutoshardError` catches each of them.

    `autoshard.vectorise` raises another error, `cost_models.errors.CostArgumentError`, a `ValueError`.
    """


class MeshError(AutoshardError):
    """A mesh is malformed, or does not match the processes of the run or the devices of a cluster.

    A malformed `autoshard.testing.Link` raises this error too.
    """


class InvalidSpecError(AutoshardError):
    """A partition spec, an entry of `constraints`, or the notation of a sharding rule is invalid.

    For example, a spec names an axis twice, an axis that the mesh lacks, or more dims than the tensor has.
    `Plan.explain` raises this error for an unknown value, and `Plan.why_not` for an unknown feature.
    """


class TraceError(AutoshardError):
    """A model cannot be captured as a graph, or an argument of a public function has the wrong type.

    The message names the line of the model and a change that avoids the error. The limits are in
    docs/reference/tracing.md.
    """


class ChangedInPlaceError(AutoshardError, RuntimeError):
    """Your code changed a parameter, buffer or input in place after the forward, and the backward needs its old value.

    Call `backward` before the change, or change a clone of the tensor.
    """


class NoShardingRuleError(AutoshardError):
    """An operator has no sharding rule, and `strict=True` forbids to run the operator whole on every rank.

    Add a rule with `autoshard.sharding_rule` or `autoshard.infer_rule`, or pass `strict=False`.
    """


class OperatorError(AutoshardError, ValueError):
    """An operator name is unknown or ambiguous, has a rule already, or does not accept the given arguments."""


class RuleInferenceError(AutoshardError):
    """`infer_rule` cannot infer a sharding rule; write the rule by hand with `autoshard.sharding_rule`.

    The operator is random, writes to an operand, returns no tensors, or fails on most generated operands. Or the sample
    has tensors without data (meta device).
    """


class DoesNotFitError(AutoshardError):
    """No plan was found that fits in the memory of a device, or in `memory_budget`.

    Use more devices, a smaller batch or fewer constraints, or leave `recompute` in a recipe None. `smallest_bytes` is
    the smallest memory per device, in bytes, for which the search knows a plan or recipe; 0 if it knows none.
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
    """A plan does not belong to the model, the mesh, the inputs or another argument of the call.

    Also raised if the file of a plan is missing, damaged or of another schema version. Plan again with the arguments of
    the call, or leave `plan=` out.
    """


class VerificationError(AutoshardError):
    """A program is not proven to equal its traced program, or a checked value differs from one device.

    The usual cause is a bug in autoshard or a wrong custom rule. Please report the message. `compile(verify=False)`
    runs the program without a proof, so its results may be wrong.
    """


class RankMismatchError(AutoshardError):
    """Ranks of one run differ in a call, the model or torch's version, or another rank failed while this rank waited.

    The message names the values that differ, with their ranks. Build the same model on every rank, from one seed or
    one checkpoint. Then make the same calls, in the same mode, with the same inputs and hyperparameters.
    """


class LostRankError(AutoshardError):
    """Another rank of the run ended, or did not answer within the time limit.

    The cause is in the log of that rank, whose own error came first. The time limit is usually `Options(timeout_s=)`.
    Start the run again from its last checkpoint.
    """


class UnknownHardwareError(AutoshardError):
    """A `Cluster` cannot be made: its hardware is unknown, its parts do not fit together, or its file is invalid.

    For an unknown name, the message lists the known names. They are the names of the files in `cost_models/data`.
    """


class CheckpointError(AutoshardError):
    """A checkpoint cannot be written or loaded, or an argument of `Checkpoints` or its methods is invalid.

    Usual reasons are a full disk, a damaged file, and a checkpoint of another model. The message names the file or the
    argument, and the tensors.
    """


class FormulaError(AutoshardError):
    """`Plan.formula` has no answer, for one of three reasons.

    An argument is unknown, the plan does not hold its model, or the cost is not a polynomial in a size. In the last
    case, `fixed=` keeps the plan's own value of that size.
    """


class KernelError(AutoshardError):
    """A Triton kernel does not support these inputs, or does not run on this device."""


class WeightsError(AutoshardError):
    """Files of weights are damaged, or lack tensors of the model."""


class NonFiniteError(AutoshardError):
    """Under `Options(on_nonfinite="raise")`, the loss or the gradient norm of a step is infinite or NaN on some rank.

    All ranks raise it before the update, so parameters and optimizer state are those before the step.
    """


class NotAvailableError(AutoshardError):
    """An argument is out of range, or the request needs a feature that is missing here.

    The feature may be missing in this release, for this model or plan, or on this machine (a GPU, a package). The
    message names the way out.
    """
