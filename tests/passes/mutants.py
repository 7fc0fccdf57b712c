"""Wrong programs: mutations lifted to what is compiled, each with the check that should refuse it and a run of it.

A mutant is wrong at one of five places: in the joint program, its slots or what of it is added up over micro-batches
(`verify_program`), in the phases that it is cut into (`verify_phases`), or in the form that is lowered
(`verify_preparation`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from autoshard.errors import AutoshardError, VerificationError
from autoshard.ir.lowered import LocalSlot, LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.spec import P, PartitionSpec, Reduction
from autoshard.ir.step_order import Action, StepOrder, one_after_another
from autoshard.runtime.boundary import shard_all, unshard
from autoshard.runtime.simulator import simulate
from passes.lowering.split_phases import SplitPhases
from passes.verification.local_forms import LocalForms
from passes.verification.verify_order import verify_order
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from tests.passes.bucket_mutations import BUCKET_MUTATIONS
from tests.passes.hoist_mutations import HOIST_MUTATIONS, results_of
from tests.passes.mutations import MUTATIONS, Mutation, copy_of, is_tensor, pick
from tests.passes.order_mutations import ORDER_MUTATIONS
from tests.passes.rewrite_mutations import REWRITE_MUTATIONS
from tests.passes.training_mutations import TRAINING_MUTATIONS

HYPER = torch.tensor([0.05, 0.9, 0.99, 1e-8, 0.1, 2.0], dtype=torch.float64)
"""Learning rate, both decays, epsilon, weight decay and step of AdamW."""

TOLERANCE = 1e-8
"""A relative difference of numbers in float64 that no order of summation makes."""

_ONE = Mesh({"one": 1})
_FAILURES = (AutoshardError, RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError)
"""How a program that cannot run shows it."""


RIGHT_ORDER = one_after_another(2)
"""Mutants of phases run two micro-batches."""


class Place(StrEnum):
    """What of a compiled program is wrong."""

    PROGRAM = "program"
    SLOTS = "slots"
    PHASES = "phases"
    MICRO_BATCHES = "micro-batches"
    PREPARATION = "preparation"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A compiled program with one mistake.

    Args:
        place: where it is wrong.
        kind: name of the mutation.
        what: what it did.
        phased: the program with the mistake (the right one, if it is in its preparation).
        prepared: the form that is lowered, with the mistake if it is there.
        order: in which a step runs its micro-batches, with the mistake if it is there.
    """

    place: Place
    kind: str
    what: str
    phased: PhasedProgram
    prepared: Program
    order: StepOrder = RIGHT_ORDER

    def is_refused(self, traced: Program, forms: LocalForms | None = None) -> bool:
        """Whether the check of its place finds the mistake; `forms` are those known of the mesh."""
        try:
            self.check(traced, forms)
        except VerificationError:
            return True
        return False

    def check(self, traced: Program, forms: LocalForms | None = None) -> None:
        """The check of its place, as `autoshard.compile` makes it."""
        if self.place is Place.PREPARATION:
            verify_preparation(traced, self.prepared)
        elif self.place is Place.PHASES:
            verify_phases(self.phased)
        else:
            verify_order(self.order, 2)
            verify_program(self.prepared, self.phased.lowered, self.phased.carried, forms)


# Making them.


def draw_mutant(phased: PhasedProgram, random: Random) -> Mutant:
    """One mutant of a program: half of them of what rewrites put in, if there is such; kinds are equally likely."""
    while True:
        kinds = KINDS if random.random() < 0.5 else OF_REWRITES
        mutant = mutate(phased, *random.choice(list(kinds)), random)
        if mutant is not None:
            return mutant


def mutate(phased: PhasedProgram, place: Place, kind: str, random: Random) -> Mutant | None:
    """A mutant of some kind (see `KINDS`); None where the program has no place for it."""
    found = KINDS[place, kind](phased, random)
    if found is None:
        return None
    what, wrong, prepared = found
    return Mutant(place, kind, what, wrong, prepared)


def mutate_order(phased: PhasedProgram, random: Random) -> Mutant | None:
    """A mutant whose step runs its micro-batches otherwise; None for a program without an update."""
    if phased.update is None:
        return None
    kind = random.choice(list(ORDER_MUTATIONS))
    what, order = ORDER_MUTATIONS[kind](RIGHT_ORDER, random)
    return Mutant(Place.MICRO_BATCHES, kind, what, phased, phased.lowered.traced, order)


_Found = tuple[str, PhasedProgram, Program]
_Mutate = Callable[[PhasedProgram, Random], _Found | None]


def _in_program(mutation: Mutation) -> _Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> _Found | None:
        module = copy_of(phased.lowered.graph_module)
        what = mutation(module.graph, random, phased.lowered.mesh)
        if what is None:
            return None
        lowered = replace(phased.lowered, graph_module=module)
        return what, replace(phased, lowered=lowered), phased.lowered.traced

    return mutate


