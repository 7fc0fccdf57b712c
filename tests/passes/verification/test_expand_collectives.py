"""`verify_phases` refuses a phase with a wrong bucket or an early read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.wait_late import WaitLate
from passes.verification.verify_phases import verify_phases
from tests.passes.bucket_mutations import BUCKET_MUTATIONS
from tests.passes.lowering.overlapped import fully_sharded, plain
from tests.passes.mutations import Mutation, copy_of

SEEDS = 5
LARGE = BucketCollectives(end_bytes=2**30, least_bytes=2**30, most_bytes=2**30)


SOURCES = {
    "reduced": lambda: plain("gpt", "tensor"),
    "scattered": fully_sharded,
    "gathered": lambda: plain("gpt", "data"),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("mutation", BUCKET_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutant_is_refused(mutation: Mutation, source: Callable[[], PhasedProgram]) -> None:
    """Every mutation of buckets that are all-reduced, scattered or gathered is refused."""
    phased = LARGE(WaitLate()(source()))
    verify_phases(phased)
    for seed in range(SEEDS):
        graph_module = copy_of(phased.backward)
        assert mutation(graph_module.graph, Random(seed), phased.lowered.mesh) is not None
        with pytest.raises(VerificationError):
            verify_phases(replace(phased, backward=graph_module))
