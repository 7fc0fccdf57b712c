"""The state of an optimizer by the names of parameters, so that any plan and any run can load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autoshard.checkpoints.values import Slot, StepCount
from autoshard.errors import CheckpointError
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.program import InputKind
from autoshard.joined_optimizer import parts_of_optimizer
from autoshard.runtime.sharded_module import ShardedModule

_HOW = ("foreach", "fused", "capturable", "differentiable", "param_names")
"""Options of a parameter group that choose an implementation, not the mathematics.

An optimizer that loads a state keeps its own values of these options.
"""
_STEP = "step"


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer whose state is saved and loaded by the names of its parameters.

    Args:
        parameters: the parameters by name, in the order of the optimizer's state dict.
        model: the model whose plans say how the optimizer's state is sharded; None if there are no plans.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.Tensor]
    model: ShardedModule | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module) -> NamedOptimizer:
        """Return `optimizer` with its parameters named as in `model`.

        A parameter outside the model gets a name like `#3`, by its place in the optimizer.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        every = [item for group in optimizer.param_groups for item in group["params"]]
        parameters = {names.get(id(item), f"#{number}"): item for number, item in enumerate(every)}
        return cls(optimizer, parameters, model if isinstance(model, ShardedModule) else None)

    def planned(self) -> dict[str, LocalSlot]:
        """Return the slots of optimizer state in the model's programs, by names such as `exp_avg:layers.0.weight`.

        A slot has the global shape and the spec of its tensor. Without programs the dict is empty.
        """
        programs = () if self.model is None else self.model.programs
        slots = (slot for program in programs for slot in program.phased.lowered.inputs)
        return {slot.slot.name: slot for slot in slots if slot.slot.kind is InputKind.STATE}

    def state(self) -> dict[str, Any]:
        """Return the state to save, with the names of parameters in place of torch's numbers.

        The result has five keys. "kind" is the name of the optimizer's class, and "kinds" those of a joined optimizer
        (`_kinds`). "groups" has the parameter groups. "state" has the state of each parameter. "other" has the part of
        the state that belongs to no parameter.
        """
        found, names = self.optimizer.state_dict(), list(self.parameters)
        if not found.keys() >= {"state", "param_groups"}:
            raise CheckpointError(
                f"The state_dict of {type(self.optimizer).__name__} has the keys {[*found][:4]}, without 'state' and "
                "'param_groups'. Return a result of torch.optim.Optimizer.state_dict, with your own keys beside these."
            )
        of_parameters = {key for key in found["state"] if isinstance(key, int)}  # torch numbers the parameters
        state = {names[number]: dict(found["state"][number]) for number in sorted(of_parameters)}
        other = {key: held for key, held in found["state"].items() if key not in of_parameters}
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in found["param_groups"]]
        kind, kinds = type(self.optimizer).__name__, self._kinds()
        return {"kind": kind, "kinds": kinds, "groups": groups, "state": _counted(state), "other": other}

    def _kinds(self) -> dict[str, str]:
        """Return the class of each optimizer in a `JoinedOptimizer`, by the parameters that it updates.

        For any other optimizer, the dict is empty.
        """
        parts = parts_of_optimizer(self.optimizer)
        groups = [(part, group) for part in parts for group in part.param_groups if part is not self.optimizer]
        return {name: type(part).__name__ for part, group in groups for name in self._names_in(group)}

    def check(self, saved: Mapping[str, Any], keyword: str) -> None:
        """Raise `CheckpointError` unless `saved`, a result of `state`, has the same classes over the same parameters.

        Each parameter group must also get one set of options. Tensors in `saved` may be placeholders (`Slot`).
        `keyword` is the name under which the user passed this optimizer.
        """
        kind = type(self.optimizer).__name__
        if saved["kind"] != kind:
            raise CheckpointError(f"{keyword!r} is a {kind}, and the checkpoint has the state of a {saved['kind']}.")
        there = {name for group in saved["groups"] for name in group["params"]}
        here = self.parameters.keys()
        if there != here:
            missing, strange = sorted(here - there), sorted(there - here)
            raise CheckpointError(
                f"{keyword!r} has other parameters than the checkpoint: "
                f"{missing[:4]} are not in the checkpoint, and {strange[:4]} are not in this optimizer."
            )
        kinds = saved.get("kinds", {})  # older checkpoints have none
        for name, part in self._kinds().items():
            if kinds.get(name, part) != part:
                raise CheckpointError(
                    f"{keyword!r} updates {name!r} by {part}, and the checkpoint has its state of {kinds[name]}. Join "
                    "the optimizers that were saved."
                )
        for group in self.optimizer.param_groups:
            self._options_for(group, saved["groups"])

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a result of `state` into the optimizer in place."""
        numbers = {name: number for number, name in enumerate(self.parameters)}
        state = {numbers[name]: _tensors_of(held) for name, held in saved["state"].items()}
        state |= saved["other"]
        groups = []
        for group in self.optimizer.param_groups:
            kept = {key: item for key, item in group.items() if key in _HOW}
            names = [numbers[name] for name in self._names_in(group)]
            groups.append({**self._options_for(group, saved["groups"]), **kept, "params": names})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _options_for(self, group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the options that a parameter group gets from the groups in `saved`, without those in `_HOW`.

        A group without parameters gets the options of a saved group without parameters, or keeps its own.
        Raises `CheckpointError` if the group's parameters were saved in several groups with different options.
        """
        names = self._names_in(group)
        if names:
            there = [found for found in saved if not set(names).isdisjoint(found["params"])]
        else:
            empty = [item for item in self.optimizer.param_groups if not item["params"]]
            number = next(number for number, item in enumerate(empty) if item is group)
            there = [found for found in saved if not found["params"]][number : number + 1] or [group]
        options = [{key: item for key, item in found.items() if key != "params" and key not in _HOW} for found in there]
        known = [{key: item for key, item in found.items() if not isinstance(item, Slot)} for found in options]
        if any(other != known[0] for other in known[1:]):
            raise CheckpointError(
                f"The parameters {names[:4]} are one group of the optimizer, and were saved in {len(there)} groups "
                "with different options. Make the optimizer with the saved groups."
            )
        return options[0]

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        ids = {id(item) for item in group["params"]}
        return [name for name, item in self.parameters.items() if id(item) in ids]

    def place_for(
        self,
        owner: str,
        key: str,
        shape: torch.Size,
        dtype: torch.dtype,
        planned: Mapping[str, LocalSlot],
        *,
        is_sharded: bool,
    ) -> torch.Tensor:
        """Return the tensor into which a parameter's saved state is read, sharded as the optimizer uses it.

        Args:
            owner, key: names of the parameter and of its state.
            shape, dtype: shape and dtype of the saved state.
            planned: the result of the method `planned`.
            is_sharded: whether the saved state was a DTensor.

        Returns:
            The optimizer's present tensor if its shape and dtype fit; else a new tensor.
        """
        parameter = self.parameters[owner]
        held = self.optimizer.state.get(parameter, {}).get(key)
        if isinstance(held, torch.Tensor) and held.shape == shape and held.dtype == dtype:
            return held.detach()
        slot = planned.get(f"{key}:{owner}")
        if slot is not None and self.model is not None and slot.shape == tuple(shape) and slot.dtype == dtype:
            return self.model.engine.zeros(slot, parameter)
        return _empty(parameter.detach(), shape, dtype, is_sharded=is_sharded)


