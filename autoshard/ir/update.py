"""What an optimizer does to a model's parameters, as data: what is traced behind the backward of a training step.

Parameters whose updates share their hyper-parameters and have taken equally many steps form a group; a group's
hyper-parameters are one input of the program, a vector, so that a schedule may change them from step to step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from autoshard.errors import NotAvailableError


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How a parameter is updated.

    Args:
        operator: name of the update in `torch.ops.autoshard`.
        state: names of the tensors that it keeps for each parameter, as torch's optimizer calls them.
        flags: the operator's last arguments.
        hyper: names of the hyper-parameters, in the order of their vector.
    """

    operator: str
    state: tuple[str, ...]
    flags: tuple[bool, ...]
    hyper: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Parameters, by qualified name, that are updated alike."""

    rule: UpdateRule
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The update of a training step.

    Args:
        optimizer: name of the optimizer's class.
        groups: what is updated how; what is in no group stays as it is.
        max_grad_norm: gradients of all parameters together are scaled down to this norm first; None leaves them.
    """

    optimizer: str
    groups: tuple[UpdateGroup, ...]
    max_grad_norm: float | None = None

    def group_of(self) -> Mapping[str, int]:
        """The number of each parameter's group."""
        return {name: number for number, group in enumerate(self.groups) for name in group.parameters}

    def serves(self, other: Update, updated: Collection[str]) -> bool:
        """Whether a program traced for this update does what `other` asks for.

        Args:
            other: what is asked for.
            updated: the parameters that the program updates: what has no gradient is in no group's way.
        """
        if (self.optimizer, self.max_grad_norm) != (other.optimizer, other.max_grad_norm):
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


def check_norm(max_grad_norm: Any) -> None:
    """Raise `NotAvailableError` unless gradients can be clipped to this norm; None does not clip."""
    is_number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (is_number and float(max_grad_norm) > 0):
        raise NotAvailableError(f"max_grad_norm={max_grad_norm!r} must be a positive number.")


def state_slot(state: str, parameter: str) -> str:
    """The name of a slot of optimizer state: "exp_avg:layers.0.weight"."""
    return f"{state}:{parameter}"


def parameter_of(slot_name: str) -> str:
    """The parameter that a slot of optimizer state belongs to."""
    return slot_name.partition(":")[2]


def names_state(pattern: str) -> bool:
    """Whether a constraint is one on optimizer state: "exp_avg:*.weight", not "input:0" or "*.weight"."""
    kind, colon, _ = pattern.partition(":")
    return bool(colon) and kind not in ("input", "output", "tangent", "hyper")


def hyper_slot(group: int) -> str:
    """The name of the slot of a group's hyper-parameters."""
    return f"hyper:{group}"


def group_of(slot_name: str) -> int:
    """The group whose hyper-parameters a slot has."""
    return int(slot_name.partition(":")[2])
