"""Messages between pipeline stages: within a process, or from rank to rank.

A process sends to the process with equal coordinates on the other mesh axes. Each pair of pipeline ranks has a process
group for each direction. Messages travel in the sender's order, and the reader receives them in that order.

A sender keeps the memory of its message until the send is known to be complete. This is known when a message comes back
that the reader made after it had read the first message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard.ir.lowered import LocalSlot
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import OutputKind
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.staged import PIPELINE_AXIS, Crossing, StagedProgram
from autoshard.runtime.agreement.lost_ranks import naming_lost_ranks
from autoshard.runtime.distributed import reshard_program
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.layouts import storage_spec
from autoshard.runtime.process_groups import ProcessGroups, group_of
from autoshard.runtime.stages.crossing_table import CrossingMessage, CrossingTable


class StageMessages(Protocol):
    """Sends values between the stages of a step.

    All ranks must call each of `connect`, `sum_over_stages` and `share` together.
    """

    @property
    def rank(self) -> int | None:
        """The pipeline rank of this process; None if this process runs all stages."""
        ...

    def connect(self, staged: StagedProgram) -> CrossingTable:
        """Make the process groups that a program's messages need; return the table of its messages, for `begin`."""
        ...

    def begin(self, table: CrossingTable, weights: Sequence[float]) -> None:
        """Begin a step of a program, given the table from `connect` and the weight of each micro-batch in the loss.

        A micro-batch of weight zero has no backward, so its gradients are not sent.
        """
        ...

    def send(self, crossing: Crossing, micro_batch: int, value: LocalValue) -> None:
        """Send a micro-batch's value to the stage that reads it.

        The caller must not write to the value before `end`.
        """
        ...

    def expect(self, stage: int, micro_batch: int, *, is_forward: bool) -> None:
        """Begin to receive the values that the forward, or the backward, of a stage will read for a micro-batch."""
        ...

    def has_all(self, stage: int, micro_batch: int, *, is_forward: bool) -> bool:
        """Whether `take` can return all values that the forward, or the backward, of a stage reads for a micro-batch.

        True too if `take` would first wait for other processes.
        """
        ...

    def take(self, name: str, stage: int, micro_batch: int, *, is_forward: bool) -> tuple[LocalValue, LocalSlot]:
        """Return a value that `stage` reads for a micro-batch, and its spec, shape and dtype where it was made."""
        ...

    def end(self) -> None:
        """Wait until all messages of the step are sent."""
        ...

    def sum_over_stages(self, addends: Mapping[int, torch.Tensor | None], stages: int) -> torch.Tensor:
        """Return the sum of one scalar per stage, added in the order of stages.

        Args:
            addends: number of a stage → its scalar, for the stages that this process runs. None adds nothing.
            stages: the number of all stages.
        """
        ...

    def share(self, value: LocalValue | None, name: str, staged: StagedProgram) -> LocalValue:
        """Return this rank's part of the program's result `name`, also on processes that do not run its stage.

        `value` is this rank's part on processes that run the result's stage, and None on all others.
        """
        ...


class MessagesInProcess:
    """Messages between stages that all run in this process. They are kept in a dict."""

    def __init__(self) -> None:
        self._stored: dict[CrossingMessage, LocalValue] = {}
        self._table: CrossingTable | None = None

    @property
    def rank(self) -> None:
        return None

    def connect(self, staged: StagedProgram) -> CrossingTable:
        return CrossingTable(staged)

    def begin(self, table: CrossingTable, weights: Sequence[float]) -> None:
        self._table = table
        self._stored.clear()

    def send(self, crossing: Crossing, micro_batch: int, value: LocalValue) -> None:
        self._stored[CrossingMessage(crossing.name, crossing.reader, crossing.is_forward, micro_batch)] = value

    def expect(self, stage: int, micro_batch: int, *, is_forward: bool) -> None:
        """Do nothing, because `send` has stored the value already."""

    def has_all(self, stage: int, micro_batch: int, *, is_forward: bool) -> bool:
        assert self._table is not None, "a step began"
        return all(key in self._stored for key in self._table.messages(stage, micro_batch, is_forward=is_forward))

    def take(self, name: str, stage: int, micro_batch: int, *, is_forward: bool) -> tuple[LocalValue, LocalSlot]:
        assert self._table is not None, "a step began"
        value = self._stored.pop(CrossingMessage(name, stage, is_forward, micro_batch))
        return value, self._table.slot(name, is_forward=is_forward)

    def end(self) -> None:
        self._table = None

    def sum_over_stages(self, addends: Mapping[int, torch.Tensor | None], stages: int) -> torch.Tensor:
        return _in_order([addends.get(number) for number in range(stages)])

    def share(self, value: LocalValue | None, name: str, staged: StagedProgram) -> LocalValue:
        assert value is not None, "the process runs all stages"
        return value