def _in_phase(mutation: Mutation) -> _Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> _Found | None:
        name = random.choice([name for name in _PHASES if getattr(phased, name) is not None])
        module = copy_of(getattr(phased, name))
        what = mutation(module.graph, random, phased.lowered.mesh)
        wrong = None if what is None else replace(phased, **{name: module})
        return None if what is None or wrong is None else (f"{name}: {what}", wrong, phased.lowered.traced)

    return mutate


def _hoisted(mutation: Callable[[PhasedProgram, Random], tuple[str, PhasedProgram] | None]) -> _Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> _Found | None:
        found = mutation(phased, random)
        return None if found is None else (*found, phased.lowered.traced)

    return mutate


def _in_preparation(mutation: Mutation) -> _Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> _Found | None:
        traced = phased.lowered.traced
        prepared = replace(traced, graph_module=copy_of(traced.graph_module))
        what = mutation(prepared.graph, random, phased.lowered.mesh)
        return None if what is None else (what, phased, prepared)

    return mutate


_PHASES = ("hoisted", "forward", "backward", "update")


def exchange_kept(phased: PhasedProgram, random: Random) -> _Found | None:
    """Two values that one phase keeps for the next, exchanged where they are given or where they are taken."""
    kept = {("forward", "backward"): len(phased.saved), ("backward", "update"): len(phased.carried)}
    kept["hoisted", "forward"] = len(results_of(phased.hoisted))
    (giver, taker), count = random.choice(list(kept.items()))
    if count < 2 or getattr(phased, taker) is None:
        return None
    first, second = random.sample(range(count), 2)
    if random.random() < 0.5:
        module = copy_of(getattr(phased, giver))
        output = module.graph.output_node()
        results: Any = list(output.args[0])  # type: ignore[arg-type]
        start = len(results) - count
        results[start + first], results[start + second] = results[start + second], results[start + first]
        output.args = (tuple(results),)
        return f"{giver} keeps {first} as {second}", replace(phased, **{giver: module}), phased.lowered.traced
    module = copy_of(getattr(phased, taker))
    taken = [node for node in module.graph.nodes if node.op == "placeholder"]
    start = len(phased.forward_inputs) if taker == "forward" else 0
    left, right = taken[start + first], taken[start + second]
    left_users, right_users = list(left.users), list(right.users)
    for user in dict.fromkeys((*left_users, *right_users)):
        swap = {left: right, right: left}
        user.args = fx.map_arg(user.args, lambda item, swap=swap: swap.get(item, item))
        user.kwargs = fx.map_arg(user.kwargs, lambda item, swap=swap: swap.get(item, item))
    return f"{taker} takes {first} for {second}", replace(phased, **{taker: module}), phased.lowered.traced


def exchange_places(phased: PhasedProgram, random: Random) -> _Found | None:
    """Two inputs or two results of a phase that stand for each other's slots."""
    names = [name for name in _INDICES if len(getattr(phased, name)) > 1]
    name = random.choice(names)
    indices = list(getattr(phased, name))
    first, second = random.sample(range(len(indices)), 2)
    indices[first], indices[second] = indices[second], indices[first]
    return f"{name}: {first} for {second}", replace(phased, **{name: tuple(indices)}), phased.lowered.traced


def update_too_early(phased: PhasedProgram, random: Random) -> _Found | None:
    """A call of the update that is made for each micro-batch: what is added up is made of gradients, not these."""
    module = copy_of(phased.lowered.graph_module)

    def is_first(node: fx.Node) -> bool:
        given = [item for item in node.all_input_nodes if item.meta.get("phase") != "update"]
        return node.meta.get("phase") == "update" and is_tensor(node) and node.all_input_nodes == given

    node = pick(module.graph, random, is_first)
    if node is None:
        return None
    node.meta["phase"] = "backward"
    lowered = replace(phased.lowered, graph_module=fx.GraphModule(module, module.graph))
    return f"{node} before the sum", SplitPhases()(lowered), phased.lowered.traced


_INDICES = (
    "hoisted_inputs",
    "forward_inputs",
    "forward_outputs",
    "backward_inputs",
    "backward_outputs",
    "update_inputs",
    "update_outputs",
)


