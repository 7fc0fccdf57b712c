"""`Executor` runs the tasks (forwards, backwards, messages) of steps, and of calls in stages, in a proven order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.loss import Output, loss_among
from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.pipeline_order import PipelineOrder, Slot
from autoshard.ir.program import OutputKind
from autoshard.ir.spec import Reduction
from autoshard.ir.staged import StagedProgram, StageProgram
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.graphed_passes import GraphedPasses
from autoshard.runtime.per_program import PerProgram
from autoshard.runtime.program_run import Inputs, ProgramRun, StageRun, Take
from autoshard.runtime.stages.crossing_table import CrossingTable
from autoshard.runtime.stages.stage_messages import MessagesInProcess, StageMessages


class Prove(Protocol):
    """Proves that an order of tasks does all work once, and ends."""

    def __call__(self, order: PipelineOrder, *, trains: bool = True) -> None:
        """Raise `VerificationError` if the order is not proven. With `trains`, it must have backwards too."""
        ...


class Executor:
    """Runs the training steps of a module, and its calls in pipeline stages. All ranks must call its methods together.

    Args:
        messages: carries values between stages; None if programs have no stages.
        prove: proves orders of tasks; None: no proof.
    """

    def __init__(self, messages: StageMessages | None = None, prove: Prove | None = None) -> None:
        self.has_stages = messages is not None
        self.messages = messages or MessagesInProcess()
        self._prove = prove
        self._tables = PerProgram[CrossingTable]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Executor:
        """Return the executor itself: copies of a model run on the same ranks."""
        return self

    def prove(self, order: PipelineOrder, *, trains: bool = True) -> None:
        """Prove an order before it runs, if the executor was made with a function `prove`."""
        if self._prove is not None:
            self._prove(order, trains=trains)

    def prepare(self, executable: Executable, order: PipelineOrder | None = None) -> CrossingTable:
        """Prove a program's order, load its phases, and return the table of the values that its stages send each other.

        This is done once per program. All ranks must call for the same programs in the same order. `order` is the
        step's order if the program has no stages.
        """
        return self._tables.get_or_make(executable, lambda: self._prepare(executable, order))

    def _prepare(self, executable: Executable, order: PipelineOrder | None) -> CrossingTable:
        staged = executable.compiled.staged
        if staged is None:
            staged = _one_stage(executable, order)
        else:
            self.prove(staged.order, trains=executable.compiled.update is not None)
        if staged.order.micro_batches > 1:
            for stage in staged.stages:
                check_sums(stage.phased)
        table = self.messages.connect(staged)
        for program in executable.stages.values():
            program.load(adds=staged.order.micro_batches > 1 and staged.order.trains)
        return table

    def run(
        self, executable: Executable, table: CrossingTable, inputs: Inputs, weights: Sequence[float], take: Take,
        graphs: GraphedPasses | None = None, loss_scale: float = 1.0,
    ) -> ProgramRun:  # fmt: skip
        """Run all forwards and backwards of a call. The stages of the returned run have the gradients, summed.

        If the call has more micro-batches than the order, the order runs several times.

        `table` is the result of `prepare`. The other arguments are those of `ProgramRun`.
        """
        order = table.staged.order
        assert len(weights) % order.micro_batches == 0, "the order has a task for each micro-batch"
        stages = {number: StageRun(number, program) for number, program in executable.stages.items()}
        if len(weights) > order.micro_batches:
            for stage in table.staged.stages:
                check_sums(stage.phased)
        ranks = sorted({order.stage_ranks[number] for number in stages})
        for first in range(0, len(weights), order.micro_batches):
            run = ProgramRun(table, stages, self.messages, inputs, weights, take, graphs, first, loss_scale)
            run.begin()
            run_order(order, ranks, run)
            run.end()
        return run

    @torch.no_grad()
    def run_forward(self, executable: Executable, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward of a program in stages, on every rank, without gradients.

        `tensors` are in the order of `executable.inputs`, and the results in the order of `executable.outputs`.
        """
        table, found = self.prepare(executable), dict[str, LocalValue]()

        def take(program: Executable, results: Sequence[LocalValue], micro_batch: int) -> None:
            pairs = zip(program.outputs, results, strict=True)
            found.update((slot.slot.name, value) for slot, value in pairs if slot.slot.name in table.staged.results)

        self.run(executable, table, lambda micro_batch: executable.by_stage(tensors), [1.0], take)
        names = [slot.slot.name for slot in executable.outputs]
        shared = (self.messages.share(found.pop(name, None), name, table.staged) for name in names)
        return [executable.write_output(value, slot) for value, slot in zip(shared, executable.outputs, strict=True)]


def run_order(order: PipelineOrder, ranks: Iterable[int], run: ProgramRun) -> None:
    """Run the tasks of the pipeline ranks `ranks` in this process, each rank's in its order. The ranks take turns.

    The order must have been proven to end.
    """
    left = [list(reversed(order.ranks[rank])) for rank in ranks]
    while any(left):
        turns = [_run_next(slots, run) for slots in left if slots]
        assert any(turns), "the order was proven to end"


def _run_next(slots: list[Slot], run: ProgramRun) -> bool:
    """Start all tasks of a rank's next slot, which is the last of `slots`, and remove the slot.

    Return False, and start nothing, if one of the tasks cannot run yet.
    """
    if not all(map(run.can_run, slots[-1])):
        return False
    for task in slots.pop():
        run.run_task(task)
    return True


def _one_stage(executable: Executable, order: PipelineOrder | None) -> StagedProgram:
    plan = executable.compiled.plan
    assert order is not None, "a step has an order"
    assert plan is not None, "it was planned"
    loss = loss_of(executable).slot.name
    return StagedProgram((StageProgram(executable.phased, plan),), (), order, {loss: 0})


def loss_of(executable: Executable) -> LocalSlot:
    """Return the output slot of the loss: the first floating scalar that the model returns.

    Raises:
        TraceError: no output is a floating scalar, or the first one depends on no parameter.
    """
    kept = {f"output:{index}" for index in executable.phased.lowered.traced.kept}
    slots = {slot.slot.name: slot for slot in executable.outputs if slot.slot.kind == OutputKind.OUTPUT}
    slots = {name: slot for name, slot in slots.items() if name not in kept}
    outputs = [Output(name, tuple(slot.shape), slot.dtype) for name, slot in slots.items()]
    return slots[loss_among(outputs, {slot.slot.name for slot in executable.tangents}).name]


def check_sums(phased: PhasedProgram) -> None:
    """Raise `NotAvailableError` if a gradient is a partial maximum, minimum or product.

    Micro-batches add their gradients, which is right only for whole values and partial sums.
    """
    lowered = phased.lowered
    nodes = {node.name: node for node in lowered.graph_module.graph.nodes}
    for name in phased.carried:
        spec = nodes[name].meta["spec"]
        pending = (reduction for axis, reduction in spec.partial if lowered.mesh.axis_size(axis) > 1)
        if any(reduction is not Reduction.SUM for reduction in pending):
            raise NotAvailableError(
                f"micro_batches: the plan leaves gradient {name!r} as {spec!r}. Partial values can be added over "
                "micro-batches only if their reduction is a sum. Plan again (leave plan= out), or leave micro_batches "
                "out."
            )
