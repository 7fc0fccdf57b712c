"""The module that `compile` returns.

A `ShardedModule` is an ordinary `nn.Module` with the submodules, parameters and buffers of the user's model
under the same names. Calling it runs a compiled program for the whole mesh; each new kind of call (input
shapes, training or evaluation, gradients or not) is compiled when it first comes, and kept.

The user's own model shares its submodules and parameters with it. In the simulator nothing about them
changes. With processes, parameters become DTensors of which each rank keeps its shard, as with FSDP's
`fully_shard`. Parameter objects stay the same from then on, so an optimizer may be built before the first
call.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, InputSlot, OutputKind, Program
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.update import Update
from autoshard.runtime.autograd import Call, ProgramFunction
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import CompiledProgram, Executable
from autoshard.runtime.parameters import digest_of, lent_parameters
from autoshard.runtime.seeds import SeedSequence
from autoshard.runtime.signature import FlatCall, describe_call, signature_of

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What to compile.

    Args:
        model: the user's model, holding plain global parameters.
        args, kwargs: example inputs, global.
        grad: whether the program needs a backward.
        all_tangents: whether each output gets a tangent, not only losses.
        placed: specs that parameters and optimizer state already have, by qualified name; empty for the first program.
        signature: text of the call, for messages.
        update: what an optimizer does; the program is then that of the whole training step.
        seed: of the call's random operators, for a model that branches on what they give.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    all_tangents: bool = False
    placed: Mapping[str, PartitionSpec] = field(default_factory=dict)
    signature: str = ""
    update: Update | None = None
    seed: torch.Tensor | None = None


class Compiler(Protocol):
    """Traces, plans and lowers; given by `autoshard.api`, which may import what the runtime may not."""

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """The program for a call. Called by all ranks."""
        ...

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a program whose trace relied on values serves these inputs; `state` has what its guards read."""
        ...


