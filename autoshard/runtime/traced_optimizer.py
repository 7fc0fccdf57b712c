"""Optimizers whose update is traced into the program of a step: SGD, Adam, AdamW and Muon of torch.optim.

This module describes their update as data (`autoshard.ir.update`). The optimizer object keeps its groups, options and
state, so schedulers and state dicts work. Only the arithmetic runs in the program of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from autoshard.errors import NotAvailableError
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.program import InputKind, OutputKind
from autoshard.ir.update import NewtonSchulz, Update, UpdateGroup, UpdateRule
from autoshard.joined_optimizer import parts_of_optimizer
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import Executable
from autoshard.runtime.known_state import KnownState, UpdateInputs
from autoshard.runtime.loss_scale import LossScale
from autoshard.runtime.members import Members
from autoshard.runtime.optimizer_state import check_parameters, follow_replaced
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from autoshard.runtime.steps_taken import StepsTaken

_LOGGER = logging.getLogger(__name__)

_SGD_HYPER = ("lr", "weight_decay", "momentum", "dampening", "first")
_ADAM_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
_MUON_HYPER = ("lr", "weight_decay", "momentum")
_NEED_GRADIENTS = attrgetter("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_TRACED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon)


def why_untraced(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer's update cannot be traced, as a sentence; None if it can."""
    return next(filter(None, map(_why_untraced, parts_of_optimizer(optimizer))), None)


def _why_untraced(optimizer: torch.optim.Optimizer) -> str | None:
    name = type(optimizer).__name__
    if type(optimizer) not in _TRACED:
        return f"{name} is none of {', '.join(kind.__name__ for kind in _TRACED)}, whose updates are traced."
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True."
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    if any(item.is_complex() for item in parameters):
        return f"{name} updates complex parameters."
    if isinstance(optimizer, torch.optim.Muon) and any(map(_normalizes_momentum, optimizer.param_groups)):
        return f"{name} with nesterov=False normalizes the momentum of bfloat16 parameters itself, in torch 2.13."
    return None


def _normalizes_momentum(options: Mapping[str, Any]) -> bool:
    """Whether torch's Muon overwrites the momentum buffer, because `bfloat16()` does not copy a bfloat16 tensor."""
    return not options["nesterov"] and any(item.dtype == torch.bfloat16 for item in options["params"])


