"""Mutants, which are compiled programs with one mistake, and the check that must find each mistake.

A mutant is wrong in one place, which has its own check.

* The joint program, its slots or its sums over micro-batches: `verify_program`.
* The phases: `verify_phases`.
* The prepared form: `verify_preparation`.
* The in-place update, or the backward that fills buckets: `verify_in_place`.
* One rank alone: ranks compare their texts.

`tests.passes.mutant_runs` runs mutants beside the right program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.pipeline_order import PipelineOrder, one_after_another
from autoshard.ir.program import Program
from autoshard.ir.spec import P, PartitionSpec, Reduction
from passes.lowering.split_phases import SplitPhases
from passes.verification.local_forms import LocalForms
from passes.verification.verify_in_place import verify_in_place
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from passes.verification.verify_schedule import verify_schedule
from tests.passes.bucket_mutations import BUCKET_MUTATIONS
from tests.passes.hoist_mutations import HOIST_MUTATIONS, results_of
from tests.passes.in_place import written_of
from tests.passes.mutations import MUTATIONS, Mutation, NothingError, choose, copy_of, is_tensor, pick
from tests.passes.rewrite_mutations import REWRITE_MUTATIONS
from tests.passes.schedule_mutations import ONE_STAGE_MUTATIONS
from tests.passes.training_mutations import TRAINING_MUTATIONS

RIGHT_ORDER = one_after_another(2)
"""Two micro-batches one after the other, the order in which mutants run."""


class Place(StrEnum):
    """The wrong part of a compiled program."""

    PROGRAM = "program"
    SLOTS = "slots"
    PHASES = "phases"
    MICRO_BATCHES = "micro-batches"
    PREPARATION = "preparation"
    IN_PLACE = "update in place"
    FILLED = "filled buckets"
    ONE_RANK = "one rank"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A compiled program with one mistake.

    Args:
        place: the wrong part.
        kind: name of the mutation.
        what: description of the change.
        phased: the program with the mistake, or one rank's program; the right program for a mistake in preparation.
        prepared: the prepared form, with the mistake if the mistake is there.
        order: the order of micro-batches in a step, with the mistake if the mistake is there.
        right: the right program, for checks that compare.
    """

    place: Place
    kind: str
    what: str
    phased: PhasedProgram
    prepared: Program
    order: PipelineOrder = RIGHT_ORDER
    right: PhasedProgram | None = None

    def is_refused(self, traced: Program, forms: LocalForms | None = None) -> bool:
        """Whether the check of the wrong part finds the mistake; `forms` are already known local forms."""
        try:
            self.check(traced, forms)
        except VerificationError:
            return True
        return False

    def check(self, traced: Program, forms: LocalForms | None = None) -> None:
        """Run the check of the wrong part, which raises `VerificationError` if it finds the mistake."""
        match self.place:
            case Place.PREPARATION:
                verify_preparation(traced, self.prepared)
            case Place.PHASES:
                verify_phases(self.phased)
            case Place.IN_PLACE if self.right is not None and self.right.update is not None and self.phased.update:
                verify_in_place(self.right.update, self.phased.update, written_of(self.phased))
            case Place.FILLED if self.right is not None:
                verify_in_place(self.right.backward, self.phased.backward, {})
            case Place.ONE_RANK if self.right is not None:
                if self.phased.digest() != self.right.digest():
                    raise VerificationError("ranks run unlike programs")
            case _:
                verify_schedule(self.order)
                verify_program(self.prepared, self.phased.lowered, self.phased.carried, forms)


# Making them.


def draw_mutant(phased: PhasedProgram, random: Random) -> Mutant:
    """Draw a mutant of a program. Half of the draws are of the kinds `OF_REWRITES`, half of any kind."""
    while True:
        kinds = KINDS if random.random() < 0.5 else OF_REWRITES
        mutant = mutate(phased, *random.choice(list(kinds)), random)
        if mutant is not None:
            return mutant


def mutate(phased: PhasedProgram, place: Place, kind: str, random: Random, kinds: Kinds | None = None) -> Mutant | None:
    """Return a mutant of a kind, from `KINDS` by default; None if the program has no place for the kind."""
    try:
        what, wrong, prepared = (kinds or KINDS)[place, kind](phased, random)
    except NothingError:
        return None
    return Mutant(place, kind, what, wrong, prepared, right=phased)


def mutate_order(phased: PhasedProgram, random: Random) -> Mutant | None:
    """Return a mutant whose step runs its micro-batches in a wrong order; None for a program without an update."""
    if phased.update is None:
        return None
    mutation = random.choice(ONE_STAGE_MUTATIONS)
    order = mutation(RIGHT_ORDER, random)
    what = f"{order}, of {order.micro_batches} micro-batches"
    return Mutant(Place.MICRO_BATCHES, mutation.__name__, what, phased, phased.lowered.traced, order)


Found = tuple[str, PhasedProgram, Program]
Mutate = Callable[[PhasedProgram, Random], Found]
Kinds = Mapping[tuple[Place, str], Mutate]
"""Functions that make mutants, by wrong part and mutation; `NothingError` means that the program has no place."""


def _in_program(mutation: Mutation) -> Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> Found:
        module = copy_of(phased.lowered.graph_module)
        what = mutation(module.graph, random, phased.lowered.mesh)
        lowered = replace(phased.lowered, graph_module=module)
        return what, replace(phased, lowered=lowered), phased.lowered.traced

    return mutate


