"""`autoshard.calibrate` measures this machine with autoshard's own operators, as compiled programs run them."""

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.calibration import collectives_that_run, semantic_samples
from cost_models import calibration
from tests.kernels.observed import Observed
from tests.runtime.processes import report, run_checks


def test_own_operators_are_measured():
    found = autoshard.calibrate(memory_bytes=2**30, budget_s=0.5)
    assert found.cluster.device.memory_bytes == 2**30
    measured = set(found.cluster.device.throughput)
    assert {"attention", "attention_backward", "experts", "experts_backward"} <= measured
    assert {"autoshard.cross_entropy.default", "aten._fused_rms_norm.default"} <= measured


def test_own_operators_are_measured_on_the_kernels_that_run():
    """The sample of attention runs the native kernel, not the definition of the operator."""
    attention = next(sample for sample in semantic_samples() if sample.name == "attention")
    run = attention.prepare()
    with Observed() as seen:
        run()
    assert seen.operators == {"autoshard.native_attention"}


def check_reductions_are_measured_as_programs_run_them() -> None:
    size = dist.get_world_size()
    full, part = torch.ones(4096 * size), torch.ones(4096)
    for name, call in collectives_that_run(full, part, dist.group.WORLD).items():
        with Observed() as seen:
            found = call()
        assert isinstance(found, torch.Tensor)
        is_sum = name in ("all_reduce", "reduce_scatter")
        assert torch.equal(found, torch.full_like(found, size if is_sum else 1)), name
        issued = {operator.split(".")[-1] for operator in seen.operators if "_c10d" in operator}
        by_all_to_all = name == "reduce_scatter" or (name == "all_reduce" and size > 2)
        assert ("all_to_all_single" in issued) == (by_all_to_all or name == "all_to_all"), (name, issued)
        assert "reduce_scatter_tensor" not in issued


def check_a_size_that_ranks_do_not_divide_is_measured() -> None:
    calibration.PRODUCTS, calibration.BETWEEN = (1,), (8, 8, 8)  # of this process alone
    found = calibration._measure_group(dist.group.WORLD, 4096, collectives_that_run, 0.0)
    assert set(found) == {f"{name}.3.4092" for name in calibration.COLLECTIVES}
    assert min(found.values()) > 0


def test_three_ranks_are_measured():
    """Three ranks measure each collective, for a size that three does not divide, cut to equal parts."""
    checks = {"check": check_a_size_that_ranks_do_not_divide_is_measured}
    report(run_checks(checks, ranks=3), "check")


@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions_are_measured_as_programs_run_them(ranks):
    checks = {"check": check_reductions_are_measured_as_programs_run_them}
    report(run_checks(checks, ranks=ranks), "check")
