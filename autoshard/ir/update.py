"""An optimizer's update of a model's parameters, as data, from which the update of a training step is traced.

Parameters with the same hyper-parameters and number of steps form a group. A group's hyper-parameters are one vector
input of the program, so that a schedule may change them from step to step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import sqrt
from numbers import Real
from typing import Any

from autoshard.errors import NotAvailableError


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Muon's orthogonalisation of whole matrices, with the options of `torch.optim.Muon`.

    Args:
        coefficients, steps, eps: see `autoshard.kernels.newton_schulz`.
        adjust_lr: how the learning rate depends on a matrix's shape: "original" or "match_rms_adamw".
        nesterov: whether the orthogonalised direction looks ahead by Nesterov's momentum.
    """

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    adjust_lr: str
    nesterov: bool

    def ratio(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate for a matrix [rows, columns], as `torch.optim.Muon` computes it."""
        if self.adjust_lr == "match_rms_adamw":
            return 0.2 * sqrt(max(rows, columns))
        return sqrt(max(1.0, rows / columns))


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Update rule of the parameters of a group.

    Args:
        operator: name of the update's operator in `torch.ops.autoshard`.
        state: names of a parameter's tensors of optimizer state, as in torch's optimizer ("exp_avg").
        flags: the last arguments of the operator, all bool.
        hyper: names of the hyper-parameters, in the order of the vector that holds their values.
        orthogonal: the orthogonalisation before the update; None: the update is elementwise.
    """

    operator: str
    state: tuple[str, ...]
    flags: tuple[bool, ...]
    hyper: tuple[str, ...]
    orthogonal: NewtonSchulz | None = None


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Parameters, by qualified name, with one update rule."""

    rule: UpdateRule
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update in a training step.

    Args:
        optimizer: name of the optimizer's class.
        groups: groups of parameters with their rules. Parameters in no group stay unchanged.
        max_grad_norm: norm to which the gradients of all parameters together are clipped first, or None.
        returns_norm: whether the step returns the norm of its gradients even if it does not clip them.
        scales_loss: whether the loss is scaled, so that the update removes the scale from gradients (float16).
    """

    optimizer: str
    groups: tuple[UpdateGroup, ...]
    max_grad_norm: float | None = None
    returns_norm: bool = False
    scales_loss: bool = False

    @property
    def has_norm(self) -> bool:
        """Whether the step computes the norm over all gradients, to clip them, to check them, or to return the norm."""
        return self.returns_norm or self.scales_loss or self.max_grad_norm is not None

    def group_of(self) -> Mapping[str, int]:
        """Return the index of the group of each parameter, by qualified name."""
        return {name: number for number, group in enumerate(self.groups) for name in group.parameters}

    def serves(self, other: Update, updated: Collection[str]) -> bool:
        """Whether a program that was traced for this update also performs the update `other`.

        `updated` has the names of the parameters that the program updates. Only their rules have to agree.
        """
        if (self.optimizer, self.max_grad_norm) != (other.optimizer, other.max_grad_norm):
            return False
        if (self.has_norm, self.scales_loss) != (other.has_norm, other.scales_loss):
            return False
        groups = other.group_of()
        for group in self.groups:
            names = [name for name in group.parameters if name in updated]
            numbers = {groups.get(name) for name in names}
            if len(numbers) > 1 or None in numbers:
                return False
            if any(other.groups[number].rule != group.rule for number in numbers if number is not None):
                return False
        return groups.keys() <= self.group_of().keys()


def checked_norm(max_grad_norm: Any) -> float | None:
    """Return `max_grad_norm` as a float or None; raise `NotAvailableError` unless it is a positive number, or None."""
    is_number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (is_number and float(max_grad_norm) > 0):
        raise NotAvailableError(f"max_grad_norm={max_grad_norm!r} must be a positive number.")
    return None if max_grad_norm is None else float(max_grad_norm)


def state_slot(state: str, parameter: str) -> str:
    """Return the name of the slot of a parameter's optimizer state: "exp_avg:layers.0.weight"."""
    return f"{state}:{parameter}"


def parameter_of(slot_name: str) -> str:
    """Return the parameter's name in the name of a slot of optimizer state, as made by `state_slot`."""
    return slot_name.partition(":")[2]


def names_state(pattern: str) -> bool:
    """Whether a constraint's pattern names optimizer state: "exp_avg:*.weight" does, "input:0" does not."""
    kind, colon, _ = pattern.partition(":")
    return bool(colon) and kind not in ("input", "output", "tangent", "hyper")


def hyper_slot(group: int) -> str:
    """Return the name of the slot of a group's hyper-parameters: "hyper:0"."""
    return f"hyper:{group}"


def group_of(slot_name: str) -> int:
    """Return the group's index in the name of a slot of hyper-parameters, as made by `hyper_slot`."""
    return int(slot_name.partition(":")[2])
