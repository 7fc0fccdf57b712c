"""Wrong programs of the overlap passes: the verifier accepts no mutant that computes other numbers or hangs.

Run: python -m tests.benchmarks.overlap_campaign --count 2000 --seed 0 [--jobs 2] [--family gpt] [--layout ZeRO-1 ...]
     [--folder FOLDER] [--out PAGE]

The campaign is `tests.benchmarks.mutation_campaign` for programs with the fewest buckets and the latest waits.
Mutants (`tests.passes.overlap_mutants`) are wrong in their phases, in the in-place update, or on one rank alone.
They run beside the right program with guarded messages (`tests.passes.in_flight`). Early reads, and messages from
overwritten memory, are NaN. A rank that sends another message in its turn would hang or get a wrong answer, and
counts as changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from random import Random

import torch

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from passes.verification.verify_in_place import verify_in_place
from tests.benchmarks.mutation_campaign import Campaign, Proven, main, proven
from tests.passes.in_place import in_place, written_of
from tests.passes.layouts import MESH, program_of
from tests.passes.lowering.overlapped import plain_on
from tests.passes.mutants import Mutant
from tests.passes.overlap_mutants import draw_overlap_mutant, in_buckets

_FOUR, _THREE = Mesh({"data": 4}), Mesh({"data": 3})
_NARROW = "mixed precision, gradients in bf16"

PLANS: Mapping[str, tuple[Mesh, str]] = {
    "data": (MESH, "data"),
    "ZeRO-1": (MESH, "ZeRO-1"),
    "ZeRO-3": (MESH, "ZeRO-3"),
    "tensor": (MESH, "tensor"),
    "two axes": (MESH, "two axes"),
    "data on one axis": (_FOUR, "data"),
    "ZeRO-1 on one axis": (_FOUR, "ZeRO-1"),
    "ZeRO-3 on three ranks": (_THREE, "ZeRO-3"),
    _NARROW: (_FOUR, "mixed precision"),
}
"""Meshes, and layouts of `tests.passes.layouts`."""


def plain(family: str, plan: str) -> PhasedProgram:
    """The program of a family before the passes of overlap."""
    return plain_on(*PLANS[plan], family, torch.bfloat16 if plan == _NARROW else None)


@cache
def with_buckets(family: str, plan: str) -> PhasedProgram:
    """The program of a family with buckets, from which mutants are drawn."""
    return in_buckets(plain(family, plan))


def prove_in_buckets(family: str, plan: str) -> Proven:
    """Return a right program in buckets, proven together with its in-place update."""
    phased = with_buckets(family, plan)
    if phased.update is not None:
        written = in_place(phased).update
        assert written is not None
        verify_in_place(phased.update, written, written_of(phased))
    return proven(family, phased, program_of(family, PLANS[plan][1]))


def _draw(family: str, plan: str, number: int, random: Random) -> Mutant:
    return draw_overlap_mutant(plain(family, plan), with_buckets(family, plan), random)


OF_OVERLAP = Campaign(
    name="overlap_campaign",
    title="Mutants of buckets, late waits and updates in place beside the verifier",
    count=2000,
    sampled=8,
    families=("gpt", "llama", "mixture", "unet", "lstm", "recommender"),
    layouts=tuple(PLANS),
    prove=prove_in_buckets,
    draw=_draw,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], OF_OVERLAP))