def in_phase(mutation: Mutation) -> Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> Found:
        name = random.choice([name for name in _PHASES if getattr(phased, name) is not None])
        module = copy_of(getattr(phased, name))
        what = mutation(module.graph, random, phased.lowered.mesh)
        return f"{name}: {what}", replace(phased, **{name: module}), phased.lowered.traced

    return mutate


def of_steps(mutation: Callable[[PhasedProgram, Random], tuple[str, PhasedProgram]]) -> Mutate:
    """Make mutants by a mutation of whole phased programs."""
    return lambda phased, random: (*mutation(phased, random), phased.lowered.traced)


def _in_preparation(mutation: Mutation) -> Mutate:
    def mutate(phased: PhasedProgram, random: Random) -> Found:
        traced = phased.lowered.traced
        prepared = replace(traced, graph_module=copy_of(traced.graph_module))
        what = mutation(prepared.graph, random, phased.lowered.mesh)
        return what, phased, prepared

    return mutate


_PHASES = ("hoisted", "forward", "backward", "update")


def exchange_kept(phased: PhasedProgram, random: Random) -> Found:
    """Exchange two values between phases, among the results of a phase or the inputs of the next phase."""
    kept = {("forward", "backward"): len(phased.saved), ("backward", "update"): len(phased.carried)}
    kept["hoisted", "forward"] = len(results_of(phased.hoisted))
    (giver, taker), count = random.choice(list(kept.items()))
    if count < 2 or getattr(phased, taker) is None:
        raise NothingError
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


def exchange_places(phased: PhasedProgram, random: Random) -> Found:
    """Exchange the slots of two inputs, or of two results, of a phase."""
    names = [name for name in _INDICES if len(getattr(phased, name)) > 1]
    name = random.choice(names)
    indices = list(getattr(phased, name))
    first, second = random.sample(range(len(indices)), 2)
    indices[first], indices[second] = indices[second], indices[first]
    return f"{name}: {first} for {second}", replace(phased, **{name: tuple(indices)}), phased.lowered.traced


def update_too_early(phased: PhasedProgram, random: Random) -> Found:
    """Run a call of the update in each micro-batch's backward, before gradients are summed over micro-batches."""
    module = copy_of(phased.lowered.graph_module)

    def is_first(node: fx.Node) -> bool:
        given = [item for item in node.all_input_nodes if item.meta.get("phase") != "update"]
        return node.meta.get("phase") == "update" and is_tensor(node) and node.all_input_nodes == given

    node = pick(module.graph, random, is_first)
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


def promise_other_spec(phased: PhasedProgram, random: Random) -> Found:
    """Give a slot of the program a wrong spec, such as a whole gradient in place of a partial gradient."""
    lowered = phased.lowered
    field = random.choice(("inputs", "outputs"))
    slots: list[LocalSlot] = list(getattr(lowered, field))
    index = random.randrange(len(slots))
    others = [spec for spec in _specs(lowered.mesh, len(slots[index].shape)) if spec != slots[index].spec]
    spec = choose(random, others)
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


def exchange_slots(phased: PhasedProgram, random: Random) -> Found:
    """Exchange two input slots, or two output slots, of the program."""
    field = random.choice(("inputs", "outputs"))
    slots = list(getattr(phased.lowered, field))
    if len(slots) < 2:
        raise NothingError
    first, second = random.sample(range(len(slots)), 2)
    slots[first], slots[second] = slots[second], slots[first]
    lowered = replace(phased.lowered, **{field: tuple(slots)})
    return f"{field} {first} and {second} exchanged", replace(phased, lowered=lowered), phased.lowered.traced


_COMMUNICATING = ("collective", "reduction", "rank", "offset", "wait", "group", "gather", "average", "unreduced")


def _is_local(mutation: Mutation) -> bool:
    """Whether the name of a mutation has no word of communication, so that a program of one device can have it."""
    return not any(word in mutation.__name__ for word in _COMMUNICATING)


_GRAPH_MUTATIONS = (*MUTATIONS, *TRAINING_MUTATIONS)
_OUTSIDE_KERNELS = [item for item in REWRITE_MUTATIONS if "kernel" not in item.__name__]
OF_REWRITES: Kinds = {
    **{(Place.PROGRAM, item.__name__): _in_program(item) for item in _OUTSIDE_KERNELS},
    **{(Place.PHASES, item.__name__): in_phase(item) for item in REWRITE_MUTATIONS},
    **{(Place.PREPARATION, item.__name__): _in_preparation(item) for item in _OUTSIDE_KERNELS},
}
"""Mistakes in recomputed clones, casts and kernels; kernels are in phases only."""

KINDS: Kinds = {
    **{(Place.PROGRAM, item.__name__): _in_program(item) for item in _GRAPH_MUTATIONS},
    **{(Place.SLOTS, item.__name__): item for item in (promise_other_spec, exchange_slots)},
    **{(Place.PHASES, item.__name__): in_phase(item) for item in _GRAPH_MUTATIONS[::3]},
    **{(Place.PHASES, item.__name__): item for item in (exchange_kept, exchange_places)},
    **{(Place.PHASES, item.__name__): in_phase(item) for item in BUCKET_MUTATIONS},
    **{(Place.PHASES, item.__name__): of_steps(item) for item in HOIST_MUTATIONS},
    **{(Place.PREPARATION, item.__name__): _in_preparation(item) for item in _GRAPH_MUTATIONS if _is_local(item)},
    (Place.MICRO_BATCHES, "update_too_early"): update_too_early,
    **OF_REWRITES,
}
"""Mistakes in the joint program, its slots, its phases, its buckets and its prepared form."""
