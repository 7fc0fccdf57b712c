"""Optimizers whose update is traced: what they do as data (`autoshard.ir.update`), and their state.

SGD, Adam and AdamW of torch.optim are. The optimizer object stays the place of groups, options and state, so that
schedulers, `state_dict` and `load_state_dict` work as ever; only its arithmetic runs in the program of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import NotAvailableError
from autoshard.ir.program import InputKind
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import Executable
from autoshard.runtime.optimizer_state import check_parameters

_LOGGER = logging.getLogger(__name__)

Held = dict[tuple[str, str], torch.Tensor]
"""What a user holds of a program's inputs, by kind and name."""

_SGD_HYPER = ("lr", "weight_decay", "momentum", "dampening", "first")
_ADAM_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
_TRACED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def why_untraced(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the update of an optimizer is not traced, one sentence; None if it is."""
    name = type(optimizer).__name__
    if type(optimizer) not in _TRACED:
        return f"{name} is none of {', '.join(kind.__name__ for kind in _TRACED)}, whose updates are traced."
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True."
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    if any(item.is_complex() for item in parameters):
        return f"{name} updates complex parameters."
    return None


def why_by_autograd(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """Why a step must have gradients in `.grad`, which the program of a whole step has not; None if it need not.

    Args:
        optimizer: one that is traced.
        named: the parameters, with their names.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{type(optimizer).__name__} has hooks on its step"
    for name, parameter in named:
        if parameter.grad is not None:
            return f"parameter {name!r} has a gradient already, to which those of the step are added"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"parameter {name!r} has hooks on its gradient"
    return None


class StepsTaken:
    """Steps that the state of each parameter has seen; of SGD, 0 before the first and 1 after it.

    A count on an accelerator is read once, which waits for the device, and followed from then on.

    Args:
        optimizer: one that is traced.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._read: dict[torch.Tensor, tuple[torch.Tensor, int, float]] = {}

    def of(self, parameter: torch.Tensor) -> float:
        """The steps of a parameter."""
        state = self._optimizer.state.get(parameter, {})
        if isinstance(self._optimizer, torch.optim.SGD):
            return float(state.get("momentum_buffer") is not None)
        step = state.get("step", 0.0)
        if not isinstance(step, torch.Tensor) or step.device.type == "cpu":
            return float(step)
        read, version, steps = self._read.get(parameter, (None, 0, 0.0))
        return steps if read is step and version == step._version else self._remember(parameter, step, float(step))

    def count(self, parameter: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Count one step more, as torch's optimizers do; `options` are those of the parameter's group."""
        steps, state = self.of(parameter) + 1.0, self._optimizer.state[parameter]
        state["step"] = step = _counted(state.get("step"), options, parameter)
        if step.device.type != "cpu":
            self._remember(parameter, step, steps)

    def _remember(self, parameter: torch.Tensor, step: torch.Tensor, steps: float) -> float:
        self._read[parameter] = (step, step._version, steps)
        return steps


def describe_update(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    max_grad_norm: float | None,
    steps_taken: StepsTaken | None = None,
) -> Update:
    """What an optimizer does, as data; parameters of a group that have taken unequally many steps are told apart.

    Args:
        optimizer: one that is traced.
        names: the name of each parameter by `id`.
        max_grad_norm: see `Update`.
        steps_taken: counts that were read before; default: they are read now.

    Raises:
        TraceError: the optimizer has a parameter without a name.
    """
    check_parameters(optimizer, names)
    steps_taken = steps_taken or StepsTaken(optimizer)
    groups = []
    for options in optimizer.param_groups:
        members: dict[float, list[str]] = {}
        for parameter in options["params"]:
            members.setdefault(steps_taken.of(parameter), []).append(names[id(parameter)])
        rule = _rule_of(optimizer, options)
        groups += [UpdateGroup(rule, tuple(found)) for found in members.values()]
    return Update(type(optimizer).__name__, tuple(groups), max_grad_norm)


def names_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """The name of each parameter by `id`."""
    return {id(parameter): name for name, parameter in named}


def _rule_of(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> UpdateRule:
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
    """The state of an optimizer as the inputs and outputs of programs.

    Args:
        optimizer: one that is traced, over parameters of `model`.
        model: whose parameters are named, now and as it may be changed.
        engine: where the programs run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, engine: Engine) -> None:
        self.optimizer = optimizer
        self.steps_taken = StepsTaken(optimizer)
        self._model = model
        self._engine = engine

    def hold(self, executable: Executable) -> Held:
        """What an update takes: parameters, state laid out as the program says (zeros if new), hyper-parameters."""
        held: Held = {}
        parameters = self._parameters()
        for slot in executable.read_by_update:
            name = slot.slot.name
            match slot.slot.kind:
                case InputKind.PARAMETER:
                    held[InputKind.PARAMETER, name] = parameters[name]
                case InputKind.STATE:
                    state_name, _, owner = name.partition(":")
                    known = self.optimizer.state.get(parameters[owner], {}).get(state_name)
                    tensor = self._engine.zeros(slot) if known is None else self._engine.lay_out(known, slot)
                    held[InputKind.STATE, name] = tensor
                case _:
                    held[InputKind.HYPER, name] = self._hyper(executable, int(name.partition(":")[2]))
        return held

    def keep(self, executable: Executable, held: Held) -> None:
        """Put what an update has written into the optimizer, and count the step."""
        parameters = self._parameters()
        if not isinstance(self.optimizer, torch.optim.SGD):
            options = {id(item): group for group in self.optimizer.param_groups for item in group["params"]}
            for parameter in map(parameters.__getitem__, sorted(executable.updated_parameters)):
                self.steps_taken.count(parameter, options[id(parameter)])
        for (kind, name), tensor in held.items():
            if kind == InputKind.STATE:
                state_name, _, owner = name.partition(":")
                self.optimizer.state[parameters[owner]][state_name] = tensor

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by each of their names: one walk, which costs less than to look each of them up."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    def _hyper(self, executable: Executable, number: int) -> torch.Tensor:
        """The vector of a group of the program: the options of its parameters, now."""
        update = executable.compiled.update
        assert update is not None, "a program with hyper-parameters was traced for an update"
        group = update.groups[number]
        name = next(name for name in group.parameters if name in executable.updated_parameters)
        parameter = self._model.get_parameter(name)
        options = dict(self._options(parameter))
        steps = self.steps_taken.of(parameter)
        if isinstance(self.optimizer, torch.optim.SGD):
            options["first"] = float(steps == 0)
        else:
            options |= {"beta1": options["betas"][0], "beta2": options["betas"][1], "step": steps}
        return torch.tensor([float(options[name]) for name in group.rule.hyper], dtype=torch.float64)

    def _options(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """The group that a parameter is in."""
        groups: Sequence[dict[str, Any]] = self.optimizer.param_groups
        return next(group for group in groups if any(item is parameter for item in group["params"]))


def _counted(step: Any, options: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """One step more, as torch's optimizers count: a scalar tensor, on the CPU but for capturable and fused ones."""
    if isinstance(step, torch.Tensor):
        return step.add_(1)
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    on_device = bool(options.get("capturable") or options.get("fused"))
    device = parameter.device if on_device else torch.device("cpu")
    return torch.full((), 1.0 if step is None else float(step) + 1.0, dtype=dtype, device=device)


def update_of(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, max_grad_norm: float | None, *, strict: bool
) -> Update | None:
    """What an optimizer does, if its update is traced; otherwise it takes its own step.

    Raises:
        NotAvailableError: under `strict`, an optimizer whose update is not traced.
    """
    if optimizer is None:
        return None
    reason = why_untraced(optimizer)
    if reason is None:
        return describe_update(optimizer, names_of(model.named_parameters()), max_grad_norm)
    if strict:
        raise NotAvailableError(
            f"strict=True, but optimizer={type(optimizer).__name__} is not part of the program: {reason} With "
            "strict=False it takes its own step on the sharded parameters, and its state lies as they do."
        )
    _LOGGER.warning("the optimizer takes its own step, and its state lies as the parameters do: %s", reason)
    return None
