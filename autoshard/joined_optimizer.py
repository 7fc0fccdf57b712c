"""`JoinedOptimizer`: several torch optimizers over separate parameters, used as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.errors import NotAvailableError, TraceError


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers over separate parameters as one: `compile(..., optimizer=JoinedOptimizer(muon, adamw))`.

    Muon updates only matrices, so another optimizer updates embeddings, norms and biases. The parameter groups of the
    joined optimizer are the same dicts as the groups of its optimizers, and all share one state. So a learning rate
    schedule of one of the optimizers works too. A new group is added to one of the optimizers.

    Args:
        optimizers: optimizers that share no parameter and have not stepped yet.

    Raises:
        TraceError: no argument is given, an argument is not a torch optimizer, or two optimizers share a parameter.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> joined = JoinedOptimizer(torch.optim.Muon([layer.weight]), torch.optim.AdamW([layer.bias]))
        >>> len(joined.param_groups)
        2
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        strange = next((item for item in optimizers if not isinstance(item, torch.optim.Optimizer)), None)
        if strange is not None or not optimizers:
            raise TraceError(
                f"JoinedOptimizer: {strange!r} is no torch optimizer. Pass optimizers, as in (muon, adamw)."
            )
        try:
            super().__init__([group for item in optimizers for group in item.param_groups], {})
        except ValueError as error:
            words = str(error).rstrip(".")
            way_out = (
                "Give each parameter to one of the optimizers."
                if "more than one parameter group" in words
                else "Make all optimizers with named_parameters(), or all without names."
            )
            raise TraceError(f"JoinedOptimizer: {words}. {way_out}") from error
        self.optimizers = tuple(part for item in optimizers for part in parts_of_optimizer(item))
        for item in self.optimizers:
            self.state.update(item.state)
        self._share()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all optimizers, with groups that were added to an optimizer later."""
        if "optimizers" not in vars(self):
            return vars(self)["param_groups"]
        return [group for item in self.optimizers for group in item.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups
        if "optimizers" in vars(self):
            self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `NotAvailableError`, because the group does not say which optimizer updates it."""
        if "optimizers" in vars(self):
            raise NotAvailableError(
                "JoinedOptimizer.add_param_group: the group does not say which optimizer updates it. Add the group to "
                "one of the optimizers: joined.optimizers[0].add_param_group(group)."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, which includes the joined optimizers."""
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state of all joined optimizers. `load_state_dict` calls this method too."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give each joined optimizer its parameter groups, and one state dict to all of them."""
        groups = vars(self)["param_groups"]
        for item in self.optimizers:
            count = len(item.param_groups)
            item.param_groups, groups = groups[:count], groups[count:]
            item.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each optimizer, and return the result of the first optimizer's step.

        Only the first optimizer calls `closure`.
        """
        first, *others = self.optimizers
        loss = first.step() if closure is None else first.step(closure)
        for item in others:
            item.step()
        return loss


def parts_of_optimizer(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of a `JoinedOptimizer`. For any other optimizer, the tuple has this optimizer alone."""
    return optimizer.optimizers if isinstance(optimizer, JoinedOptimizer) else (optimizer,)
