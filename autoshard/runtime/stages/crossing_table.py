"""Tables of the values that the stages of a pipeline send each other, by stage and by pair of pipeline ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from autoshard.ir.lowered import LocalSlot
from autoshard.ir.pipeline_order import Work
from autoshard.ir.program import OutputKind
from autoshard.ir.staged import Crossing, StagedProgram

_MAKERS = (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT)


class CrossingMessage(NamedTuple):
    """A value that one stage sends to another, for one micro-batch.

    Args:
        name: the value's name in programs.
        reader: the number of the stage that reads the value.
        is_forward: whether forwards make and read the value; if not, backwards do.
        micro_batch: the number of the micro-batch.
    """

    name: str
    reader: int
    is_forward: bool
    micro_batch: int


class CrossingTable:
    """Tables of the values that the stages of a program send each other.

    Attributes:
        read: (stage, whether in its forward) → the values that the stage reads from other stages.
        sent: (stage, whether in its forward) → the values that the stage sends.
        places: (stage, whether forward, micro-batch) → the position of this task in its rank's order.
        makers: (name of a value, whether of a forward) → the stage that makes the value.
    """

    def __init__(self, staged: StagedProgram) -> None:
        self.staged = staged
        self.read: dict[tuple[int, bool], list[Crossing]] = {}
        self.sent: dict[tuple[int, bool], list[Crossing]] = {}
        self.places = staged.order.places()
        self.makers = {(item.name, item.is_forward): item.maker for item in staged.crossings}
        self._slots: dict[tuple[str, bool], LocalSlot] = {}
        for crossing in staged.crossings:
            self.read.setdefault((crossing.reader, crossing.is_forward), []).append(crossing)
            self.sent.setdefault((crossing.maker, crossing.is_forward), []).append(crossing)
            kind = OutputKind.OUTPUT if crossing.is_forward else OutputKind.SENT_GRADIENT
            for slot in staged.stages[crossing.maker].phased.lowered.outputs:
                if (slot.slot.kind, slot.slot.name) == (kind, crossing.name):
                    self._slots[crossing.name, crossing.is_forward] = slot

    def slot(self, name: str, *, is_forward: bool) -> LocalSlot:
        """Return the slot (spec, shape, dtype) of a value among the results of the stage that makes it."""
        return self._slots[name, is_forward]

    def messages(self, stage: int, micro_batch: int, *, is_forward: bool) -> list[CrossingMessage]:
        """Return the messages whose values the forward, or the backward, of a stage reads for a micro-batch."""
        found = self.read.get((stage, is_forward), ())
        return [CrossingMessage(item.name, stage, is_forward, micro_batch) for item in found]

    @cached_property
    def sums_squares(self) -> bool:
        """Whether stages compute the sums of squares of their gradients, which are added for the norm over all stages.

        The norm is needed to clip gradients, or is returned to the user.
        """
        slots = (slot for stage in self.staged.stages for slot in stage.phased.lowered.outputs)
        return any(slot.slot.kind == OutputKind.SQUARES for slot in slots)

    @cached_property
    def orders(self) -> Mapping[tuple[int, int], Sequence[CrossingMessage]]:
        """The messages of a step in the order of sending, by pair (sending, receiving) of pipeline ranks."""
        ranks = self.staged.order.stage_ranks
        pairs = sorted({(ranks[item.maker], ranks[item.reader]) for item in self.staged.crossings})
        return {pair: list(self._sent_over(pair)) for pair in pairs}

    def _sent_over(self, pair: tuple[int, int]) -> Iterator[CrossingMessage]:
        order, (maker, reader) = self.staged.order, pair
        for task in (task for slot in order.ranks[maker] for task in slot):
            for item in self.staged.crossings if task.work in _MAKERS else ():
                is_its = item.maker == task.stage and item.is_forward == (task.work is Work.FORWARD)
                if is_its and order.stage_ranks[item.reader] == reader:
                    yield CrossingMessage(item.name, item.reader, item.is_forward, task.micro_batch)
