"""The order of all passes of lowering, in one tuple (`ORDER`).

An entry is a pair. The first element, a `Moment`, says when the pass runs. The second makes the pass from the options,
or returns None if they do not need the pass. Passes of one moment run in this order. To add a pass, write its file and
put an entry at its place in the tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from passes.lowering.bucket_updates import BucketUpdates
from passes.lowering.cut_backward import CutBackward
from passes.lowering.hoist import Hoist
from passes.lowering.join_biases import JoinBiases
from passes.lowering.keep_rows import KeepRows
from passes.lowering.lower import Lower
from passes.lowering.lowering_options import USUAL, LoweringOptions
from passes.lowering.name_communicators import NameCommunicators
from passes.lowering.narrow_reductions import NarrowReductions
from passes.lowering.node_time import NodeTime
from passes.lowering.select_kernels import SelectKernels
from passes.lowering.split_phases import SplitPhases
from passes.lowering.start_ahead import StartAhead
from passes.lowering.start_soon import StartSoon
from passes.lowering.wait_in_turn import WaitInTurn
from passes.lowering.wait_late import WaitLate
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_fan_outs import InsertFanOuts
from passes.preparation.join_gelu import JoinGelu
from passes.recomputation.recompute import InsertRecompute

Pass = Callable[[Any], Any]
MakePass = Callable[[LoweringOptions], Pass | None]


class Moment(Enum):
    """The steps of planning and lowering at which passes run.

    The value of a moment describes the program that its passes take.
    """

    TRACED = "the traced program, before it has a plan"
    PLANNED = "the program that was planned, with its plan"
    LOWERED = "the program to be lowered; later its lowered form, then its phases"
    IN_FLIGHT = "the phases, within a limit on collectives under way"
    STAGE = "the phases of a pipeline's stage whose order cuts backwards"
    WRITTEN = "a graph of one rank that writes over its inputs"


def _fuse_kernels(options: LoweringOptions) -> Pass | None:
    if not options.with_kernels:
        return None
    from passes.lowering.fuse_kernels import FuseKernels  # imports triton, which only programs with kernels need

    return FuseKernels()


def _generate_kernels(options: LoweringOptions) -> Pass | None:
    if not (options.with_kernels and options.with_generated):
        return None
    if options.prices_kernels:
        from passes.lowering.price_kernels import PriceKernels

        assert options.device is not None, "kernels are priced for a device"
        return PriceKernels(options.device)
    from passes.lowering.generate_kernels import GenerateKernels

    return GenerateKernels(options.device)


ORDER: Sequence[tuple[Moment, MakePass]] = (
    (Moment.TRACED, lambda _: Canonicalize()),
    (Moment.TRACED, lambda _: JoinGelu()),
    (Moment.TRACED, lambda _: InsertFanOuts()),
    (Moment.PLANNED, lambda o: InsertRecompute(o.decided.recompute.nodes, o.decided.offload.nodes)),
    (Moment.LOWERED, lambda o: Lower(o.decided, o.step_cost) if o.lowered is None else None),
    (Moment.LOWERED, _fuse_kernels),
    (Moment.LOWERED, lambda o: SplitPhases(o.saves_least)),
    (Moment.LOWERED, lambda o: Hoist(o.micro_batches, NodeTime(o.decided.mesh, o.cluster), o.memory_bytes, o.load)),
    (Moment.LOWERED, lambda o: JoinBiases() if o.with_native or o.with_kernels else None),
    (Moment.LOWERED, _generate_kernels),
    (Moment.LOWERED, lambda o: SelectKernels() if o.with_native else None),
    (Moment.LOWERED, lambda _: NameCommunicators()),
    (Moment.LOWERED, lambda o: NarrowReductions(o.reduce_dtype) if o.reduce_dtype else None),
    # Saved rows of experts save more time than overlap does. So KeepRows may use memory before the passes below.
    (Moment.LOWERED, lambda o: KeepRows(o.micro_batches, o.memory_bytes, o.load) if o.keeps_rows else None),
    (Moment.IN_FLIGHT, lambda _: WaitLate()),
    (Moment.IN_FLIGHT, lambda o: StartSoon() if o.in_flight.starts_soon else None),
    (Moment.IN_FLIGHT, lambda o: StartAhead(by=None) if o.in_flight.buckets else None),
    (Moment.IN_FLIGHT, lambda o: o.in_flight.buckets),
    (Moment.IN_FLIGHT, lambda o: StartAhead(by=o.in_flight.ahead)),
    (Moment.IN_FLIGHT, lambda o: WaitInTurn(o.in_flight.most_held)),
    (Moment.STAGE, lambda _: CutBackward()),
    (Moment.WRITTEN, lambda _: BucketUpdates()),
)


def passes_at(moment: Moment, options: LoweringOptions = USUAL) -> tuple[Pass, ...]:
    """Return the passes that run at `moment` under `options`, in order."""
    asked = (make(options) for when, make in ORDER if when is moment)
    return tuple(made for made in asked if made is not None)


def run_at(moment: Moment, program: Any, options: LoweringOptions = USUAL) -> Any:
    """Run the passes of `moment` on a program in order, and return the rewritten program.

    Args:
        program: a program of the kind that the moment's value describes.
        options: the options from which the passes are made. `on_pass` is called after each pass.
    """
    for rewrite in passes_at(moment, options):
        made = rewrite(program)
        if options.on_pass is not None:
            options.on_pass(rewrite, program, made)
        program = made
    return program
