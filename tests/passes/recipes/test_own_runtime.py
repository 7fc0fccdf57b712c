"""The profile of `autoshard.compile`: what its recipes hold, move and send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard import Cluster
from autoshard.ir.execution import Execution
from cost_models.streams import measured_slowdown
from passes.recipes.own_runtime import (
    bucket_count,
    casts,
    end_copies,
    gradients_beside,
    own_runtime,
    pass_bytes,
    section_bucket_count,
    sent_again,
    state_bytes,
    step_model,
    update_bytes,
)
from passes.sections.price_sections import AxisTraffic
from passes.sections.propagate_axis import MoveKind
from tests.passes.executions import under

H100S, CPUS = Cluster("h100_sxm", 1, 8), Cluster("cpu_laptop", 1, 4)
RECIPE = Execution(runtime=own_runtime(H100S), data=8, global_batch=16, micro_batch=2)
IN_PARTS = replace(RECIPE, micro_batch=1)


def test_kernels_take_what_they_take_alone() -> None:
    """No factor of published runs counts, nor the clock; collectives slow what runs beside them as in plans."""
    model = step_model(RECIPE, H100S)
    assert (model.matmul_slowdown, model.network_slowdown, model.follows_power) == (1.0, 1.0, False)
    assert model.interference == measured_slowdown()
    assert step_model(under(RECIPE, compiled=False), H100S).follows_power


def test_nothing_overlaps_on_the_cpus_of_one_machine() -> None:
    """Communication keeps them as busy as computation does."""
    runtime = own_runtime(CPUS)
    assert not any((runtime.overlap_gradients, runtime.overlap_parameters, runtime.overlap_tensor))
    assert step_model(Execution(runtime=runtime, data=4), CPUS).interference == 0.0


@pytest.mark.parametrize(("mib", "count"), [(0.5, 1), (4, 1), (8, 2), (32, 8), (640, 10)])
def test_collectives_go_in_buckets(mib: float, count: int) -> None:
    """Of an eighth of all bytes; on each of 8 ranks half a MiB at least, and 8 at most."""
    assert bucket_count(mib * 2**20, 8) == count


@pytest.mark.parametrize(("mib", "count"), [(1, 1), (64, 1), (128, 2)])
def test_a_sections_collectives_are_large(mib: float, count: int) -> None:
    """As an eighth of what the whole model exchanges is: up to 8 MiB on each of 8 ranks."""
    assert section_bucket_count(mib * 2**20, 8) == count


def test_parameters_are_cast_once_per_step_and_gradients_each_time() -> None:
    """Nothing is where products read parameters as they lie."""
    assert casts(RECIPE) == 2
    assert casts(IN_PARTS) == 1.5
    assert casts(under(RECIPE, master_weights=False)) == 0


def test_blocks_that_are_computed_again_send_less() -> None:
    """No sum that nothing reads, and no gathering for products, whose weights' gradients read it again anyway."""
    gathers, sums = (AxisTraffic("tensor", kind, 8, has_weight=True) for kind in (MoveKind.GATHER, MoveKind.SCATTER))
    around = AxisTraffic("context", MoveKind.GATHER, 8, has_weight=False)
    assert sent_again((gathers, around, sums, gathers, sums)) == (around, sums)
    assert sent_again((around,)) == (around,)
    assert sent_again(()) == ()


def test_gradients_of_one_micro_batch_lie_where_activations_lay() -> None:
    """Sums of several micro-batches lie beside them."""
    assert state_bytes(1, 8, RECIPE)["gradients"] == 0
    assert gradients_beside(1, 8, RECIPE) == 4
    assert state_bytes(1, 8, IN_PARTS)["gradients"] == 4
    assert gradients_beside(1, 8, IN_PARTS) == 0
    assert state_bytes(1, 8, replace(IN_PARTS, zero=2))["gradients"] == 0.5


def test_parameters_lie_in_float32_beside_what_products_read() -> None:
    """Copies in 16 bits go where ZeRO-3 gathers them, or blocks are computed again; without masters there are none."""
    parameters = [
        state_bytes(1, 8, recipe)["parameters"]
        for recipe in (
            RECIPE,
            replace(RECIPE, recompute="full"),
            replace(RECIPE, zero=3),
            under(RECIPE, master_weights=False),
        )
    ]
    assert parameters == [6, 4, 0.5, 2]
    assert update_bytes(RECIPE) == 28
    assert update_bytes(under(RECIPE, master_weights=False)) == 14


def test_what_is_cast_added_and_copied_is_counted() -> None:
    """Bytes for each element, in a micro-batch and once per step."""
    assert pass_bytes(RECIPE) == 6 + 6
    assert pass_bytes(IN_PARTS) == 3 + 6 + 6
    assert pass_bytes(replace(RECIPE, zero=3)) == 6 + 4 + 2
    assert pass_bytes(replace(RECIPE, zero=3, recompute="full")) == 6 + 4 + 4
    assert [end_copies(8, replace(RECIPE, zero=zero)) for zero in range(4)] == [8, 13.5, 13.5, 0]
    assert end_copies(1, RECIPE) == 0
