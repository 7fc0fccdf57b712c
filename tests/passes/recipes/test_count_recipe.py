"""Bytes that recipes send; see also tests of `recipe_formulas`."""

from __future__ import annotations

import dataclasses

from autoshard.ir.execution import Execution
from tests.passes.decoders import dense
from tests.passes.recipes.formula_values import price_of, value_of


def test_stages_hand_on_parts_and_gather_those_that_are_no_whole_sequence() -> None:
    """A stage sends 1/tensor of a hand-over, forward and backward, and gathers it unless its sequence stays split."""
    model, length, micro_batches, tensor, stages = dense(2), 16, 3, 2, 2
    handed_on = 2 * micro_batches * 2 * length * 64 * (stages - 1) // stages  # in bfloat16
    sizes = {"batch": micro_batches, "micro_batch": 1, "sequence": length, "layers": 2, "data": 1, "tensor": tensor}
    for is_split in (False, True):
        base = Execution(tensor=tensor, sequence_parallel=is_split, global_batch=micro_batches)
        whole = price_of(base, length, model)
        piped = price_of(dataclasses.replace(base, pipeline=stages, schedule="1F1B"), length, model)
        assert value_of(piped, "communication_bytes_pipeline", pipeline=stages, **sizes) == handed_on // tensor
        name, gathered = "communication_bytes_tensor", 0 if is_split else handed_on * (tensor - 1) // tensor
        within = value_of(whole, name, pipeline=1, **sizes) / stages
        assert value_of(piped, name, pipeline=stages, **sizes) == within + gathered