def _in_order(addends: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the sum of scalars, added in their order. Addends that are None are left out."""
    total = torch.zeros((), dtype=torch.float32)
    for index, addend in enumerate(item for item in addends if item is not None):
        total = addend if index == 0 else total + addend
    return total


class MessagesBetweenRanks:
    """Messages between processes that each run one pipeline rank, on a mesh with an axis "pipeline"."""

    def __init__(self, device_mesh: DeviceMesh, groups: ProcessGroups) -> None:
        self._groups = groups
        self._mesh = Mesh.from_device_mesh(device_mesh)
        self._ranks: list[int] = device_mesh.mesh.flatten().tolist()
        self._pipeline = device_mesh.get_group(PIPELINE_AXIS)
        self._device_mesh = device_mesh
        self._mine = self._mesh.coordinates(self._ranks.index(dist.get_rank()))
        self._pair_groups: dict[tuple[int, int], Any] = {}
        self._table: CrossingTable | None = None
        self._waiting: dict[tuple[int, int], deque[CrossingMessage]] = {}
        self._stored: dict[CrossingMessage, LocalValue] = {}
        self._posted: dict[CrossingMessage, tuple[dist.Work, torch.Tensor]] = {}
        self._sent: dict[int, deque[tuple[CrossingMessage, dist.Work, torch.Tensor]]] = {}

    @property
    def rank(self) -> int:
        """The pipeline rank of this process."""
        return self._mine[PIPELINE_AXIS]

    def connect(self, staged: StagedProgram) -> CrossingTable:
        """Make all process groups of the program, in one order on all processes; return the table of its messages.

        Every pair of pipeline ranks gets a group, even without messages. Torch names a group by the number of groups
        that a process has made, so all processes must make equally many.
        """
        self._groups.prepare(_groups_of(staged))
        if not self._pair_groups:
            every = permutations(range(self._mesh.axis_size(PIPELINE_AXIS)), 2)
            self._pair_groups = {pair: self._new_groups(*pair) for pair in every}
        return CrossingTable(staged)

    def _new_groups(self, maker: int, reader: int) -> Any:
        """Make the groups for messages from pipeline rank `maker` to `reader`, one for each column of processes.

        A column is the processes that differ only along "pipeline". Return the group of this process's column, and the
        global ranks of the sender and the receiver in it.
        """
        mine = None
        for column in self._mesh.groups(PIPELINE_AXIS):
            pair = column[maker], column[reader]
            group = self._groups.new(sorted(pair), PIPELINE_AXIS)
            if self._ranks[column[self.rank]] == dist.get_rank():
                mine = group, *(self._ranks[member] for member in pair)
        return mine

    def begin(self, table: CrossingTable, weights: Sequence[float]) -> None:
        self._table = table
        self._stored.clear()
        self._posted.clear()
        self._waiting = {
            pair: deque(key for key in keys if key.is_forward or weights[key.micro_batch])
            for pair, keys in table.orders.items()
            if pair[1] == self.rank and pair[0] != self.rank
        }

    def send(self, crossing: Crossing, micro_batch: int, value: LocalValue) -> None:
        key = CrossingMessage(crossing.name, crossing.reader, crossing.is_forward, micro_batch)
        pipeline_rank = self._of_stage(crossing.reader)
        if pipeline_rank == self.rank:
            self._stored[key] = value
            return
        group, _, reader = self._pair_groups[self.rank, pipeline_rank]
        with naming_lost_ranks():
            tensor = value.contiguous()
            work = dist.isend(tensor, reader, group)
        assert work is not None, "this process is in the group"
        self._sent.setdefault(pipeline_rank, deque()).append((key, work, tensor))

    def expect(self, stage: int, micro_batch: int, *, is_forward: bool) -> None:
        assert self._table is not None, "a step began"
        for key in self._table.messages(stage, micro_batch, is_forward=is_forward):
            self._post(key)

    def _post(self, wanted: CrossingMessage) -> None:
        """Begin to receive a value. Values that the same sender sends earlier are received first."""
        assert self._table is not None, "a step began"
        for pair, waiting in self._waiting.items():
            if wanted not in waiting:
                continue
            group, maker, _ = self._pair_groups[pair]
            while wanted not in self._posted:
                key = waiting.popleft()
                slot = self._table.slot(key.name, is_forward=key.is_forward)
                mesh = self._table.staged.stages[key.reader].phased.lowered.mesh
                buffer = self._empty(slot, mesh)
                with naming_lost_ranks():
                    work = dist.irecv(buffer, maker, group)
                assert work is not None, "this process is in the group"
                self._posted[key] = work, buffer
            return

    def _empty(self, slot: LocalSlot, mesh: Mesh) -> torch.Tensor:
        return torch.empty(slot.spec.local_shape(slot.shape, mesh), dtype=slot.dtype, device=self._device)

    @property
    def _device(self) -> torch.device:
        kind = self._device_mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    def has_all(self, stage: int, micro_batch: int, *, is_forward: bool) -> bool:
        """Whether the stages of this process have made all values that `stage` reads from them.

        `take` waits for values of other processes.
        """
        assert self._table is not None, "a step began"
        places = self._table.staged.order.stage_ranks
        own = [
            CrossingMessage(item.name, stage, is_forward, micro_batch)
            for item in self._table.read.get((stage, is_forward), ())
            if places[item.maker] == self.rank
        ]
        return all(key in self._stored for key in own)

    def take(self, name: str, stage: int, micro_batch: int, *, is_forward: bool) -> tuple[LocalValue, LocalSlot]:
        assert self._table is not None, "a step began"
        key = CrossingMessage(name, stage, is_forward, micro_batch)
        slot = self._table.slot(name, is_forward=is_forward)
        if key in self._stored:
            return self._stored.pop(key), slot
        self._post(key)
        work, buffer = self._posted.pop(key)
        with naming_lost_ranks(f"receiving {name!r} for stage {stage}"):
            work.wait()
        self._free_read_messages(key)
        return buffer, slot

    def _free_read_messages(self, received: CrossingMessage) -> None:
        """Free the memory of sent messages that were read, as the message `received` shows.

        The sender of `received` had read these messages before it made `received`. So their sends are complete, and
        waiting for them takes no time.
        """
        assert self._table is not None, "a step began"
        maker, places = self._table.makers[received.name, received.is_forward], self._table.places
        sent = self._sent.get(self._of_stage(maker), deque())
        made_at = places[maker, received.is_forward, received.micro_batch]
        with naming_lost_ranks():
            while sent and places[sent[0][0].reader, sent[0][0].is_forward, sent[0][0].micro_batch] < made_at:
                sent.popleft()[1].wait()

    def end(self) -> None:
        with naming_lost_ranks("waiting until other stages had read its messages"):
            for _, work, _ in (entry for sent in self._sent.values() for entry in sent):
                work.wait()
        self._sent.clear()
        self._table = None

    def sum_over_stages(self, addends: Mapping[int, torch.Tensor | None], stages: int) -> torch.Tensor:
        """Return the sum of the scalars of all stages, from an all-reduce of a row with one entry for each stage."""
        row = torch.zeros(stages, dtype=torch.float32, device=self._device)
        for number, addend in addends.items():
            if addend is not None:
                row = row.to(torch.promote_types(row.dtype, addend.dtype))
                row[number] = addend
        with naming_lost_ranks("adding up a result of all stages"):
            dist.all_reduce(row, group=self._pipeline)
        return _in_order(list(row))

    def share(self, value: LocalValue | None, name: str, staged: StagedProgram) -> LocalValue:
        """Broadcast a result along "pipeline" from the processes of its stage, and return this rank's part."""
        stage = staged.results[name]
        slot, mesh = staged.sent_slot(name, stage, is_forward=True), staged.stages[stage].phased.lowered.mesh
        given = self._empty(slot, mesh) if value is None else value.contiguous()
        source = {**self._mine, PIPELINE_AXIS: staged.order.stage_ranks[stage]}
        with naming_lost_ranks(f"sharing {name!r} with all stages"):
            dist.broadcast(given, self._ranks[self._mesh.rank_at(source)], self._pipeline)
        return given

    def _of_stage(self, stage: int) -> int:
        assert self._table is not None, "a step began"
        return self._table.staged.order.stage_ranks[stage]


def _groups_of(staged: StagedProgram) -> Iterator[str]:
    """Yield the names of all process groups that a program's stages use.

    These are groups of collectives in stages, of reshards of received values, and of reshards of results.
    """
    yield ",".join(staged.stages[0].phased.lowered.mesh.axis_names)
    graphs = [graph for stage in staged.stages for graph in stage.phased.phases.values()]
    for crossing in staged.crossings:
        made = find_slot(staged.stages[crossing.maker].phased.lowered.outputs, crossing.name)
        taken = find_slot(staged.stages[crossing.reader].phased.lowered.inputs, crossing.name)
        if made.spec != taken.spec:
            mesh = staged.stages[crossing.reader].phased.lowered.mesh
            graphs.append(reshard_program(made.spec, taken.spec, made.shape, made.dtype, mesh))
    for stage in staged.stages:
        for slot in stage.phased.lowered.outputs:
            if slot.slot.name in staged.results or slot.slot.kind == OutputKind.SQUARES:
                graphs += _handing_out(slot, stage.phased.lowered.mesh)
    for graph_module in graphs:
        yield from filter(None, map(group_of, graph_module.graph.nodes))


def _handing_out(slot: LocalSlot, mesh: Mesh) -> Iterator[fx.GraphModule]:
    """Yield graphs that reshard a result to the forms that users get: whole, or sharded by torch's placements."""
    for target in {PartitionSpec(), storage_spec(slot.spec, mesh)} - {slot.spec}:
        yield reshard_program(slot.spec, target, slot.shape, slot.dtype, mesh)


def find_slot(slots: Sequence[LocalSlot], name: str) -> LocalSlot:
    """Return the slot with this name among the inputs or results of a stage."""
    return next(slot for slot in slots if slot.slot.name == name)