class ShardedModule(nn.Module):
    """A model that runs on all ranks of a mesh. Made by `autoshard.compile`; see the module's docstring.

    Attributes that this class does not have are read from the user's model (`sharded.config`). A method
    found so runs the user's own code, which does not use the compiled program.
    """

    def __init__(self, model: nn.Module, engine: Engine, compiler: Compiler) -> None:
        super().__init__()
        engine.adopt(model)
        self._original = (model,)  # in a tuple, so that it is no submodule of its own
        self._engine = engine
        self.compiler = compiler
        self._executables: dict[Hashable, list[Executable]] = {}
        self._placed: dict[str, PartitionSpec] = {}
        self._last: Executable | None = None
        self.seeds = SeedSequence()
        self.training = model.training
        self._share_members(model)

    def _share_members(self, model: nn.Module) -> None:
        for name, child in model.named_children():
            self._modules[name] = child
        for name, parameter in model.named_parameters(recurse=False, remove_duplicate=False):
            self._parameters[name] = parameter
        persistent = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers(recurse=False, remove_duplicate=False):
            self._buffers[name] = buffer
            if name not in persistent:
                self._non_persistent_buffers_set.add(name)

    @property
    def mesh(self) -> Mesh:
        """The mesh that the model runs on."""
        return self._engine.mesh

    @property
    def plan(self) -> Plan | None:
        """The plan of the program that ran last (or was compiled last), or None before there is one."""
        return None if self._last is None else self._last.compiled.plan

    @property
    def program(self) -> CompiledProgram | None:
        """The program that ran last (or was compiled last), or None before there is one."""
        return None if self._last is None else self._last.compiled

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """Every program compiled so far."""
        return tuple(item.compiled for known in self._executables.values() for item in known)

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """Where parameters lie, by qualified name; empty until the first program is planned."""
        names = {name for name, _ in self.named_parameters()}
        return {name: spec for name, spec in self._placed.items() if name in names}

    @property
    def engine(self) -> Engine:
        """Where the programs run."""
        return self._engine

    def train(self, mode: bool = True) -> ShardedModule:
        """See `nn.Module.train`."""
        self._original[0].train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """Members of this module, then attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            return getattr(original[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program; arguments and result are the model's own, with global shapes."""
        executable, call = self._find(FlatCall.of(args, kwargs))
        tensors = self.gather_inputs(executable, call)
        again = Call(executable, lambda: self._find_with_all_tangents(call, _seed_among(executable, tensors)))
        outputs = ProgramFunction.apply(again, *tensors)
        return self.hand_out(executable, outputs)

    def compile_for(self, *args: Any, **kwargs: Any) -> Plan | None:
        """Compile the program for a call now, without running it; returns its plan."""
        executable, _ = self._find(FlatCall.of(args, kwargs))
        return executable.compiled.plan

    def _wants_grad(self, call: FlatCall) -> bool:
        tensors = (*self.parameters(), *call.tensors.values())
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def find_step(self, args: Sequence[Any], kwargs: Mapping[str, Any], update: Update) -> tuple[Executable, FlatCall]:
        """The program of a whole training step, compiled now if there is none, and the call as it flattens it."""
        with torch.enable_grad():
            return self._find(FlatCall.of(args, kwargs), update)

    def _find(self, call: FlatCall, update: Update | None = None) -> tuple[Executable, FlatCall]:
        """The program for a call, compiled now if there is none, and the call as the program flattens it."""
        grad = self._wants_grad(call)
        for executable in self._known(call, grad, update=update):
            if self._serves(executable, call, update):
                self._last = executable
                return executable, call
        executable = self._compile(call, grad, all_tangents=False, update=update)
        call = call.flattened_again()  # tracing may have made more types known to pytrees
        self._known(call, grad, update=update).append(executable)
        self._last = executable
        return executable, call

    def _find_with_all_tangents(self, call: FlatCall, seed: torch.Tensor | None) -> Executable:
        """The program for a call in which each output has a tangent; `seed` is what the call drew."""
        known = self._known(call, grad=True, all_tangents=True)
        for executable in known:
            if self._serves(executable, call, seed=seed):
                return executable
        with torch.enable_grad():
            known.append(self._compile(call, grad=True, all_tangents=True, seed=seed))
        return known[-1]

    def _known(
        self, call: FlatCall, grad: bool, all_tangents: bool = False, update: Update | None = None
    ) -> list[Executable]:
        key = (signature_of(call, self._original[0], grad=grad), all_tangents, update is not None)
        return self._executables.setdefault(key, [])

    def _serves(
        self, executable: Executable, call: FlatCall, update: Update | None = None, seed: torch.Tensor | None = None
    ) -> bool:
        mine = executable.compiled.update
        if update is not None and mine is not None and not mine.serves(update, executable.updated_parameters):
            return False
        program = executable.phased.lowered.traced
        if not program.guards:
            return True
        inputs = [self._engine.global_copy(tensor) for tensor in call.tensors.values()]
        slots = [slot for slot in program.read_by_guards() if slot.kind is not InputKind.INPUT]
        state = {slot.name: self._engine.global_copy(self._state(slot, seed)) for slot in slots}
        return self.compiler.guards_hold(program, inputs, state)

    def _state(self, slot: InputSlot, seed: torch.Tensor | None) -> torch.Tensor:
        """What a guard reads besides the inputs; `seed` as `_compile` takes it."""
        match slot.kind:
            case InputKind.PARAMETER:
                return self.get_parameter(slot.name)
            case InputKind.BUFFER:
                return self.get_buffer(slot.name)
        return self._next_seed() if seed is None else seed

    def _compile(
        self,
        call: FlatCall,
        grad: bool,
        all_tangents: bool,
        update: Update | None = None,
        seed: torch.Tensor | None = None,
    ) -> Executable:
        """Compile the program for a call; `seed` is what the call drew, None before it draws."""
        signature = describe_call(call, grad=grad, training=self.training)
        if self._last is not None:
            _LOGGER.info("planning anew for a call %s%s", signature, ", every output's gradient" * all_tangents)
        leaves = [self._example(leaf) for leaf in call.leaves]
        args, kwargs = call.assemble(leaves)
        seed = self._next_seed() if seed is None else seed
        model = self._original[0]
        with lent_parameters(model, self._engine.global_copy):
            self._engine.agree(lambda: _facts(model, signature, self.mesh))
            request = Request(model, args, kwargs, grad, all_tangents, dict(self._placed), signature, update, seed)
            compiled = self.compiler(request, self._engine)
        executable = Executable(compiled, self._engine)
        self._place(executable)
        executable.load()
        return executable

    def _example(self, leaf: Any) -> Any:
        """An example of an input for tracing: of its own, so that tracing leaves no trace on the user's tensor."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self._engine.global_copy(leaf).detach().requires_grad_(leaf.requires_grad)

    def _place(self, executable: Executable) -> None:
        """Lay parameters out as the first program that has them says, and remember where optimizer state lies."""
        kinds = (InputKind.PARAMETER, InputKind.STATE)
        slots = [slot for slot in executable.phased.lowered.inputs if slot.slot.kind in kinds]
        new = {slot.slot.name: slot.spec for slot in slots if slot.slot.name not in self._placed}
        self._placed.update(new)
        if new:
            self._engine.place(self._original[0], self._placed)

    def gather_inputs(self, executable: Executable, call: FlatCall) -> list[torch.Tensor]:
        """What the program takes, in order."""
        given = call.tensors
        result = []
        for slot in executable.inputs:
            name = slot.slot.name
            match slot.slot.kind:
                case InputKind.PARAMETER:
                    result.append(self.get_parameter(name))
                case InputKind.BUFFER:
                    result.append(self._buffer(name, copied=name in executable.updated_buffers))
                case InputKind.SEED:
                    result.append(self._draw_seed())
                case _:
                    result.append(given[name])
        return result

    def _buffer(self, name: str, *, copied: bool) -> torch.Tensor:
        buffer = self.get_buffer(name)
        return buffer.detach().clone() if copied else buffer

    def _draw_seed(self) -> torch.Tensor:
        self._renew_seeds()
        return self.seeds.draw().to(self._engine.device)

    def _next_seed(self) -> torch.Tensor:
        """What the call will draw if its program draws a seed."""
        self._renew_seeds()
        return self.seeds.peek().to(self._engine.device)

    def _renew_seeds(self) -> None:
        if self.seeds.is_outdated:
            self._engine.agree(lambda: {"torch.initial_seed()": str(torch.initial_seed())})
            self.seeds.restart()

    def hand_out(self, executable: Executable, outputs: Sequence[torch.Tensor]) -> Any:
        """Write buffers back, and nest the outputs as the model does."""
        program = executable.phased.lowered.traced
        leaves = dict(program.output_constants)
        for slot, output in zip(executable.outputs, outputs, strict=True):
            if slot.slot.kind == OutputKind.BUFFER_UPDATE:
                self.update_buffer(slot.slot.name, output)
            else:
                leaves[int(slot.slot.name.removeprefix("output:"))] = output
        if program.output_tree is None:
            return tuple(leaves[index] for index in sorted(leaves))
        return pytree.tree_unflatten([leaves[index] for index in range(len(leaves))], program.output_tree)

    @torch.no_grad()
    def update_buffer(self, name: str, value: torch.Tensor) -> None:
        """Give a buffer the value that a call computed for it."""
        self.get_buffer(name).copy_(value)


def _seed_among(executable: Executable, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The seed that a call drew; None where its program draws none."""
    pairs = zip(executable.inputs, tensors, strict=True)
    return next((tensor for slot, tensor in pairs if slot.slot.kind is InputKind.SEED), None)


def _facts(model: nn.Module, signature: str, mesh: Mesh) -> dict[str, str]:
    """What ranks must have in common before they compile."""
    return {
        "mesh": str(mesh),
        "torch version": torch.__version__,
        "torch.initial_seed()": str(torch.initial_seed()),
        "call": signature,
        **{f"parameter {name!r}": digest_of(parameter) for name, parameter in model.named_parameters()},
        **{f"buffer {name!r}": digest_of(buffer) for name, buffer in model.named_buffers()},
    }