def why_by_autograd(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """Return why a step must leave gradients in `.grad`, for example because hooks read them; None if it need not.

    `named` are the model's parameters with their names.
    """
    for item in {optimizer, *parts_of_optimizer(optimizer)}:
        if item._optimizer_step_pre_hooks or item._optimizer_step_post_hooks:
            return f"{type(item).__name__} has hooks on its step"
    named = list(named)
    if all(map(is_, chain.from_iterable(map(_NEED_GRADIENTS, (item for _, item in named))), repeat(None))):
        return None
    for name, parameter in named:
        if parameter.grad is not None:
            return f"parameter {name!r} already has a gradient, to which the step adds its own"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"parameter {name!r} has hooks on its gradient"
    return None


def describe_update(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    max_grad_norm: float | None,
    steps_taken: StepsTaken | None = None,
    *,
    returns_norm: bool = False,
    scales_loss: bool = False,
) -> Update:
    """Return the update of a traced optimizer as data, from which the update is traced.

    Parameters of one group with unequal numbers of steps form separate groups.

    Args:
        optimizer: the optimizer.
        names: `id` of a parameter → its name.
        max_grad_norm: gradients are scaled down to this norm over all parameters; None: no clipping.
        steps_taken: the counts of steps; default: read them now.
        returns_norm: whether the step returns the norm of its gradients even without clipping.
        scales_loss: whether the step scales the loss, and the update removes the scale from gradients.

    Raises:
        TraceError: the optimizer has a parameter without a name.
    """
    check_parameters(optimizer, names)
    steps_taken = steps_taken or StepsTaken(optimizer)
    groups = []
    for rule, options in zip(_rules_of(optimizer), optimizer.param_groups, strict=True):
        members: dict[float, list[str]] = {}
        for parameter in options["params"]:
            members.setdefault(steps_taken.of(parameter), []).append(names[id(parameter)])
        groups += [UpdateGroup(rule, tuple(found)) for found in members.values()]
    norm = None if max_grad_norm is None else float(max_grad_norm)  # a number of NumPy is no constant of a graph
    return Update(type(optimizer).__name__, tuple(groups), norm, returns_norm, scales_loss)


def names_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Return a dict from the `id` of each parameter to its name."""
    return {id(parameter): name for name, parameter in named}


def _rules_of(optimizer: torch.optim.Optimizer) -> list[UpdateRule]:
    """Return the update rule of each group of an optimizer, in the order of the groups."""
    parts = parts_of_optimizer(optimizer)
    return [_rule_of(item, options) for item in parts for options in item.param_groups]


def _rule_of(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> UpdateRule:
    if isinstance(optimizer, torch.optim.Muon):
        adjust = options["adjust_lr_fn"] or "original"
        a, b, c = map(float, options["ns_coefficients"])
        whole = NewtonSchulz((a, b, c), options["ns_steps"], options["eps"], adjust, bool(options["nesterov"]))
        return UpdateRule("muon_update", ("momentum_buffer",), (), _MUON_HYPER, whole)
    maximize = bool(options["maximize"])
    if isinstance(optimizer, torch.optim.SGD):
        if options["momentum"] == 0:
            return UpdateRule("sgd_update", (), (maximize,), _SGD_HYPER)
        flags = (bool(options["nesterov"]), maximize)
        return UpdateRule("momentum_update", ("momentum_buffer",), flags, _SGD_HYPER)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(options.get("decoupled_weight_decay"))
    moments = ("exp_avg", "exp_avg_sq")
    if options["amsgrad"]:
        return UpdateRule("amsgrad_update", (*moments, "max_exp_avg_sq"), (decoupled, maximize), _ADAM_HYPER)
    return UpdateRule("adam_update", moments, (decoupled, maximize), _ADAM_HYPER)


class TracedState:
    """Passes the state and options of a traced optimizer to programs, and stores the results in the optimizer.

    Args:
        optimizer: a traced optimizer over parameters of the model.
        engine: the engine that runs the programs.
        max_grad_norm: gradients are scaled down to this norm over all parameters; None: no clipping.
        returns_norm: whether steps return the norm of their gradients even without clipping.
        loss_scale: the scale of the loss; None: the loss is not scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        max_grad_norm: float | None,
        *,
        returns_norm: bool,
        loss_scale: LossScale | None,
    ) -> None:
        self.optimizer = optimizer
        self._steps_taken = StepsTaken(optimizer)
        self._engine = engine
        self.max_grad_norm = max_grad_norm
        self._returns_norm = returns_norm
        self._loss_scale = loss_scale
        self._known: KnownState | None = None

    def update(self, members: Members) -> Update:
        """Return the optimizer's update at the present step, as data. `members` has the model's parameters."""
        known, rules = self._known, _rules_of(self.optimizer)
        if known is None or not known.is_current(members) or not self._steps_taken.are_as_counted():
            follow_replaced(self.optimizer)
            known = self._known = KnownState(self.optimizer, members)
        if known.update is not None and known.rules == rules and known.update.max_grad_norm == self.max_grad_norm:
            return known.update
        update = describe_update(
            self.optimizer,
            members.names,
            self.max_grad_norm,
            self._steps_taken,
            returns_norm=self._returns_norm,
            scales_loss=self._loss_scale is not None,
        )
        known.rules = rules
        known.update = update if self._steps_taken.are_counted_together(known.parameters) else None
        return update

    def hold(self, executable: Executable) -> Mapping[int, list[torch.Tensor]]:
        """Return the inputs of the update of each stage that this process runs, by stage number.

        The inputs are the stage's parameters, optimizer state and options, in the order of `Executable.read_by_update`.
        State is sharded as the program needs it, and new state is zeros.
        """
        held = self._present.inputs_of(executable)
        found = self._find(executable) if held is None else held.tensors
        for number, program in executable.stages.items():
            for index, group in program.options_by_update:
                found[number][index] = self._hyper(program, group)
            for index in program.unscale_by_update:
                found[number][index] = self._unscale()
        return found

    def keep(self, executable: Executable, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """After a step, store its state tensors in the optimizer if they are new, and count the step.

        The optimizers of all ranks list the same state and count the same steps. A rank's optimizer has the values of
        the stages that the rank runs. `tensors` is the result of `hold`.
        """
        held, parameters = self._present.inputs_of(executable), self._present.members.parameters
        if held is not None and held.are_counted_together:
            self._steps_taken.count_again()
            return
        self._steps_taken.count([parameters[name] for name in _updated_by(executable)])
        if held is not None:
            return
        for number, program in executable.stages.items():
            for slot, tensor in zip(program.read_by_update, tensors[number], strict=True):
                if slot.slot.kind is InputKind.STATE:
                    state_name, owner = self._owner(slot)
                    self.optimizer.state[owner][state_name] = tensor
        for slot in self._missing_elsewhere(executable):
            state_name, owner = self._owner(slot)
            self.optimizer.state[owner][state_name] = self._engine.zeros(slot, owner)

    def _missing_elsewhere(self, executable: Executable) -> list[LocalSlot]:
        """Return the slots of state of other ranks' stages that this rank's optimizer has no placeholder for."""
        slots = [slot for lowered in executable.elsewhere for slot in lowered.inputs]
        owners = [(slot, *self._owner(slot)) for slot in slots if slot.slot.kind is InputKind.STATE]
        return [
            slot
            for slot, state_name, owner in owners
            if state_name not in (state := self.optimizer.state.get(owner, {})) or not is_elsewhere(state[state_name])
        ]

    def _owner(self, slot: LocalSlot) -> tuple[str, nn.Parameter]:
        """Return the kind of state in a slot, such as "exp_avg", and the parameter whose state it is."""
        state_name, _, owner = slot.slot.name.partition(":")
        return state_name, self._present.members.parameters[owner]

    @property
    def _present(self) -> KnownState:
        assert self._known is not None, "a step begins with `update`"
        return self._known

    def _find(self, executable: Executable) -> Mapping[int, list[torch.Tensor]]:
        """Return the tensors that `hold` returns, with placeholders for options.

        If the optimizer holds all of them, remember them for later steps.
        """
        known, parameters = self._present, self._present.members.parameters
        tensors: dict[int, list[torch.Tensor]] = {number: [] for number in executable.stages}
        are_all_held = not self._missing_elsewhere(executable)
        for number, slot in ((n, slot) for n, program in executable.stages.items() for slot in program.read_by_update):
            match slot.slot.kind:
                case InputKind.PARAMETER:
                    tensors[number].append(parameters[slot.slot.name])
                case InputKind.STATE:
                    state_name, owner = self._owner(slot)
                    found = self.optimizer.state.get(owner, {}).get(state_name)
                    laid_out = self._engine.zeros(slot) if found is None else self._engine.lay_out(found, slot)
                    tensors[number].append(laid_out)
                    are_all_held &= laid_out is found
                case _:
                    tensors[number].append(_NO_OPTIONS)
        if are_all_held:
            updated = [parameters[name] for name in _updated_by(executable)]
            known.remember(executable, UpdateInputs(tensors, self._steps_taken.are_counted_together(updated)))
        return tensors

    def _unscale(self) -> torch.Tensor:
        assert self._loss_scale is not None, "the program was traced for a scaled loss"
        return torch.full((), self._loss_scale.inverse, dtype=torch.float32, device=self._engine.device)

    def _hyper(self, executable: Executable, number: int) -> torch.Tensor:
        """Return the present options of group `number` of the program's update, float64 [options]."""
        update = executable.compiled.update
        assert update is not None, "a program with hyper-parameters was traced for an update"
        group = update.groups[number]
        name = next(name for name in group.parameters if name in executable.updated_parameters)
        parameter = self._present.members.parameters[name]
        steps = self._steps_taken.of(parameter)
        options = {**self._options(parameter), "first": float(steps == 0), "step": steps}
        if "betas" in options:
            options["beta1"], options["beta2"] = options["betas"]
        return torch.tensor([float(options[name]) for name in group.rule.hyper], dtype=torch.float64)

    def _options(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        groups: Sequence[dict[str, Any]] = self.optimizer.param_groups
        return next(group for group in groups if any(item is parameter for item in group["params"]))


def _updated_by(executable: Executable) -> list[str]:
    """Return the names of the parameters that a program updates, in the stages of all ranks, sorted."""
    kind = OutputKind.PARAMETER_UPDATE
    slots = (slot.slot for lowered in executable.elsewhere for slot in lowered.outputs)
    own = (program.updated_parameters for program in executable.stages.values())
    return sorted({slot.name for slot in slots if slot.kind == kind}.union(*own))


_NO_OPTIONS = torch.empty(0)
"""A placeholder for a vector of options; each step replaces it by the present options."""


def update_of(
    optimizer: torch.optim.Optimizer | None,
    model: nn.Module,
    max_grad_norm: float | None,
    *,
    strict: bool,
    returns_norm: bool = False,
    scales_loss: bool = False,
) -> Update | None:
    """Return an optimizer's update as data. Without an optimizer, return None.

    If the update is not traced, log a warning and return None.

    Raises:
        NotAvailableError: `strict` is true, and the update is not traced.
    """
    if optimizer is None:
        return None
    reason = why_untraced(optimizer)
    if reason is None:
        names = names_of(model.named_parameters())
        return describe_update(optimizer, names, max_grad_norm, returns_norm=returns_norm, scales_loss=scales_loss)
    if strict:
        raise NotAvailableError(
            f"strict=True, but optimizer={type(optimizer).__name__} is not part of the program: {reason} With "
            "strict=False it takes its own step on the sharded parameters, and its state is sharded as they are."
        )
    _LOGGER.warning("the optimizer takes its own step, and its state is sharded as the parameters are: %s", reason)
    return None
