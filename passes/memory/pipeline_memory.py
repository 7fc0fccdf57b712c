"""Find the peak memory of each pipeline rank, by a walk along the rank's schedule with the memory needs of its stages.

The graphs of a stage are walked once, for one micro-batch (`passes.memory.storages`). The rank's schedule then tells
how many micro-batches are in memory at once:

* Parameters, buffers, constants, optimizer state and the inputs of all micro-batches are in memory throughout. Hoisted
  values are there from the stage's first forward on, and sums of gradients from its first backward on.
* Saved values of a forward live until the backward. The first half of a cut backward keeps the values that the second
  half reads, which are most saved values.
* A received value takes memory from the receive until its reader runs. A sent value that is not saved takes memory
  until a later message from its reader arrives (`autoshard.runtime.stages.stage_messages`). A value between two stages
  of one rank lives until its reader runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.pipeline_order import StageTask, Work
from autoshard.ir.program import InputKind
from autoshard.ir.staged import StagedProgram, StageProgram
from passes.memory.lowered_memory import (
    carried_bytes,
    graph_that_runs,
    graphs_of,
    local_bytes,
    update_in_place,
    written_by_update,
)
from passes.memory.storages import ACTIVATIONS, GRADIENTS, INPUTS, PARAMETERS, STATE, Storages, Value


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes in use on a pipeline rank: the peak, and its parts by category.

    `in_flight_bytes` is the largest sum of bytes that micro-batches between their forward and their backward have
    saved.
    """

    peak_bytes: int
    parts: Mapping[str, int]
    in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes that a stage takes. Each peak comes on top of the values that are in memory throughout.

    Args:
        parameters, state: parameters with buffers and constants, and optimizer state; in memory throughout.
        inputs: inputs of one micro-batch, without values from other stages.
        hoisted: values that are computed once for all micro-batches.
        hoisting: the peak while the hoisted values are computed.
        forward: the peak of a forward, including received values.
        saved: values that a forward saves for its backward.
        backward: the peak of a backward, including saved and received values.
        backward_with_sums: the same peak for a backward that adds its gradients to sums; the bytes of the sums are not
            counted.
        carried: the gradients that a backward makes for the update.
        first_half, second_half: the peaks of the halves of a cut backward.
        second_half_with_sums: the peak of a second half that adds its gradients to sums; the bytes of the sums are not
            counted.
        kept: values that the first half keeps for the second half.
        update: the peak of the update, including gradients, without parameters and optimizer state.
        sent: values that a forward makes for other stages and does not save, by name.
    """

    parameters: int
    state: int
    inputs: int
    hoisted: int
    hoisting: int
    forward: int
    saved: int
    backward: int
    backward_with_sums: int
    carried: int
    update: int
    sent: Mapping[str, int]
    first_half: int = 0
    kept: int = 0
    second_half: int = 0
    second_half_with_sums: int = 0


def pipeline_memory(staged: StagedProgram) -> tuple[RankMemory, ...]:
    """Return the peak memory of each pipeline rank, in the order of ranks."""
    alike = dict[fx.GraphModule, _Needs]()
    needs = list[_Needs]()
    for stage in staged.stages:
        graph = stage.phased.forward
        if graph not in alike:
            alike[graph] = _needs_of(stage, staged)
        names = _sent_names(stage.phased, {item.name for item in staged.crossings})
        needs.append(replace(alike[graph], sent=dict(zip(names, alike[graph].sent.values(), strict=True))))
    ranks = range(max(staged.order.stage_ranks) + 1)
    return tuple(_RankWalk(staged, needs, rank).run() for rank in ranks)


def _needs_of(stage: StageProgram, staged: StagedProgram) -> _Needs:
    phased, memory = stage.phased, Storages()
    lowered = phased.lowered
    crossing = {item.name for item in staged.crossings}
    sizes = [local_bytes(slot, lowered.mesh) for slot in lowered.inputs]
    inputs = [memory.new(size) for size in sizes]

    def total(*kinds: InputKind) -> int:
        pairs = zip(lowered.inputs, sizes, strict=True)
        return sum(size for slot, size in pairs if slot.slot.kind in kinds and slot.slot.name not in crossing)

    held = [
        value
        for slot, value in zip(lowered.inputs, inputs, strict=True)
        if slot.slot.name not in crossing and slot.slot.kind is not InputKind.TANGENT
    ]
    constants = memory.hold_constants(graphs_of(phased))
    held += constants
    base = memory.bytes_of(held)
    once, hoisting = [], 0
    if phased.hoisted is not None:
        once = memory.run(graph_that_runs(phased.hoisted), [inputs[index] for index in phased.hoisted_inputs], held)
        hoisting = _restart(memory) - base
    hoisted = memory.bytes_of([*held, *once]) - base
    read = [*(inputs[index] for index in phased.forward_inputs), *once]
    results = memory.run(graph_that_runs(phased.forward), read, [*held, *once])
    forward = _restart(memory) - base - hoisted
    outputs, saved = results[: len(phased.forward_outputs)], results[len(phased.forward_outputs) :]
    kept = memory.bytes_of([*held, *once, *saved]) - base - hoisted
    sent = {
        name: memory.bytes_of([*held, *once, *saved, value]) - base - hoisted - kept
        for name, value in zip(_forward_names(phased), outputs, strict=True)
        if name in crossing
    }
    tangents = [inputs[index] for index in phased.backward_inputs]
    memory.run(graph_that_runs(phased.backward), [*saved, *tangents], [*held, *once])
    backward = _restart(memory) - base - hoisted
    carried = carried_bytes(phased)
    sums = [memory.new(size) for size in carried]

    def more_with_sums(phase: fx.GraphModule, inputs: Sequence[Value]) -> int:
        """Return the peak bytes while `phase` runs and adds its gradients to sums, less the bytes of the sums."""
        memory.run(graph_that_runs(phase, len(sums)), [*inputs, *sums], [*held, *once])
        return _restart(memory) - base - hoisted - sum(carried)

    backward_with_sums = more_with_sums(phased.backward, [*saved, *tangents])
    halves: dict[str, int] = {}
    if phased.halves is not None:
        first = memory.run(graph_that_runs(phased.halves.inputs), [*saved, *tangents], [*held, *once])
        halves["first_half"] = _restart(memory) - base - hoisted
        between = first[len(phased.backward_outputs) :]
        halves["kept"] = memory.bytes_of([*held, *once, *between]) - base - hoisted
        memory.run(graph_that_runs(phased.halves.weights), between, [*held, *once])
        halves["second_half"] = _restart(memory) - base - hoisted
        halves["second_half_with_sums"] = more_with_sums(phased.halves.weights, between)
    return _Needs(
        parameters=total(InputKind.PARAMETER, InputKind.BUFFER) + memory.bytes_of(constants),
        state=total(InputKind.STATE, InputKind.HYPER, InputKind.SQUARES, InputKind.UNSCALE),
        inputs=total(InputKind.INPUT, InputKind.SEED),
        hoisted=hoisted,
        hoisting=hoisting,
        forward=forward,
        saved=kept,
        backward=backward,
        backward_with_sums=backward_with_sums,
        carried=sum(carried),
        update=_update_bytes(phased, carried),
        sent=sent,
        **halves,
    )


def _forward_names(phased: PhasedProgram) -> list[str]:
    return [phased.lowered.outputs[index].slot.name for index in phased.forward_outputs]


def _sent_names(phased: PhasedProgram, crossing: Collection[str]) -> list[str]:
    return [name for name in _forward_names(phased) if name in crossing]


def _restart(memory: Storages) -> int:
    """Return the peak bytes of `memory` so far, and reset the peak to zero."""
    peak, memory.peak = memory.peak, 0
    return peak


def _update_bytes(phased: PhasedProgram, carried: Sequence[int]) -> int:
    if phased.update is None:
        return 0
    memory = Storages()
    lowered = phased.lowered
    held = [memory.new(local_bytes(lowered.inputs[index], lowered.mesh)) for index in phased.update_inputs]
    graph = update_in_place(phased.update, written_by_update(phased))
    throughout = [*held, *memory.hold_constants([graph])]
    memory.run(graph, [*map(memory.new, carried), *held], throughout)
    return memory.peak - memory.bytes_of(throughout)


@dataclass(slots=True)
class _RankWalk:
    """A walk along a rank's schedule.

    A task is named by (stage, whether it is a forward, micro-batch). Its place is its index in the order of its rank.

    Args:
        live: bytes in use by category.
        peak, parts: the peak so far, and `live` at the peak.
        in_flight, most_in_flight: bytes of saved values now, and the most so far.
        waiting: name of a task → bytes of inputs that it has received and not read yet.
        sent: receiving rank → a queue of the messages sent to it: the place of the reading task, and the bytes.
        places: name of a task → its place.
        begun: stages whose first forward has run.
        summed: stages that have sums of gradients.
    """

    staged: StagedProgram
    needs: Sequence[_Needs]
    rank: int
    live: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peak: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0
    waiting: dict[tuple[int, bool, int], int] = field(default_factory=dict)
    sent: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    places: Mapping[tuple[int, bool, int], int] = field(init=False)
    begun: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = self.staged.order.places()

    def run(self) -> RankMemory:
        own = [number for number, rank in enumerate(self.staged.order.stage_ranks) if rank == self.rank]
        for number in own:
            needs = self.needs[number]
            self.live[PARAMETERS] += needs.parameters
            self.live[STATE] += needs.state
            self.live[INPUTS] += needs.inputs * self.staged.order.micro_batches
        for task in (task for slot in self.staged.order.ranks[self.rank] for task in slot):
            self._task(task)
        for number in own:
            needs = self.needs[number]
            self.live[GRADIENTS] -= needs.carried if number in self.summed else 0
            self._reach(needs.update)
        return RankMemory(self.peak, self.parts, self.most_in_flight)

    def _reach(self, more: int) -> None:
        """Raise the peak if `live` and `more` bytes together exceed it."""
        total = sum(self.live.values()) + more
        if total > self.peak:
            self.peak = total
            self.parts = {**self.live, ACTIVATIONS: self.live[ACTIVATIONS] + more}

    def _task(self, task: StageTask) -> None:
        number, micro_batch, needs = task.stage, task.micro_batch, self.needs[task.stage]
        match task.work:
            case Work.RECEIVE_FORWARD | Work.RECEIVE_BACKWARD:
                self._receive(number, micro_batch, is_forward=task.work is Work.RECEIVE_FORWARD)
            case Work.FORWARD:
                self._read(number, micro_batch, is_forward=True)
                if number not in self.begun:
                    self.begun.add(number)
                    self._reach(needs.hoisting)
                    self.live[ACTIVATIONS] += needs.hoisted
                self._reach(needs.forward)
                self._save(needs.saved)
                self._send(number, micro_batch, is_forward=True)
            case Work.BACKWARD:
                self._read(number, micro_batch, is_forward=False)
                self._save(-needs.saved)
                self._add(number, needs, needs.backward, needs.backward_with_sums)
                self._send(number, micro_batch, is_forward=False)
            case Work.BACKWARD_INPUT:
                self._read(number, micro_batch, is_forward=False)
                self._save(-needs.saved)
                self._reach(needs.first_half)
                self._save(needs.kept)
                self._send(number, micro_batch, is_forward=False)
            case Work.BACKWARD_WEIGHT:
                self._save(-needs.kept)
                self._add(number, needs, needs.second_half, needs.second_half_with_sums)

    def _add(self, number: int, needs: _Needs, first: int, later: int) -> None:
        """Update the peak with a backward of stage `number`.

        The first backward of a stage makes the sums of gradients, and needs `first` bytes beside `live`. Later
        backwards add to the sums, and need `later` bytes.
        """
        self._reach(later if number in self.summed else first)
        if number not in self.summed:
            self.summed.add(number)
            self.live[GRADIENTS] += needs.carried

    def _save(self, size: int) -> None:
        self.live[ACTIVATIONS] += size
        self.in_flight += size
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _receive(self, number: int, micro_batch: int, *, is_forward: bool) -> None:
        size = sum(
            crossing_bytes(self.staged, item.name, item.maker, is_forward=is_forward)
            for item in self.staged.crossings
            if item.reader == number and item.is_forward == is_forward and self._rank_of(item.maker) != self.rank
        )
        key = number, is_forward, micro_batch
        self.waiting[key] = self.waiting.get(key, 0) + size
        self.live[ACTIVATIONS] += size
        self._reach(0)

    def _read(self, number: int, micro_batch: int, *, is_forward: bool) -> None:
        """Release the memory of a task's received inputs, because the task's own peak includes them.

        A message shows how far its sender has come in its schedule. So messages that were sent to this sender, and that
        it has read by then, are released too.
        """
        self.live[ACTIVATIONS] -= self.waiting.pop((number, is_forward, micro_batch), 0)
        for item in self.staged.crossings:
            if item.reader == number and item.is_forward == is_forward:
                sent = self.sent.get(self._rank_of(item.maker), deque())
                while sent and sent[0][0] < self.places[item.maker, is_forward, micro_batch]:
                    self.live[ACTIVATIONS] -= sent.popleft()[1]

    def _send(self, number: int, micro_batch: int, *, is_forward: bool) -> None:
        for item in self.staged.crossings:
            if item.maker != number or item.is_forward != is_forward:
                continue
            size = crossing_bytes(self.staged, item.name, number, is_forward=is_forward)
            if is_forward:
                size = self.needs[number].sent[item.name]
            if self._rank_of(item.reader) == self.rank:
                key = item.reader, is_forward, micro_batch
                self.waiting[key] = self.waiting.get(key, 0) + size
            else:
                there = self.sent.setdefault(self._rank_of(item.reader), deque())
                there.append((self.places[item.reader, is_forward, micro_batch], size))
            self.live[ACTIVATIONS] += size

    def _rank_of(self, stage: int) -> int:
        return self.staged.order.stage_ranks[stage]


def crossing_bytes(staged: StagedProgram, name: str, maker: int, *, is_forward: bool) -> int:
    """Return the bytes on each rank of the value `name` that stage `maker` sends to another stage.

    The value has the spec with which `maker` makes it. `is_forward` says whether its forward or its backward sends the
    value.
    """
    slot = staged.sent_slot(name, maker, is_forward=is_forward)
    return local_bytes(slot, staged.stages[maker].phased.lowered.mesh)