def promise_other_spec(phased: PhasedProgram, random: Random) -> _Found | None:
    """A slot that is said to lie otherwise: a weight that is not synchronised, a gradient split for one that is not."""
    lowered = phased.lowered
    field = random.choice(("inputs", "outputs"))
    slots: list[LocalSlot] = list(getattr(lowered, field))
    index = random.randrange(len(slots))
    others = [spec for spec in _specs(lowered.mesh, len(slots[index].shape)) if spec != slots[index].spec]
    if not others:
        return None
    spec = random.choice(others)
    slots[index] = replace(slots[index], spec=spec)
    what = f"{slots[index].slot.kind} {slots[index].slot.name} of {field} as {spec!r}"
    wrong = replace(lowered, **{field: tuple(slots)})
    return what, replace(phased, lowered=wrong), lowered.traced


def _specs(mesh: Mesh, ndim: int) -> Iterator[PartitionSpec]:
    yield P()
    for axis in mesh.axis_names:
        yield P(partial={axis: Reduction.SUM})
        for dim in range(ndim):
            yield P(*[None] * dim, axis)


def exchange_slots(phased: PhasedProgram, random: Random) -> _Found | None:
    """Two slots of the program in each other's place."""
    field = random.choice(("inputs", "outputs"))
    slots = list(getattr(phased.lowered, field))
    if len(slots) < 2:
        return None
    first, second = random.sample(range(len(slots)), 2)
    slots[first], slots[second] = slots[second], slots[first]
    lowered = replace(phased.lowered, **{field: tuple(slots)})
    return f"{field} {first} and {second} exchanged", replace(phased, lowered=lowered), phased.lowered.traced


_COMMUNICATING = ("collective", "reduction", "rank", "offset", "wait", "group", "gather", "average", "unreduced")


def _is_local(mutation: Mutation) -> bool:
    """Whether a mutation can be made where there is no communication."""
    return not any(word in mutation.__name__ for word in _COMMUNICATING)


_GRAPH_MUTATIONS = (*MUTATIONS, *TRAINING_MUTATIONS)
_OUTSIDE_KERNELS = [item for item in REWRITE_MUTATIONS if "kernel" not in item.__name__]
OF_REWRITES: Mapping[tuple[Place, str], _Mutate] = {
    **{(Place.PROGRAM, item.__name__): _in_program(item) for item in _OUTSIDE_KERNELS},
    **{(Place.PHASES, item.__name__): _in_phase(item) for item in REWRITE_MUTATIONS},
    **{(Place.PREPARATION, item.__name__): _in_preparation(item) for item in _OUTSIDE_KERNELS},
}
"""Mistakes in clones, casts and kernels; these stand in phases only."""

KINDS: Mapping[tuple[Place, str], _Mutate] = {
    **{(Place.PROGRAM, item.__name__): _in_program(item) for item in _GRAPH_MUTATIONS},
    **{(Place.SLOTS, item.__name__): item for item in (promise_other_spec, exchange_slots)},
    **{(Place.PHASES, item.__name__): _in_phase(item) for item in _GRAPH_MUTATIONS[::3]},
    **{(Place.PHASES, item.__name__): item for item in (exchange_kept, exchange_places)},
    **{(Place.PHASES, item.__name__): _in_phase(item) for item in BUCKET_MUTATIONS},
    **{(Place.PHASES, item.__name__): _hoisted(item) for item in HOIST_MUTATIONS},
    **{(Place.PREPARATION, item.__name__): _in_preparation(item) for item in _GRAPH_MUTATIONS if _is_local(item)},
    (Place.MICRO_BATCHES, "update_too_early"): update_too_early,
    **OF_REWRITES,
}
"""Where a mutant may be wrong and by which mutation, and what makes it."""


# Running them.


@dataclass(frozen=True, slots=True)
class Run:
    """What the right program computes, beside which mutants are held.

    Args:
        phased: the right program.
        batches: global values of the inputs of two micro-batches, by slot.
    """

    phased: PhasedProgram
    batches: tuple[Sequence[Tensor], Sequence[Tensor]]
    _expected: dict[Place, list[Tensor]] = field(default_factory=dict)

    def is_changed_by(self, mutant: Mutant) -> bool:
        """Whether a mutant computes another number, on some rank, or cannot run."""
        if mutant.place not in self._expected:
            self._expected[mutant.place] = self.numbers(mutant.place, self.phased, self.phased.lowered.traced)
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
        self, place: Place, phased: PhasedProgram, prepared: Program, order: StepOrder = RIGHT_ORDER
    ) -> list[Tensor]:
        """All results; of every rank, if they should hold copies."""
        if place is Place.PREPARATION:
            values = [[value] for value in self.batches[0]]
            return [ranks[0] for ranks in simulate(prepared.graph_module, _ONE, values)]
        lowered = phased.lowered
        given = [self._laid_out(lowered, batch) for batch in self.batches]
        if place in (Place.PHASES, Place.MICRO_BATCHES):
            return _numbers_of(lowered, _run_step(phased, given, order))
        return _numbers_of(lowered, simulate(lowered.graph_module, lowered.mesh, given[0]))

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
    """The answer of a process of its own; yes if that is killed: with wrong sizes operators write where they must not.

    Raises:
        RuntimeError: the question was not answered; its traceback is printed.
    """
    child = os.fork()
    if child == 0:
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
    """What nobody may read: padding of floating values."""
    return float("nan") if slot.dtype.is_floating_point else 0


