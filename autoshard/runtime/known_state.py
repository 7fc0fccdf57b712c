"""A cache of an optimizer's tensors. It is valid while the optimizer and the model hold the same objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch

from autoshard.ir.update import Update, UpdateRule
from autoshard.runtime.executable import Executable
from autoshard.runtime.members import Members
from autoshard.runtime.per_program import PerProgram


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """The inputs of a program's update, as an earlier step found them.

    Args:
        tensors: number of a stage → its inputs, in the order of `Executable.read_by_update`. Options may be outdated.
        are_counted_together: whether the program updates exactly the parameters that `StepsTaken` counted last.
    """

    tensors: Mapping[int, list[torch.Tensor]]
    are_counted_together: bool


@dataclass(slots=True)
class KnownState:
    """The objects in an optimizer when this record was made: its groups, parameters and state tensors.

    Args:
        optimizer: the optimizer.
        members: the members of the model at that time.
        rules: the update rule of each group.
        update: the optimizer's update, if it is the same at each step; else None.
    """

    optimizer: torch.optim.Optimizer
    members: Members
    rules: list[UpdateRule] = field(default_factory=list)
    update: Update | None = None
    _groups: list[Any] = field(init=False)
    _parameters: list[torch.Tensor] = field(init=False)
    _state: Any = field(init=False)
    _entries: list[Any] = field(init=False)
    _tensors: list[Any] = field(init=False)
    _held: PerProgram[UpdateInputs] = field(default_factory=PerProgram)

    def __post_init__(self) -> None:
        self._groups = [*self.optimizer.param_groups]
        self._parameters = [*_parameters_of(self._groups)]
        self._state = self.optimizer.state
        self._entries = [*self._state.keys(), *self._state.values()]
        self._tensors = [*_tensors_in(self._state)]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates, group after group."""
        return self._parameters

    def is_current(self, members: Members) -> bool:
        """Whether the optimizer still has the same objects in the same places, and the model has the same `members`."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        return (
            members is self.members
            and state is self._state
            and _are_same(groups, self._groups)
            and _are_same([*_parameters_of(groups)], self._parameters)
            and _are_same([*state.keys(), *state.values()], self._entries)
            and _are_same([*_tensors_in(state)], self._tensors)
        )

    def inputs_of(self, executable: Executable) -> UpdateInputs | None:
        """Return the remembered inputs of a program's update; None if none are remembered."""
        return self._held.get(executable)

    def remember(self, executable: Executable, held: UpdateInputs) -> None:
        """Remember the inputs of a program's update, which are objects that the optimizer and the model hold."""
        self._held.keep(executable, held)


_parameters_in = itemgetter("params")


def _parameters_of(groups: Any) -> chain[Any]:
    return chain.from_iterable(map(_parameters_in, groups))


def _tensors_in(state: Any) -> chain[Any]:
    """Yield the items of each parameter's state in turn: a name such as "exp_avg", its value, the next name."""
    return chain.from_iterable(chain.from_iterable(map(dict.items, state.values())))


def _are_same(found: list[Any], known: list[Any]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))
