"""Run mutants on the simulator beside the right program, to see whether numbers differ or ranks would hang."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from autoshard.errors import AutoshardError
from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.pipeline_order import PipelineOrder, Work
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.runtime.simulator import simulate
from tests.passes.in_flight import InFlight
from tests.passes.in_place import in_place
from tests.passes.mutants import RIGHT_ORDER, Mutant, Place

HYPER = torch.tensor([0.05, 0.9, 0.99, 1e-8, 0.1, 2.0], dtype=torch.float64)
"""Learning rate, both decays, epsilon, weight decay and step of AdamW."""

TOLERANCE = 1e-8
"""A relative difference of numbers in float64 that no order of summation makes."""

_ONE = Mesh({"one": 1})
_FAILURES = (
    AutoshardError, RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError, AssertionError,
    MemoryError, SystemError,
)  # fmt: skip
"""Errors after which a program counts as unable to run."""


@dataclass(frozen=True, slots=True)
class Run:
    """The right program with its inputs, and its results as the reference of mutants.

    Args:
        phased: the right program.
        batches: global values of the inputs of two micro-batches, by slot.
    """

    phased: PhasedProgram
    batches: tuple[Sequence[Tensor], Sequence[Tensor]]
    _expected: dict[Place, list[Tensor | str]] = field(default_factory=dict)

    def is_changed_by(self, mutant: Mutant) -> bool:
        """Whether a mutant computes another number on some rank, or cannot run."""
        if mutant.place not in self._expected:
            right = in_place(self.phased) if mutant.place is Place.IN_PLACE else self.phased
            self._expected[mutant.place] = self.numbers(mutant.place, right, self.phased.lowered.traced)
        expected = self._expected[mutant.place]

        def is_changed() -> bool:
            try:
                with np.errstate(all="ignore"):  # Triton's interpreter is numpy's, and a mutant's numbers may overflow
                    found = self.numbers(mutant.place, mutant.phased, mutant.prepared, mutant.order)
            except _FAILURES:
                return True
            return len(found) != len(expected) or not all(map(_is_close, found, expected))

        return _ask_child(is_changed)

    def numbers(
        self, place: Place, phased: PhasedProgram, prepared: Program, order: PipelineOrder = RIGHT_ORDER
    ) -> list[Tensor | str]:
        """Return whole results with a check of each rank's piece.

        For a mutant of one rank, return the values that the rank sends.
        """
        if place is Place.PREPARATION:
            values = [[value] for value in self.batches[0]]
            return [ranks[0] for ranks in simulate(prepared.graph_module, _ONE, values)]
        lowered = phased.lowered
        given = [self._laid_out(lowered, batch) for batch in self.batches]
        run = _Simulated(lowered.mesh)
        match place:
            case Place.PHASES | Place.MICRO_BATCHES | Place.FILLED:
                return _numbers_of(lowered, _run_step(phased, given, order, run))
            case Place.IN_PLACE:
                run.is_written = phased.update
                return [*_numbers_of(lowered, _run_step(phased, given, order, run)), *run.left]
            case Place.ONE_RANK:
                run.sending = _Sending(lowered.mesh.size - 1)
                _run_step(phased, given, order, run)
                return run.sending.everything()
            case _:
                return _numbers_of(lowered, run(lowered.graph_module, given[0]))

    def _laid_out(self, lowered: LoweredProgram, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        names = {
            (slot.slot.kind, slot.slot.name): value
            for slot, value in zip(self.phased.lowered.inputs, batch, strict=True)
        }
        return [
            shard_all(names[slot.slot.kind, slot.slot.name], slot.spec, lowered.mesh, padding=_poison(slot))
            for slot in lowered.inputs
        ]


def _ask_child(question: Callable[[], bool]) -> bool:
    """Answer in a separate process; a killed process counts as yes, because wrong sizes write out of bounds.

    Raises:
        RuntimeError: the process failed in another way; its traceback is printed.
    """
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # a mutant that crashes is an answer
        try:
            os._exit(int(question()))
        except BaseException:  # noqa: BLE001  (the child must not go on as the parent)
            traceback.print_exc()
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 1:
        raise RuntimeError("a mutant could not be held beside the right program; see the traceback above")
    return status != 0


def _poison(slot: LocalSlot) -> float:
    """The padding of a slot, NaN for floating values, because no call may read padding."""
    return float("nan") if slot.dtype.is_floating_point else 0


def draw_batch(lowered: LoweredProgram, examples: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random values for all placeholders; integer inputs are the examples, rolled along dim 0 by `seed`."""
    numbers = torch.Generator().manual_seed(seed)
    found = []
    for slot in lowered.inputs:
        value = torch.randn(slot.shape, generator=numbers, dtype=torch.float64)
        match slot.slot.kind:
            case InputKind.HYPER:
                value = HYPER
            case InputKind.SEED:
                value = torch.full(slot.shape, 12345 + seed)
            case InputKind.STATE:
                value = value.abs()
            case InputKind.BUFFER if "var" in slot.slot.name or "num" in slot.slot.name:
                value = value.abs() + 1
            case InputKind.INPUT if not slot.dtype.is_floating_point:
                value = examples[int(slot.slot.name.partition(":")[2])].roll(seed, 0)
        found.append(value.to(slot.dtype))
    return found


def run_of(phased: PhasedProgram, examples: Sequence[Tensor]) -> Run:
    """The run of the right program with two batches, which differ only in their inputs and seeds."""
    first, second = (draw_batch(phased.lowered, examples, seed) for seed in (0, 1))
    own = (InputKind.INPUT, InputKind.SEED)
    kinds = [slot.slot.kind for slot in phased.lowered.inputs]
    second = [theirs if kind in own else ours for kind, ours, theirs in zip(kinds, first, second, strict=True)]
    return Run(phased, (first, second))


