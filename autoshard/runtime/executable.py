"""`Executable`: a compiled program (forward, backward and update), or one pipeline stage of it, loaded by an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autoshard.graphs.owned_results import owned_results
from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.program import InputKind, OutputKind
from autoshard.ir.python_guards import PythonGuards, PythonUse
from autoshard.ir.python_values import MISSING
from autoshard.ir.request import CompiledProgram
from autoshard.ir.staged import crosses_stages
from autoshard.ir.update import Update, group_of
from autoshard.runtime.engine import Engine, LikeWriter, Loaded, LocalValue, Reader
from autoshard.runtime.missing_tangents import without_tangents
from autoshard.runtime.program_update import ProgramUpdate
from autoshard.runtime.reached_inputs import inputs_without_gradient
from autoshard.runtime.varying_numbers import Trace, VaryingNumbers
from autoshard.runtime.versions import Key, inputs_behind_gradients

_STATES = 8
"""The most Python states of the model that a program remembers (see `Executable`)."""


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program loaded by an engine. It runs on the user's tensors: global tensors and DTensors.

    A Python state is the set of Python values of the model (attributes, modes, hooks) that a trace read; guards compare
    it (`PythonGuards`). Executables compare by identity, so that `PerProgram` can keep values for each.

    Args:
        compiled: the program in phases, its plan, and its stages.
        engine: the engine that runs it.
        python_guards: guards of the Python states whose traces gave this program, the state used last at the end. If
            there are any, one of them must hold at a call.
        varying: numbers of the model that change from call to call.
    """

    compiled: CompiledProgram
    engine: Engine
    python_guards: list[PythonGuards] = field(default_factory=list)
    varying: VaryingNumbers = field(default_factory=VaryingNumbers)
    _served: list[Update] = field(default_factory=list)
    _backward_from: dict[frozenset[str], Loaded] = field(default_factory=dict)

    @property
    def phased(self) -> PhasedProgram:
        """The lowered program, cut into forward, backward and update."""
        return self.compiled.phased

    def for_a_copy(self) -> Executable:
        """Return this program for a copy of its model.

        It runs no call until a trace of the copy gives the same program.
        """
        return Executable(self.compiled, self.engine, [PythonGuards(of_another=True)])

    def has_update(self, update: Update | None) -> bool:
        """Whether the program updates parameters as `update` says. True if `update` or the program's update is None."""
        mine = self.compiled.update
        if update is None or mine is None or any(update is item for item in self._served):
            return True
        serves = mine.serves(update, self.updated_parameters)
        self._served[:] = [update] if serves else self._served
        return serves

    def serves_state(self) -> bool:
        """Whether the model is in a Python state of `python_guards` now. True if `python_guards` is empty.

        The state that holds becomes `state`.
        """
        for index, guards in reversed(list(enumerate(self.python_guards))):
            if guards.hold():
                self.python_guards.append(self.python_guards.pop(index))
                return True
        return not self.python_guards

    @property
    def state(self) -> PythonGuards:
        """The guards of the Python state that was last found to hold; empty guards if the program has none."""
        return self.python_guards[-1] if self.python_guards else PythonGuards()

    def state_changes(self) -> Sequence[str]:
        """Return the names of the model's Python values that now differ from `state`."""
        return self.state.changes()

    def serve_state(self, use: PythonUse, registered: Iterable[torch.Tensor]) -> None:
        """Add the model's present Python state to the states that this program serves. At most `_STATES` are kept.

        A trace of the model in this state gave this program. `use` has the values that the trace read, and `registered`
        the parameters and buffers of the model.
        """
        del self.python_guards[: -_STATES + 1]
        self.python_guards.append(self.varying.guards(use, registered))

    def look_for_varying(self, trace: Trace) -> Iterator[str]:
        """Find numbers of the model that change from call to call, after a trace gave this program again.

        Yield notes to log.
        """
        return self.varying.look(self.python_guards, self.compiled.fingerprint, trace)

    def set_attributes(self) -> None:
        """Set the model's plain attributes as its own call does, to the values that the trace of `state` set."""
        for holder, name, value in self.state.settings:
            if vars(holder).get(name, MISSING) is not value:
                setattr(holder, name, value)

    @cached_property
    def digest(self) -> str:
        """A hash of the program's text, equal on all ranks."""
        return self.phased.digest() if self.compiled.staged is None else self.compiled.staged.digest()

    @property
    def stages(self) -> Mapping[int, Executable]:
        """The programs of the pipeline stages that this process runs, by stage number.

        A program without stages is stage 0.
        """
        return {0: self} if self.compiled.staged is None else self._own_stages

    @cached_property
    def _own_stages(self) -> Mapping[int, Executable]:
        staged, update = self.compiled.staged, self.compiled.update
        assert staged is not None, "the program is cut into stages"
        programs = {number: staged.stages[number] for number in self.compiled.own_stages}
        return {
            number: Executable(CompiledProgram(stage.phased, stage.plan, update=update), self.engine)
            for number, stage in programs.items()
        }

    @cached_property
    def elsewhere(self) -> tuple[LoweredProgram, ...]:
        """The lowered programs of the pipeline stages that other processes run, in the order of stages."""
        stages = () if self.compiled.staged is None else self.compiled.staged.stages
        return tuple(stage.phased.lowered for n, stage in enumerate(stages) if n not in self.compiled.own_stages)

    def by_stage(self, tensors: Sequence[torch.Tensor]) -> dict[int, Sequence[torch.Tensor]]:
        """Return the forward inputs of each stage of this process, by stage number, except inputs from other stages.

        `tensors` has the inputs of the whole program, in the order of `input_names`.
        """
        if self.compiled.staged is None:
            return {0: tensors}
        given = dict(zip(self.input_names, tensors, strict=True))
        return {
            number: [given[key] for key in program.input_names if not crosses_stages(key[1])]
            for number, program in self._own_stages.items()
        }

    @cached_property
    def draws_seed(self) -> bool:
        """Whether the forward has a seed as an input, because the program draws random numbers."""
        return any(slot.slot.kind is InputKind.SEED for slot in self.inputs)

    @cached_property
    def inputs(self) -> tuple[LocalSlot, ...]:
        """The slots of the forward's inputs, in order."""
        return tuple(self.phased.lowered.inputs[index] for index in self.phased.forward_inputs)

    @cached_property
    def crossing_inputs(self) -> tuple[tuple[int, LocalSlot], ...]:
        """Position in `inputs`, and slot, of each input of the forward that another stage sends."""
        return tuple((place, slot) for place, slot in enumerate(self.inputs) if crosses_stages(slot.slot.name))

    @cached_property
    def given_inputs(self) -> tuple[LocalSlot, ...]:
        """The slots of the forward's inputs, in order, without the inputs that other stages send."""
        return tuple(slot for slot in self.inputs if not crosses_stages(slot.slot.name))

    @cached_property
    def input_names(self) -> tuple[Key, ...]:
        """Kind and name of each input of the forward, in order."""
        return tuple((InputKind(slot.slot.kind), slot.slot.name) for slot in self.inputs)

    @cached_property
    def traced_devices(self) -> Mapping[str, str]:
        """The device type on which each input was traced, such as "cpu", by the input's name."""
        traced = self.phased.lowered.traced
        names = {slot.node: slot.name for slot in traced.inputs if slot.kind is InputKind.INPUT}
        nodes = traced.graph_module.graph.find_nodes(op="placeholder")
        return {names[node.name]: node.meta["val"].device.type for node in nodes if node.name in names}

    @cached_property
    def outputs(self) -> tuple[LocalSlot, ...]:
        """The slots of the forward's results, in order: outputs and buffer updates."""
        return tuple(self.phased.lowered.outputs[index] for index in self.phased.forward_outputs)

    @cached_property
    def tangents(self) -> tuple[LocalSlot, ...]:
        """The slots of the backward's tangents (gradients of outputs), in order."""
        return tuple(self.phased.lowered.inputs[index] for index in self.phased.backward_inputs)

    @cached_property
    def gradients(self) -> tuple[LocalSlot, ...]:
        """The slots of the gradients that the backward returns, except those that it passes on to the update."""
        return tuple(self.phased.lowered.outputs[index] for index in self.phased.backward_outputs)

    @cached_property
    def read_by_backward(self) -> dict[str, frozenset[Key]]:
        """Name of a gradient's parameter or input → kind and name of forward inputs that the backward reads for it."""
        return inputs_behind_gradients(self.phased.lowered.traced)

    @cached_property
    def without_gradient(self) -> tuple[int, ...]:
        """Positions in `inputs` of those that get no gradient, whichever output a backward starts from."""
        found = inputs_without_gradient(self.phased.lowered.traced)
        return tuple(place for place, key in enumerate(self.input_names) if key in found)

    @cached_property
    def updated_buffers(self) -> frozenset[str]:
        """Names of the buffers that the forward changes."""
        return frozenset(slot.slot.name for slot in self.outputs if slot.slot.kind == OutputKind.BUFFER_UPDATE)

    @cached_property
    def _hoisted(self) -> Loaded | None:
        return None if self.phased.hoisted is None else self.engine.load(self.phased.hoisted)

    @cached_property
    def _read_by_hoisted(self) -> tuple[int, ...]:
        """Positions in `given_inputs` of the inputs of `hoisted`, a graph that runs once per step on parameters."""
        slots = self.phased.lowered.inputs
        given = [index for index in self.phased.forward_inputs if not crosses_stages(slots[index].slot.name)]
        return tuple(map(given.index, self.phased.hoisted_inputs))

    @cached_property
    def _forward(self) -> Loaded:
        return self.engine.load(self.phased.forward)

    @cached_property
    def _backward(self) -> Loaded:
        return self.engine.load(self.phased.backward)

    @cached_property
    def _adding_backward(self) -> Loaded | None:
        return self.engine.load_adding(self.phased.backward, self.owned_gradients)

    @cached_property
    def owned_gradients(self) -> tuple[bool, ...]:
        """For each gradient that the backward passes on to the update, whether it may be written over."""
        return owned_results(self.phased.backward.graph)[len(self.gradients) :]

    @cached_property
    def _read_inputs(self) -> Reader:
        return self.engine.reader(self.given_inputs)

    @cached_property
    def _write_gradients(self) -> LikeWriter:
        return self.engine.like_writer(self.gradients)

    @cached_property
    def updated(self) -> tuple[LocalSlot, ...]:
        """The slots of the parameters and the optimizer state that the update returns, in order."""
        return tuple(self.phased.lowered.outputs[index] for index in self.phased.update_outputs)

    @cached_property
    def read_by_update(self) -> tuple[LocalSlot, ...]:
        """The slots that the update reads besides gradients, in order: parameters, optimizer state and options."""
        return tuple(self.phased.lowered.inputs[index] for index in self.phased.update_inputs)

    @cached_property
    def options_by_update(self) -> tuple[tuple[int, int], ...]:
        """For each vector of an optimizer group's options, its position in `read_by_update` and the group's number."""
        slots = enumerate(slot.slot for slot in self.read_by_update)
        return tuple((index, group_of(slot.name)) for index, slot in slots if slot.kind is InputKind.HYPER)

    @cached_property
    def unscale_by_update(self) -> tuple[int, ...]:
        """The position in `read_by_update` of the factor that removes the scale of the loss; () without such a
        scale."""
        return tuple(index for index, slot in enumerate(self.read_by_update) if slot.slot.kind is InputKind.UNSCALE)

    @cached_property
    def updated_parameters(self) -> frozenset[str]:
        """Names of the parameters that the update changes."""
        kinds = (OutputKind.PARAMETER_UPDATE,)
        return frozenset(slot.slot.name for slot in self.updated if slot.slot.kind in kinds)

    @cached_property
    def update(self) -> ProgramUpdate | None:
        """The update phase of the program, or of the stage; None if the program updates nothing."""
        if self.phased.update is None:
            return None
        return ProgramUpdate(
            self.phased.update, len(self.phased.carried), self.read_by_update, self.updated, self.engine
        )

    @cached_property
    def _halves(self) -> _Halves:
        halves = self.phased.halves
        assert halves is not None, "the order cuts backwards"
        owned = owned_results(halves.weights.graph)
        adding = self.engine.load_adding(halves.weights, owned)
        return _Halves(self.engine.load(halves.inputs), self.engine.load(halves.weights), adding, owned)

    def load(self, *, adds: bool = False) -> None:
        """Load all phases now. Loading may make process groups, so all ranks must load together.

        `adds` says whether gradients of several micro-batches are added. The stages of a program are loaded by
        `Executor`, not here.
        """
        if self.compiled.staged is not None:
            return  # `Executor` loads the stages, once they have process groups
        _ = self._hoisted, self._forward, self._backward
        if adds:
            _ = self._adding_backward
        if self.phased.halves is not None:
            _ = self._halves
        if self.update is not None:
            self.update.load()

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[LocalValue]]:
        """Run the forward on the user's tensors, in the order of `inputs`.

        Return tensors in the order of `outputs`, and the local values that the backward reads.
        """
        results, saved = self.run_forward_locally(tensors)
        return [self.write_output(value, slot) for value, slot in zip(results, self.outputs, strict=True)], saved

    def for_hoisted(self, values: Sequence[LocalValue]) -> list[LocalValue]:
        """Return the inputs of `run_hoisted_on` among `values`, which `read_inputs` returned."""
        return [values[place] for place in self._read_by_hoisted]

    def run_hoisted_on(self, values: list[LocalValue]) -> list[LocalValue]:
        """Compute the local values that depend on parameters alone. They serve all micro-batches of a step.

        `values`, the result of `for_hoisted`, is emptied.
        """
        return [] if self._hoisted is None else list(self._hoisted(values))

    def read_inputs(self, tensors: Sequence[torch.Tensor]) -> list[LocalValue]:
        """Return the local values of the user's tensors; both are in the order of `given_inputs`."""
        return list(self._read_inputs(tensors))

    def run_forward_locally(self, tensors: Sequence[torch.Tensor]) -> tuple[list[LocalValue], list[LocalValue]]:
        """Run the forward on the user's tensors, for a program without stages and without hoisted values.

        Return the local values of `outputs`, and the local values that the backward reads.
        """
        return self.run_forward_on(self.read_inputs(tensors))

    def run_forward_on(self, values: list[LocalValue]) -> tuple[list[LocalValue], list[LocalValue]]:
        """Run the forward on local values; return the local values of `outputs`, and those that the backward reads.

        `values` has local inputs, in the order of `inputs`, then the results of `run_hoisted_on`. The list is emptied.
        """
        given = set(map(id, values))
        results = list(self._forward(values))
        count = len(self.outputs)
        outputs = [_new_tensor_object(value) if id(value) in given else value for value in results[:count]]
        return outputs, results[count:]

    def run_backward_on(
        self, values: list[LocalValue], sums: list[LocalValue] | None = None
    ) -> tuple[list[LocalValue], list[LocalValue]]:
        """Run the backward; return the local values of `gradients`, and of the gradients for the update.

        Args:
            values: the local values that the forward saved, then the local tangents. The list is emptied.
            sums: if given, each gradient for the update is added to its sum as soon as it is computed. The sums are
                returned in place of these gradients, and the list is emptied. `adds_in_backward` must be true.
        """
        results = _run(self._backward if sums is None else self._adding_backward, values, sums)
        count = len(self.gradients)
        return results[:count], results[count:]

    @property
    def adds_in_backward(self) -> bool:
        """Whether the backward, or the second half of a split backward, can add gradients to sums while it runs."""
        return self._adding_backward is not None

    def run_first_half(self, values: list[LocalValue]) -> tuple[list[LocalValue], list[LocalValue]]:
        """Run the first half of a split backward, which computes gradients for other stages.

        Args:
            values: the local values that the forward saved, then the local tangents. The list is emptied.

        Returns:
            The local gradients, one for each slot of `self.gradients`, and the values for `run_second_half`.
        """
        results = list(self._halves.inputs(values))
        count = len(self.gradients)
        return results[:count], results[count:]

    def run_second_half(
        self, values: list[LocalValue], sums: list[LocalValue] | None = None
    ) -> tuple[list[LocalValue], Sequence[bool]]:
        """Run the second half of a split backward, which computes gradients of weights.

        `values` is the second result of `run_first_half`. It is emptied. Return the local gradients for the update, and
        for each whether it may be written over. With `sums`, each gradient is added to its sum, which is returned in
        its place.
        """
        halves = self._halves
        return _run(halves.weights if sums is None else halves.adding_weights, values, sums), halves.owned

    def run_backward(
        self,
        saved: list[LocalValue],
        tangents: Mapping[str, torch.Tensor],
        likes: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Run the backward; return the gradients by the names of their parameters or inputs.

        Args:
            saved: the values that `run_forward` saved; emptied, so that each value is freed after its last use.
            tangents: the gradient of each output by the name of its tangent ("tangent:0"); missing tangents are zero.
            likes: the parameters and inputs whose gradients are wanted, by name. A DTensor's gradient gets its
                placements.
        """
        values = [*saved, *(self._read_tangent(tangents, slot) for slot in self.tangents)]
        saved.clear()
        results = self._find_backward(tangents)(values)[: len(self.gradients)]
        unreached = self.unreached(tangents)
        wanted = [None if slot.slot.name in unreached else likes.get(slot.slot.name) for slot in self.gradients]
        return {
            slot.slot.name: gradient
            for gradient, slot in zip(self._write_gradients(results, wanted), self.gradients, strict=True)
            if gradient is not None
        }

    def unreached(self, tangents: Collection[str]) -> frozenset[str]:
        """Return the names of the parameters and inputs whose gradient is None in a backward from these tangents."""
        by_tangent = self.phased.lowered.traced.unreached
        if not by_tangent:
            return frozenset()
        return frozenset.intersection(*(by_tangent.get(name, frozenset()) for name in tangents))

    def _find_backward(self, tangents: Collection[str]) -> Loaded:
        if all(slot.slot.name in tangents for slot in self.tangents):
            return self._backward
        given = frozenset(tangents)
        if given not in self._backward_from:
            first = len(self.phased.saved)
            places = {first + place: slot.slot.name for place, slot in enumerate(self.tangents)}
            missing = [place for place, name in places.items() if name not in given]
            graph_module = without_tangents(self.phased.backward, places, missing, self.engine.device)
            self._backward_from[given] = self.engine.load(graph_module)
        return self._backward_from[given]

    def write_output(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """Return an output for the user: a DTensor if `compiled.sharded_outputs` has its name, else a whole tensor."""
        if slot.slot.name in self.compiled.sharded_outputs:
            return self.engine.write_sharded(value, slot)
        return self.engine.write(value, slot)

    def _read_tangent(self, tangents: Mapping[str, torch.Tensor], slot: LocalSlot) -> LocalValue:
        tangent = tangents.get(slot.slot.name)
        if tangent is None:
            tangent = torch.zeros(slot.shape, dtype=slot.dtype, device=self.engine.device)
        return self.engine.read(tangent, slot)


@dataclass(frozen=True, slots=True)
class _Halves:
    """The loaded halves of a split backward.

    Args:
        inputs: the first half, which computes gradients for other stages.
        weights: the second half, which computes gradients of weights.
        adding_weights: the second half that adds its results to sums; None if the engine cannot do this.
        owned: for each result of the second half, whether it may be written over.
    """

    inputs: Loaded
    weights: Loaded
    adding_weights: Loaded | None
    owned: Sequence[bool]


def _run(loaded: Loaded | None, values: list[LocalValue], sums: list[LocalValue] | None) -> list[LocalValue]:
    """Run a loaded graph on `values`, followed by `sums` if given. Both lists are emptied."""
    assert loaded is not None, "the engine adds in backwards"
    if sums is not None:
        values += sums
        sums.clear()
    return list(loaded(values))


def _new_tensor_object(value: LocalValue) -> LocalValue:
    """Return a local value as a new tensor object with the same memory.

    Autograd marks the objects that a function returns, and the user's DTensor may hold `value`.
    """
    return value.detach() if isinstance(value, torch.Tensor) else value
