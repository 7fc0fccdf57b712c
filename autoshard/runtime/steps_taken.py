"""`StepsTaken` counts the steps of each parameter in the optimizer's state, as torch does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch


class StepsTaken:
    """Reads and increments the counts of steps in an optimizer's state, one for each parameter.

    SGD and Muon keep no counts. Their count is 1 if the state has a momentum buffer, else 0.

    Counts that rise together become elements of one tensor, so that one addition counts a step. The counts are read
    once, which waits for an accelerator. From then on the host tracks the counts, until other code writes to them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._uncounted: frozenset[torch.Tensor] = frozenset()
        self._read: dict[torch.Tensor, float] = {}
        self._counts: dict[torch.Tensor, torch.Tensor] = {}
        self._joined: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._more = 0.0

    def of(self, parameter: torch.Tensor) -> float:
        """Return how many steps a parameter has taken, by the optimizer's state; 0.0 without state."""
        state = self._optimizer.state.get(parameter, {})
        step = state.get("step", float(state.get("momentum_buffer") is not None))
        if isinstance(step, torch.Tensor) and self._counts.get(parameter) is step and self.are_as_counted():
            return self._read[parameter] + self._more
        return float(step)

    def are_as_counted(self) -> bool:
        """Whether no other code has written to the counts since this object did."""
        return [joined._version for joined in self._joined] == self._versions

    def are_counted_together(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether `count_again` would count a step of exactly these parameters, whose counts no other code changed."""
        state = self._optimizer.state
        are_held = all(state.get(parameter, {}).get("step") is count for parameter, count in self._counts.items())
        return are_held and self.are_as_counted() and self._counts.keys() | self._uncounted == set(parameters)

    def count_again(self) -> None:
        """Add one to the counts of the parameters that were last passed to `count`."""
        for joined in self._joined:
            joined.add_(1)
        self._more += 1.0
        self._versions = [joined._version for joined in self._joined]

    def count(self, parameters: Collection[torch.Tensor]) -> None:
        """Add one to the counts of these parameters. From then on, their counts are elements of shared tensors."""
        options = {id(item): group for group in self._optimizer.param_groups for item in group["params"]}
        self._uncounted = frozenset(item for item in parameters if "betas" not in options[id(item)])
        counted = [item for item in parameters if item not in self._uncounted]
        self._join({item: (self.of(item) + 1.0, *self._place_of(item, options[id(item)])) for item in counted})

    def _place_of(self, parameter: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.dtype, torch.device]:
        """Return dtype and device of a parameter's count, as torch chooses them.

        The count is on the CPU, except for capturable and fused optimizers.
        """
        step = self._optimizer.state[parameter].get("step")
        if isinstance(step, torch.Tensor):
            return step.dtype, step.device
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        on_device = bool(options.get("capturable") or options.get("fused"))
        return dtype, parameter.device if on_device else torch.device("cpu")

    def _join(self, counted: Mapping[torch.Tensor, tuple[float, torch.dtype, torch.device]]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter, (_, dtype, device) in counted.items():
            alike.setdefault((dtype, device), []).append(parameter)
        self._read = {parameter: steps for parameter, (steps, *_) in counted.items()}
        self._more = 0.0
        self._joined = [self._put(members, dtype, device) for (dtype, device), members in alike.items()]
        self._versions = [joined._version for joined in self._joined]
        self._counts = {parameter: self._optimizer.state[parameter]["step"] for parameter in counted}

    def _put(self, members: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the counts of parameters elements of one new tensor, and return this tensor."""
        joined = torch.tensor([self._read[parameter] for parameter in members], dtype=dtype, device=device)
        for parameter, count in zip(members, joined.unbind(), strict=True):
            self._optimizer.state[parameter]["step"] = count
        return joined