@dataclass(slots=True)
class _Simulated:
    """Run a graph on all ranks, with guarded memory in flight.

    Args:
        mesh: the ranks.
        is_written: the graph that writes its inputs, if any; `left` has the inputs afterwards.
        sending: records messages, if given.
    """

    mesh: Mesh
    is_written: fx.GraphModule | None = None
    left: list[Tensor] = field(default_factory=list)
    sending: _Sending | None = None

    def __call__(self, graph_module: fx.GraphModule, values: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        if graph_module is self.is_written:
            values = [[value.clone() for value in ranks] for ranks in values]
            self.left = [value for ranks in values for value in ranks]
        in_flight, sending = InFlight(), self.sending

        def on_values(node: fx.Node, found: Any) -> None:
            if sending is not None:
                sending.see(node, found)
            in_flight(node, found)

        return simulate(graph_module, self.mesh, values, on_values=on_values)


@dataclass(slots=True)
class _Sending:
    """Records the collectives of one rank by communicator, with the values that the rank sends."""

    rank: int
    values: dict[fx.Node, Sequence[Any]] = field(default_factory=dict)
    sent: defaultdict[str, list[Tensor | str]] = field(default_factory=lambda: defaultdict(list))

    def see(self, node: fx.Node, values: Sequence[Any]) -> None:
        """Keep the values of a node, and record the rank's operands if the node is a collective."""
        self.values[node] = values
        if is_collective(node):
            operands = [self.values[operand][self.rank] for operand in node.all_input_nodes]
            self.sent[str(node.args[-1])] += [f"{node.target} {node.args[1:]}", *operands]

    def everything(self) -> list[Tensor | str]:
        """Return all sent values, one communicator after the other."""
        return [item for name in sorted(self.sent) for item in (name, *self.sent[name])]


def _run_step(
    phased: PhasedProgram, batches: Sequence[Sequence[list[Tensor]]], order: PipelineOrder, run: _Simulated
) -> list[list[Tensor]]:
    """Return the results of a step in the order of the joint program's slots.

    The update reads sums of gradients over micro-batches. All other results are those of the last micro-batch.
    The order is the order of `TracedStep`. The hoisted part runs before the first forward. The first forward draws the
    first seed, and each forward reads the buffers that the previous forward wrote.
    """
    inputs, outputs = phased.lowered.inputs, phased.lowered.outputs
    results: list[Any] = [None] * len(outputs)
    places = {(slot.slot.kind, slot.slot.name): index for index, slot in enumerate(inputs)}
    buffers: dict[int, list[Tensor]] = {}
    seeds = [index for index, slot in enumerate(inputs) if slot.slot.kind is InputKind.SEED]
    saved: dict[int, list[list[Tensor]]] = {}
    carried: list[list[Tensor]] | None = None
    held: list[list[Tensor]] | None = None
    drawn = 0
    for task in chain.from_iterable(order.ranks[0]):
        if task.work is Work.FORWARD:
            batch = dict(enumerate(batches[task.micro_batch])) | buffers
            batch |= {index: batches[drawn % len(batches)][index] for index in seeds}
            drawn += 1
            if held is None and phased.hoisted is not None:
                held = run(phased.hoisted, [batch[index] for index in phased.hoisted_inputs])
            found = run(phased.forward, [*(batch[index] for index in phased.forward_inputs), *(held or ())])
            for index, ranks in zip(phased.forward_outputs, found, strict=False):
                if outputs[index].slot.kind is OutputKind.BUFFER_UPDATE:
                    buffers[places[InputKind.BUFFER, outputs[index].slot.name]] = ranks
                results[index] = ranks
            saved[task.micro_batch] = found[len(phased.forward_outputs) :]
            continue
        tangents = [batches[task.micro_batch][index] for index in phased.backward_inputs]
        shares = [[value / order.micro_batches for value in ranks] for ranks in tangents]
        found = run(phased.backward, [*saved[task.micro_batch], *shares])
        _put(results, phased.backward_outputs, found)
        gradients = found[len(phased.backward_outputs) :]
        carried = gradients if carried is None else [_add(*pair) for pair in zip(carried, gradients, strict=True)]
    if phased.update is not None and carried is not None:
        taken = [*carried, *(batches[0][index] for index in phased.update_inputs)]
        _put(results, phased.update_outputs, run(phased.update, taken))
    return results


def _put(results: list[Any], indices: Sequence[int], found: Sequence[list[Tensor]]) -> None:
    for index, ranks in zip(indices, found, strict=False):
        results[index] = ranks


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [mine + theirs for mine, theirs in zip(left, right, strict=True)]


def _numbers_of(lowered: LoweredProgram, results: Sequence[list[Tensor]]) -> list[Tensor | str]:
    """Return each whole result, and for each rank whether its piece, without padding, is a piece of the whole."""
    numbers: list[Tensor | str] = []
    for slot, ranks in zip(lowered.outputs, results, strict=True):
        whole = unshard(ranks, slot.spec, lowered.mesh, slot.shape)
        numbers.append(whole)
        if not slot.spec.partial:
            due = shard_all(whole, slot.spec, lowered.mesh)
            real = shard_all(torch.ones(slot.shape, dtype=torch.bool), slot.spec, lowered.mesh, padding=False)
            held = [torch.where(mask, value, 0) for value, mask in zip(ranks, real, strict=True)]
            numbers.append(torch.tensor([_is_close(*pair) for pair in zip(held, due, strict=True)]))
    return numbers


def _is_close(left: Tensor | str, right: Tensor | str) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return isinstance(left, str) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    scale = float(right.abs().nan_to_num(0, 0, 0).max()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