def _empty(like: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *, is_sharded: bool) -> torch.Tensor:
    """Return an uninitialised tensor: sharded as the parameter `like` if the shapes are equal, otherwise whole.

    A whole tensor is a replicated DTensor if `like` is a DTensor and `is_sharded` is set.
    """
    if like.shape == shape:
        return torch.empty_like(like, dtype=dtype)
    if not (is_sharded and isinstance(like, DTensor)):
        return torch.empty(shape, dtype=dtype, device=like.device)
    whole = torch.empty(shape, dtype=dtype, device=like.device)
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _counted(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return optimizer states with each tensor that counts steps replaced by a `StepCount`."""
    tensors = [held[_STEP] for held in state.values() if _is_count(held.get(_STEP))]
    values = _values_of(tensors)
    counts = {id(item): StepCount(values[id(item)], item.dtype, item.shape) for item in tensors}
    return {
        name: {**held, _STEP: counts[id(held[_STEP])]} if id(held.get(_STEP)) in counts else held
        for name, held in state.items()
    }


def _values_of(counts: Sequence[torch.Tensor]) -> dict[int, float]:
    """Return the values of one-element tensors by the tensors' `id`. Each device is read once."""
    found: dict[int, float] = {}
    for device in {count.device for count in counts}:
        there = [count for count in counts if count.device == device]
        values = torch.stack([count.detach().reshape(()).double() for count in there]).tolist()
        found.update(zip(map(id, there), values, strict=True))
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() == 1


def _tensors_of(held: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item.tensor() if isinstance(item, StepCount) else item for key, item in held.items()}
