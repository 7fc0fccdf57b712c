"""No phase with a wrong bucket, or a read of what is in flight, is accepted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from autoshard.errors import VerificationError
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.wait_late import WaitLate
from passes.verification.verify_phases import verify_phases
from tests.passes.bucket_mutations import BUCKET_MUTATIONS
from tests.passes.lowering.overlapped import plain
from tests.passes.mutations import Mutation, copy_of

SEEDS = 12


@pytest.mark.parametrize("mutation", BUCKET_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutant_is_refused(mutation: Mutation) -> None:
    """Of a backward with buckets of several members."""
    phased = BucketCollectives()(WaitLate()(plain("gpt", "tensor")))
    verify_phases(phased)
    for seed in range(SEEDS):
        graph_module = copy_of(phased.backward)
        assert mutation(graph_module.graph, Random(seed), phased.lowered.mesh) is not None
        with pytest.raises(VerificationError):
            verify_phases(replace(phased, backward=graph_module))
