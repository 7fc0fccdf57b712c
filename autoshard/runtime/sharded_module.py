"""`ShardedModule`, the module that `compile` returns.

It has the submodules, parameters and buffers of the user's model, under the same names. A call runs a compiled program
for the whole mesh. Each new kind of call (input shapes, training or evaluation, with or without gradients) is compiled
when it first occurs, and cached.

The simulator does not change the user's model. Under `torchrun`, its parameters become DTensors, and each rank keeps
its shard, as with FSDP's `fully_shard`. Parameter objects from before `compile` forward to the DTensors
(`runtime.replaced_parameter`), so optimizers and lists that hold them keep working.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import NotAvailableError
from autoshard.ir.derivative import Derivative, Derivatives
from autoshard.ir.garbage import seldom_collecting
from autoshard.ir.loss import find_loss
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, InputSlot
from autoshard.ir.request import CompiledProgram, Request
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.update import Update
from autoshard.runtime.agreement.step_agreement import Check, StepAgreement, facts_to_compile
from autoshard.runtime.autograd import ProgramCall, run
from autoshard.runtime.changed_state import check_state
from autoshard.runtime.compiler import Compiler
from autoshard.runtime.engine import Engine
from autoshard.runtime.executable import Executable
from autoshard.runtime.executor import Executor
from autoshard.runtime.inference import in_normal_mode
from autoshard.runtime.known_programs import KnownPrograms
from autoshard.runtime.lengths import Lengths, PaddingProof
from autoshard.runtime.members import Members
from autoshard.runtime.of_model import OfModel
from autoshard.runtime.own_code import whole_parameters
from autoshard.runtime.parameters import gather_buffers, lent_parameters, outlined_parameters, refuse_new_parameters
from autoshard.runtime.results import Results
from autoshard.runtime.seeds import SeedSequence
from autoshard.runtime.signature import FlatCall, check_devices, describe_call, key_of
from autoshard.runtime.state import extra_state_of, lay_out_state, may_draw, take_seeds, write_seeds
from autoshard.runtime.weights.has_weights import HasWeights
from autoshard.runtime.weights.model_weights import Weights

_LOGGER = logging.getLogger(__name__)

MAX_PROGRAMS = 32
"""The default number of programs that a module caches: enough for a few lengths, in training and in evaluation."""


class ShardedModule(OfModel, HasWeights):
    """A model that runs on all ranks of a mesh. `autoshard.compile` makes it; call it like the user's model.

    Without `torchrun`, outputs are whole tensors. Under `torchrun`, all ranks must call together. Scalars are then
    plain, and other outputs are DTensors that the plan places. An attribute that this module lacks, such as
    `sharded.config`, is read from and set on the user's model. The user's methods (`sharded.generate`) run the user's
    code, on all ranks, with whole parameters.
    """

    @in_normal_mode
    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        compiler: Compiler,
        *,
        max_programs: int = MAX_PROGRAMS,
        lengths: Lengths | None = None,
        check: Check = Check.ALWAYS,
        outputs: Outputs = Outputs.AS_PLANNED,
        executor: Executor | None = None,
    ) -> None:
        super().__init__()
        engine.adopt(model)
        self._engine = engine
        self.compiler = compiler
        self._known = KnownPrograms(max_programs)
        self._lengths = lengths
        self._outputs = outputs
        self._executor = executor or Executor()
        self._placed: dict[str, PartitionSpec] = {}
        self._last: Executable | None = None
        self._members: Members | None = Members(model)
        self._notes: set[str] = set()
        self.results = Results(model)
        self.model_weights = Weights(model, engine, compiler)
        self.seeds = SeedSequence()
        self.agreement = StepAgreement(engine.control, check)
        self.training = model.training
        self._become(model)

    def members(self) -> Members:
        """The runtime calls this: return the modules, parameters and buffers, with buffers in DTensors gathered."""
        if self._members is None or not self._members.are_unchanged():
            if self._members is not None:
                self._members.refuse_assigned_data()
            gather_buffers(self._original[0])
            self._members = Members(self._original[0])
        return self._members

    @property
    def mesh(self) -> Mesh:
        """The mesh of `compile`; if it has an axis "pipeline", the mesh of one stage, without this axis."""
        return self._engine.mesh

    @property
    def plan(self) -> Plan | None:
        """The plan of the program that ran or was compiled last; None before the first program."""
        return None if self._last is None else self._last.compiled.plan

    @property
    def program(self) -> CompiledProgram | None:
        """The program that ran or was compiled last; None before the first program."""
        return None if self._last is None else self._last.compiled

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """The compiled programs in the cache, the least recently used first; empty before the first program."""
        return tuple(executable.compiled for executable in self._known)

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """The spec of each parameter, by its qualified name; empty until the first program is planned."""
        names = {name for name, _ in self.named_parameters()}
        return {name: spec for name, spec in self._placed.items() if name in names}

    @property
    def engine(self) -> Engine:
        """The runtime reads this: the engine that runs the programs."""
        return self._engine

    def _model_weights(self) -> Weights:
        return self.model_weights

    def train(self, mode: bool = True) -> ShardedModule:
        """Set training or evaluation mode, as `nn.Module.train` does."""
        self._original[0].train(mode)
        self.training = mode
        return self

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the user's own code reads and writes whole parameters; all ranks must enter it."""
        if self.model_weights.pipeline_rank_of and self._engine.control is not None:
            raise NotAvailableError(
                "The model's own code reads all parameters. With a process per rank, each rank holds only the "
                "parameters of its stages of the axis 'pipeline'. Call the step; or export(path), and load the model "
                "on another mesh."
            )
        return whole_parameters(self._original[0], self._engine.lay_out_like)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Return a copy with a copy of the user's model. It runs the same programs on the same ranks."""
        memo[id(self.compiler)] = self.compiler
        memo[id(self._known)] = self._known.for_a_copy()
        if self._last is not None:
            memo[id(self._last)] = self._last.for_a_copy()
        memo[id(self)] = result = type(self).__new__(type(self))
        vars(result).update(copy.deepcopy({**self.__dict__, "_members": None}, memo))
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the module's state for pickling, without programs. They are compiled again after unpickling."""
        return {**self.__dict__, "_known": KnownPrograms(self._known.most), "_last": None, "_members": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._original[0]._save_to_state_dict(destination, prefix, keep_vars)
        if self.seeds.count or may_draw(self._original[0]):
            write_seeds(destination, prefix, self.seeds)

    def get_extra_state(self) -> Any:
        """`torch.distributed.checkpoint` calls this: return the state of random numbers, or None without one."""
        return extra_state_of(self)

    @in_normal_mode
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        seeds = take_seeds(state_dict, prefix, self._original[0])
        if seeds is not None:
            self.seeds.load(seeds)
        self.model_weights.check_are_placed("load_state_dict")
        lay_out_state(state_dict, prefix, self._original[0], self._engine.lay_out_like)
        self._original[0]._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program in global shapes, on all ranks together; `Options` sets the form of the outputs."""
        with self.agreement.one_thread:
            return self._run(FlatCall.of(args, kwargs, self._outputs))

    def run_for_loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`TrainStep` calls this: run the model, and return only the loss, its first floating scalar."""
        with self.agreement.one_thread:
            return self._run(FlatCall.of(args, kwargs, Outputs.LOSS))

    def _run(self, call: FlatCall) -> Any:
        executable, call = self._find_padded(call, self.members())
        tensors = self.gather_inputs(executable, call)
        if executable.compiled.staged is not None:
            outputs = self._executor.run_forward(executable, tensors)
        else:
            outputs = run(self._call_of(executable, call, _seed_among(executable, tensors)), tensors)
        result = self.results.hand_out(executable, outputs)
        if call.outputs is Outputs.LOSS:
            return find_loss(result)
        return result if self._lengths is None else self._lengths.cut(executable, result, call)

    def _call_of(
        self, executable: Executable, call: FlatCall, seed: torch.Tensor | None, derivatives: Derivatives = ()
    ) -> ProgramCall:
        """Return a call of a program, with functions by which autograd finds further programs for the same call.

        `seed` is the seed that the call drew, or None.
        """
        state, training = executable.state, self.training

        def differentiate(derivative: Derivative, tangents: Sequence[torch.Tensor]) -> ProgramCall:
            check_state(state, was_training=training, is_training=self.training)
            arguments = (*call.assemble(call.leaves), tuple(tangents))
            of_gradients = replace(FlatCall.of(arguments, {}, call.outputs), as_compiled=call.as_compiled)
            outer = (*derivatives, derivative)
            return self._call_of(self._find_with_all_tangents(of_gradients, seed, outer), of_gradients, seed, outer)

        def with_all_tangents() -> Executable:
            check_state(state, was_training=training, is_training=self.training)
            return self._find_with_all_tangents(call, seed, derivatives)

        return ProgramCall(executable, call.tensors, with_all_tangents, differentiate)

    def _find_padded(
        self, call: FlatCall, members: Members, update: Update | None = None, *, runs: bool = True
    ) -> tuple[Executable, FlatCall]:
        """Find or compile the program for a call, padded if a proof allows padding; return it and the call to run."""
        if self._lengths is not None:
            call = self._lengths.choose(self._lengths.pad(call), lambda padded: self._kind(padded, members, update))
        return self._find(call, members, update, runs=runs)

    def _kind(self, padded: FlatCall, members: Members, update: Update | None) -> Hashable:
        """Return a key that is equal for padded calls which share one proof."""
        plain, grad = replace(padded, as_compiled=False), self._wants_grad(padded, members)
        return key_of(plain, members, grad=grad, updates=update is not None), self.training

    def compile_for(self, *args: Any, **kwargs: Any) -> Plan | None:
        """Compile a call's program without running it, on all ranks; return its plan, None for a handwritten
        program."""
        return self._compile_for(FlatCall.of(args, kwargs, self._outputs))

    def compile_for_loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """`TrainStep` calls this: compile the program of `run_for_loss` without running it, and return its plan."""
        return self._compile_for(FlatCall.of(args, kwargs, Outputs.LOSS))

    def _compile_for(self, call: FlatCall) -> Plan | None:
        with self.agreement.one_thread:
            executable, _ = self._find_padded(call, self.members(), runs=False)
        return executable.compiled.plan

    def _wants_grad(self, call: FlatCall, members: Members) -> bool:
        return torch.is_grad_enabled() and (
            members.has_trainable or any(tensor.requires_grad for tensor in call.tensors.values())
        )

    def find_step(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], update: Update | None, members: Members,
        *, runs: bool = True,
    ) -> tuple[Executable, FlatCall]:  # fmt: skip
        """`TrainStep` calls this: return the program of a whole step, compiled if new, and the padded, flattened call.

        `update` is None to leave it out. `runs` says whether the program will run, so that ranks compare its inputs.
        """
        with torch.enable_grad():
            return self._find_padded(FlatCall.of(args, kwargs, Outputs.LOSS), members, update, runs=runs)

    def _find(
        self, call: FlatCall, members: Members, update: Update | None = None, *, runs: bool = True
    ) -> tuple[Executable, FlatCall]:
        """Find or compile the program for a call; return it and the call to run.

        If no proof shows that padding changes no result, the returned call is the call without padding.
        """
        grad = self._wants_grad(call, members)
        key = key_of(call, members, grad=grad, updates=update is not None)
        if runs:
            check_devices(call.tensors, self._engine.device, {})
        self.agreement.enter(key, call.tensors if runs else {}, lambda: self._describe(call, grad))
        executable = self._known.find(key, lambda known: self._serves(known, call, update))
        self.agreement.post(executable, self.seeds)
        if executable is None or not runs:
            self.agreement.settle()
        if executable is None:
            with self.agreement.working():
                proof = self._prove(call, grad)
            if self._lengths is not None and proof is not None:
                self._say(self._lengths.learn(self._kind(call, members, update), proof))
                call = self._lengths.choose(call, lambda padded: self._kind(padded, members, update))
                if call.exact is None:
                    return self._find(call, members, update, runs=runs)
            with self.agreement.working():
                executable = self._compile(call, grad, all_tangents=False, update=update, proof=proof)
            call = call.flattened_again()  # tracing may have registered more types with pytree
            self._known.add(key_of(call, self.members(), grad=grad, updates=update is not None), executable)
        self._last = executable
        return executable, call

    def _prove(self, call: FlatCall, grad: bool) -> PaddingProof | None:
        """Search for a proof that padding changes no result of the call; None for a call without padding."""
        if self._lengths is None or call.exact is None:
            return None
        with self.requesting(call, grad) as request:
            return self._lengths.prove(self.compiler.trace, call, request)

    def _find_with_all_tangents(
        self, call: FlatCall, seed: torch.Tensor | None, derivatives: Derivatives = ()
    ) -> Executable:
        """Find or compile the program in which each output has a tangent, an input for the output's gradient.

        `seed` is the seed that the call drew, or None.
        """
        key = key_of(call, self.members(), grad=True, all_tangents=True, derivatives=derivatives)
        self.agreement.enter(key, {}, lambda: self._describe(call, grad=True))
        executable = self._known.find(key, lambda known: self._serves(known, call, seed=seed))
        self.agreement.post(executable, self.seeds)
        self.agreement.settle()
        if executable is None:
            with torch.enable_grad(), self.agreement.working():
                executable = self._compile(call, grad=True, all_tangents=True, seed=seed, derivatives=derivatives)
            self._known.add(key, executable)
        return executable

    def _serves(
        self, executable: Executable, call: FlatCall, update: Update | None = None, seed: torch.Tensor | None = None
    ) -> bool:
        if not executable.has_update(update) or not executable.serves_state():
            return False
        if self._lengths is not None and not self._lengths.may_run(executable, call):
            return False
        program = executable.phased.lowered.traced
        if not program.guards:
            return True
        self.agreement.meet_for_guards(self.seeds)
        inputs = [self._engine.global_copy(tensor) for tensor in call.tensors.values()]
        slots = [slot for slot in program.read_by_guards() if slot.kind is not InputKind.INPUT]
        state = {slot.name: self._engine.global_copy(self._state(slot, seed)) for slot in slots}
        return self.compiler.guards_hold(program, inputs, state)

    def _state(self, slot: InputSlot, seed: torch.Tensor | None) -> torch.Tensor:
        """Return a parameter, buffer or seed that a guard reads. `seed` is None before the call draws."""
        match slot.kind:
            case InputKind.PARAMETER:
                return self.get_parameter(slot.name)
            case InputKind.BUFFER:
                return self.get_buffer(slot.name)
        return self._next_seed() if seed is None else seed

    @seldom_collecting
    @in_normal_mode
    def _compile(
        self,
        call: FlatCall,
        grad: bool,
        all_tangents: bool,
        update: Update | None = None,
        seed: torch.Tensor | None = None,
        derivatives: Derivatives = (),
        proof: PaddingProof | None = None,
    ) -> Executable:
        """Compile the program for a call. `seed` is the seed that the call drew, or None before it draws.

        If the model's Python values changed, but the trace gives a known program again, this program serves the new
        values too.
        """
        refuse_new_parameters(self._original[0], self._engine.has_adopted)
        signature = self._describe(call, grad)
        of_step = update is not None
        key = key_of(
            call, self.members(), grad=grad, updates=of_step, all_tangents=all_tangents, derivatives=derivatives
        )
        known = [item for item in self._known.of(key) if item.has_update(update)]
        if self._last is not None:
            changes = dict.fromkeys(name for item in known for name in item.state_changes())
            because = f", as {', '.join(changes)} changed" if changes else ""
            every = ", every output's gradient" * all_tangents
            _LOGGER.info("planning anew for a call %s%s%s", signature, every, because)
        model = self._original[0]
        self._engine.agree(lambda: facts_to_compile(model, signature, self.mesh, self._placed))
        with self.requesting(call, grad, seed) as found:
            known_programs = tuple(item.compiled for item in known)
            request = replace(
                found, all_tangents=all_tangents, update=update, known=known_programs, derivatives=derivatives
            )
            compiled = self.compiler(request, self._engine)
            executable = next((item for item in known if item.phased is compiled.phased), None)
            if executable is not None:
                self._say(executable.look_for_varying(lambda: self.compiler.trace(request)))
        if executable is None:
            executable = Executable(compiled, self._engine)
            self._place(executable)
            executable.load()
        if self._lengths is not None:
            self._lengths.keep(executable, proof)
        self._say(compiled.python.notes)
        executable.serve_state(compiled.python, [*model.parameters(), *model.buffers()])
        self.agreement.add(executable, model)
        return executable

    @contextmanager
    def requesting(self, call: FlatCall, grad: bool, seed: torch.Tensor | None = None) -> Iterator[Request]:
        """The runtime calls this: yield the compiler's request for a call. Meanwhile the model has meta parameters."""
        model = self._original[0]
        args, kwargs = call.assemble([self._example(leaf) for leaf in call.leaves])
        with outlined_parameters(model) as own:

            def values(traced: nn.Module) -> AbstractContextManager[None]:
                return lent_parameters(traced, lambda outline: self._engine.global_copy(own[outline]))

            yield Request(
                *(model, args, kwargs, grad),
                placed=dict(self._placed),
                signature=self._describe(call, grad),
                seed=self._next_seed() if seed is None else seed,
                device=self._engine.device,
                values=values,
                outputs=call.outputs,
                as_compiled=call.as_compiled,
            )

    def _say(self, notes: Iterable[str]) -> None:
        """Log each note as a warning, unless it was logged before."""
        for note in notes:
            if note not in self._notes:
                _LOGGER.warning("%s", note)
                self._notes.add(note)

    def _describe(self, call: FlatCall, grad: bool) -> str:
        return describe_call(call, grad=grad, training=self.training)

    def _example(self, leaf: Any) -> Any:
        """Return a global copy of a tensor argument, for tracing; any other argument as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        example = self._engine.global_copy(leaf).detach()
        return (example.clone() if example.is_inference() else example).requires_grad_(leaf.requires_grad)

    def _place(self, executable: Executable) -> None:
        """Shard parameters that no earlier program has; remember their specs and those of optimizer state."""
        kinds = (InputKind.PARAMETER, InputKind.STATE)
        slots = [slot for slot in executable.phased.lowered.inputs if slot.slot.kind in kinds]
        if executable.compiled.staged is not None:
            self.model_weights.assign_to_pipeline_ranks(executable.compiled.staged)
        new = {slot.slot.name: slot.spec for slot in slots if slot.slot.name not in self._placed}
        self._placed.update(new)
        if new:
            self.model_weights.place(self._placed)

    def gather_inputs(self, executable: Executable, call: FlatCall) -> list[torch.Tensor]:
        """The runtime calls this: return a program's inputs by `input_names`, once all ranks agree on the call."""
        assert self._members is not None, "the call's program is found"
        given, parameters = call.tensors, self._members.parameters
        check_devices(given, self._engine.device, executable.traced_devices)
        result = []
        for kind, name in executable.input_names:
            if kind is InputKind.PARAMETER:
                result.append(parameters[name] if name in parameters else self.get_parameter(name))
            elif kind is InputKind.BUFFER:
                result.append(self._buffer(name, copied=name in executable.updated_buffers))
            else:
                result.append(self._next_seed() if kind is InputKind.SEED else given[name])
        self.agreement.settle()
        self.model_weights.refuse_use()
        if executable.draws_seed:
            self.seeds.draw()
        return result

    def _buffer(self, name: str, *, copied: bool) -> torch.Tensor:
        buffer = self.get_buffer(name)
        return buffer.detach().clone() if copied else buffer

    def _next_seed(self) -> torch.Tensor:
        self._renew_seeds()
        return self.seeds.peek(self._engine.device)

    def _renew_seeds(self) -> None:
        if self.seeds.is_outdated:
            self.agreement.settle()
            self._engine.agree(lambda: {"torch.initial_seed()": self.seeds.describe()})
            self.seeds.renew()


def _seed_among(executable: Executable, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    pairs = zip(executable.inputs, tensors, strict=True)
    return next((tensor for slot, tensor in pairs if slot.slot.kind is InputKind.SEED), None)
