"""`TrainingState`: all objects that a checkpoint saves, such as the model, optimizers and random states."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.checkpoints.files import Stored
from autoshard.checkpoints.optimizers import NamedOptimizer
from autoshard.checkpoints.snapshot import Part, Spread, own_name, refuse_meta, suffix_of, whole_name
from autoshard.checkpoints.trees import join, slots_in, split
from autoshard.checkpoints.values import Slot
from autoshard.errors import CheckpointError
from autoshard.ir.plan import Plan
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.state import take_seeds
from autoshard.runtime.train_step import TrainStep

MODEL, OPTIMIZER = "model", "optimizer"
_PROGRESS, _RANDOM = "progress", "random"
_EXTRA = "_extra_state"
_SHOWN = 8


@runtime_checkable
class Stateful(Protocol):
    """A user's object that can be saved under a keyword."""

    def state_dict(self) -> Any:
        """Return the state to save."""

    def load_state_dict(self, state: Any) -> Any:
        """Load a result of `state_dict` in place."""


class TrainingState:
    """All objects of a run that are saved and loaded.

    Args:
        step: the result of `compile`, or a plain module.
        stateful: the user's further objects, by keyword.

    Raises:
        CheckpointError: an object lacks `state_dict` or `load_state_dict`, or a keyword is taken.
    """

    def __init__(self, step: Any, stateful: Mapping[str, Any]) -> None:
        self.model = model_of(step)
        self._step = step if isinstance(step, TrainStep) else None
        optimizers = {key: item for key, item in stateful.items() if isinstance(item, torch.optim.Optimizer)}
        taken = [MODEL, _PROGRESS, _RANDOM]
        if isinstance(step, TrainStep):
            taken.append(OPTIMIZER)
            optimizers = {OPTIMIZER: step.optimizer, **optimizers}
        self.optimizers = {key: NamedOptimizer.of(item, self.model) for key, item in optimizers.items()}
        self.others = {key: item for key, item in stateful.items() if key not in optimizers}
        for key, item in stateful.items():
            if key in taken:
                raise CheckpointError(
                    f"{key}= is always saved; pass {key}={type(item).__name__}(...) under another name."
                )
            if not isinstance(item, Stateful):
                raise CheckpointError(
                    f"{key}={type(item).__name__}(...) has no state_dict and load_state_dict, so it cannot be saved. "
                    "Pass an object that has both, such as a schedule of the learning rate."
                )

    def parts(self, at: int) -> list[Part]:
        """Return the objects to save after `at` steps, with their present states."""
        if isinstance(self.model, ShardedModule):
            self.model.model_weights.refuse_use()
        seeds = self.model.seeds.state().tolist() if isinstance(self.model, ShardedModule) else None
        scale = {} if self._step is None else self._step.loss_scale_state()
        return [
            Part(MODEL, _state_of(self.model), Spread.ALIKE),
            *(Part(key, item.state(), Spread.ALIKE) for key, item in self.optimizers.items()),
            *(Part(key, item.state_dict()) for key, item in self.others.items()),
            Part(_PROGRESS, {"step": at, "seeds": seeds, **scale}, Spread.ALIKE),
            Part(_RANDOM, _random_state(), Spread.PER_RANK),
        ]

    def wanted(self, stored: Stored, rank: int, size: int) -> dict[str, str]:
        """Return the name under which each object's state without tensors is stored, by the object's keyword.

        Raises:
            CheckpointError: nothing is saved under a keyword, or each rank saved its own state and `size` ranks are
                more or fewer.
        """
        keywords = (MODEL, *self.optimizers, *self.others, _PROGRESS)
        found = {key: _name_in(stored, key, rank, size) for key in keywords}
        return {**found, _RANDOM: own_name(whole_name(_RANDOM), rank % stored.manifest.ranks)}

    def places(self, stored: Stored, rests: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the tensors to read into, by their names in the checkpoint.

        Args:
            rests: the stored state of each object without tensors, by keyword.
            names: the result of `wanted`.

        Raises:
            CheckpointError: the checkpoint is of another model or another optimizer.
        """
        places = self._places_in_model(stored, rests[MODEL])
        for key, optimizer in self.optimizers.items():
            optimizer.check(rests[key], key)
            places |= _places_in_optimizer(stored, optimizer, rests[key])
        used = {_memory_of(tensor) for tensor in places.values()}
        for key, item in self.others.items():
            now, _ = split(key, item.state_dict())
            for slot in slots_in(rests[key]):
                name = slot.name if slot.is_sharded else slot.name.removesuffix(suffix_of(names[key]))
                place = places[slot.name] = _place(stored, slot, now.get(name), used)
                used.add(_memory_of(place))
        return places

    def _places_in_model(self, stored: Stored, rest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        if isinstance(self.model, ShardedModule):
            self.model.model_weights.check_are_placed("Checkpoints.load")
        now = self.model.state_dict()
        problems = [f"{name!r} is not in the checkpoint" for name in now if name not in rest and name != _EXTRA]
        problems += [f"{name!r} is not in the model" for name in rest if name not in now and name != _EXTRA]
        places: dict[str, torch.Tensor] = {}
        extra = {name for name in rest if name.rpartition(".")[2] == _EXTRA}
        for name, slot in rest.items():
            if not isinstance(slot, Slot) or name in extra:
                continue
            shape, dtype = stored.tensor(slot.name)
            tensor = now.get(name)
            if isinstance(tensor, torch.Tensor) and (tensor.shape, tensor.dtype) == (shape, dtype):
                refuse_meta(slot.name, tensor)
                places[slot.name] = tensor
            elif isinstance(tensor, torch.Tensor):
                problems.append(
                    f"{name!r} is {tensor.dtype} {list(tensor.shape)} in the model, "
                    f"{dtype} {list(shape)} in the checkpoint"
                )
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError(
                f"{stored.folder} holds another model: {'; '.join(problems[:_SHOWN])}{more}. Load it into the saved "
                "model, or name another folder."
            )
        used = {_memory_of(tensor) for tensor in places.values()}
        for name in extra:  # may have tensors anywhere, of any shape
            held, _ = split(f"{MODEL}.{name}", now.get(name))
            for slot in slots_in(rest[name]):
                place = places[slot.name] = _place(stored, slot, held.get(slot.name), used)
                used.add(_memory_of(place))
        return places

    def load(self, rests: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load states and tensors into the model, the optimizers and the user's objects in place.

        The random states, the scale of the loss and the number of steps done are set too. `rests` has the stored states
        without tensors, by keyword, and `tensors` the filled tensors of `places`.
        """
        state = self.model.state_dict()
        loaded = join(rests[MODEL], tensors)
        if not isinstance(self.model, ShardedModule):
            take_seeds(loaded, "", self.model)
        state.update(loaded)
        self.model.load_state_dict(state)
        for key, optimizer in self.optimizers.items():
            optimizer.load(join(rests[key], tensors))
        for key, item in self.others.items():
            item.load_state_dict(join(rests[key], tensors))
        _set_random_state(rests[_RANDOM])
        seeds = rests[_PROGRESS]["seeds"]
        if isinstance(self.model, ShardedModule) and seeds is not None:
            self.model.seeds.load(torch.tensor(seeds, dtype=torch.int64))
        if self._step is not None:
            self._step.load_loss_scale(rests[_PROGRESS])
            self._step.count_from(rests[_PROGRESS]["step"])


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict.

    The tensors of a compiled model are not detached, because detaching a DTensor is slow.
    """
    return dict(model.state_dict(keep_vars=True) if isinstance(model, ShardedModule) else model.state_dict())


def model_of(step: Any) -> nn.Module:
    """Return the module of a `TrainStep`, or `step` itself if it is a module; else raise a `CheckpointError`."""
    model = step.sharded if isinstance(step, TrainStep) else step
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"A {type(step).__name__} is not a model; pass the result of autoshard.compile, or an nn.Module."
        )
    return model


def plan_of(step: Any) -> Plan | None:
    """Return the plan of a compiled model; None for a plain module."""
    return step.plan if isinstance(step, TrainStep | ShardedModule) else None


def mesh_of(step: Any) -> str:
    """Return the mesh of a compiled model as text for people; an empty string for a plain module."""
    return str(step.mesh) if isinstance(step, TrainStep | ShardedModule) else ""


def _name_in(stored: Stored, key: str, rank: int, size: int) -> str:
    name = whole_name(key)
    if name in stored:
        return name
    if own_name(name, 0) not in stored:
        raise CheckpointError(f"{stored.folder} has nothing saved as {key}=. Leave {key}= out of load(...).")
    if stored.manifest.ranks != size:
        raise CheckpointError(
            f"{key}=: each of the {stored.manifest.ranks} ranks that saved {stored.folder} had a state of its own, but "
            f"{size} ranks load it. Leave {key}= out of load(...), and set it up for {size} ranks."
        )
    return own_name(name, rank)


def _places_in_optimizer(stored: Stored, optimizer: NamedOptimizer, rest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    places = {slot.name: _place(stored, slot, None) for slot in slots_in({**rest, "state": None})}
    planned = optimizer.planned()
    for owner, held in rest["state"].items():
        for key, slot in held.items():
            if isinstance(slot, Slot):
                shape, dtype = stored.tensor(slot.name)
                place = optimizer.place_for(owner, key, shape, dtype, planned, is_sharded=slot.is_sharded)
                places[slot.name] = place
            else:
                places |= {item.name: _place(stored, item, None) for item in slots_in(slot)}
    return places


def _place(stored: Stored, slot: Slot, now: torch.Tensor | None, used: Set[int] = frozenset()) -> torch.Tensor:
    """Return the tensor into which the stored tensor of `slot` is read.

    The result is `now`, the saved object's present tensor, if shape and dtype fit. Otherwise it is a new whole tensor.
    If other tensors are read into the memory of `now`, or elements of `now` share memory, it is a new tensor like
    `now`. `used` has the memory of all other places.
    """
    shape, dtype = stored.tensor(slot.name)
    if now is None or now.is_meta or now.shape != shape or now.dtype != dtype:
        return torch.empty(shape, dtype=dtype)
    local = now._local_tensor if isinstance(now, DTensor) else now
    has_own = _memory_of(now) not in used and local.untyped_storage().nbytes() >= local.nbytes
    return now.detach() if has_own else torch.empty_like(now)


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor, or of this rank's piece of a DTensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _random_state() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "torch": _bytes_of(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "accelerator": None if accelerator is None else _bytes_of(torch.get_device_module(accelerator).get_rng_state()),
    }


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(_tensor_of(state["torch"]))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if state["accelerator"] is not None and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(_tensor_of(state["accelerator"]))