def draw_batch(lowered: LoweredProgram, examples: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Generic values for all placeholders: normal numbers; integers are those of the examples, turned round."""
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
    """The right program with two batches that differ in their inputs and their seeds alone."""
    first, second = (draw_batch(phased.lowered, examples, seed) for seed in (0, 1))
    own = (InputKind.INPUT, InputKind.SEED)
    kinds = [slot.slot.kind for slot in phased.lowered.inputs]
    second = [theirs if kind in own else ours for kind, ours, theirs in zip(kinds, first, second, strict=True)]
    return Run(phased, (first, second))


def _run_step(phased: PhasedProgram, batches: Sequence[Sequence[list[Tensor]]], order: StepOrder) -> list[list[Tensor]]:
    """Results in the order of the joint program's slots, outputs and gradients added over micro-batches.

    As `TracedStep` does it: what is hoisted runs before the first forward; the first forward that runs draws the first
    seed, and each reads the buffers that the one before it wrote.
    """
    mesh, inputs, outputs = phased.lowered.mesh, phased.lowered.inputs, phased.lowered.outputs
    results: list[Any] = [None] * len(outputs)
    places = {(slot.slot.kind, slot.slot.name): index for index, slot in enumerate(inputs)}
    buffers: dict[int, list[Tensor]] = {}
    seeds = [index for index, slot in enumerate(inputs) if slot.slot.kind is InputKind.SEED]
    saved: dict[int | None, list[list[Tensor]]] = {}
    carried: list[list[Tensor]] | None = None
    held: list[list[Tensor]] | None = None
    drawn = 0
    for task in order.tasks:
        match task.action:
            case Action.FORWARD:
                batch = dict(enumerate(batches[task.micro_batch or 0])) | buffers
                batch |= {index: batches[drawn % len(batches)][index] for index in seeds}
                drawn += 1
                if held is None and phased.hoisted is not None:
                    held = simulate(phased.hoisted, mesh, [batch[index] for index in phased.hoisted_inputs])
                taken = [*(batch[index] for index in phased.forward_inputs), *(held or ())]
                found = simulate(phased.forward, mesh, taken)
                for index, ranks in zip(phased.forward_outputs, found, strict=False):
                    if outputs[index].slot.kind is OutputKind.BUFFER_UPDATE:
                        buffers[places[InputKind.BUFFER, outputs[index].slot.name]] = ranks
                    results[index] = ranks
                saved[task.micro_batch] = found[len(phased.forward_outputs) :]
            case Action.BACKWARD:
                tangents = [batches[task.micro_batch or 0][index] for index in phased.backward_inputs]
                shares = [[value / order.divisor for value in ranks] for ranks in tangents]
                found = simulate(phased.backward, mesh, [*saved[task.micro_batch], *shares])
                _put(results, phased.backward_outputs, found)
                gradients = found[len(phased.backward_outputs) :]
                carried = (
                    gradients if carried is None else [_add(*pair) for pair in zip(carried, gradients, strict=True)]
                )
            case Action.UPDATE if phased.update is not None and carried is not None:
                taken = [*carried, *(batches[0][index] for index in phased.update_inputs)]
                _put(results, phased.update_outputs, simulate(phased.update, mesh, taken))
    return results


def _put(results: list[Any], indices: Sequence[int], found: Sequence[list[Tensor]]) -> None:
    for index, ranks in zip(indices, found, strict=False):
        results[index] = ranks


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [mine + theirs for mine, theirs in zip(left, right, strict=True)]


def _numbers_of(lowered: LoweredProgram, results: Sequence[list[Tensor]]) -> list[Tensor]:
    """Each result as a whole, and whether what each rank holds of it, but for padding, is of that whole."""
    numbers = []
    for slot, ranks in zip(lowered.outputs, results, strict=True):
        numbers.append(unshard(ranks, slot.spec, lowered.mesh, slot.shape))
        if not slot.spec.partial:
            due = shard_all(numbers[-1], slot.spec, lowered.mesh)
            real = shard_all(torch.ones(slot.shape, dtype=torch.bool), slot.spec, lowered.mesh, padding=False)
            held = [torch.where(mask, value, 0) for value, mask in zip(ranks, real, strict=True)]
            numbers.append(torch.tensor([_is_close(*pair) for pair in zip(held, due, strict=True)]))
    return numbers


def _is_close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    scale = float(right.abs().nan_to_num(0, 0, 0).max()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
