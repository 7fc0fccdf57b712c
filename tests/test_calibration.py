"""`autoshard.calibrate`: this machine, with autoshard's own operators."""

import autoshard


def test_own_operators_are_measured():
    found = autoshard.calibrate(memory_bytes=2**30, budget_s=0.5)
    assert found.cluster.device.memory_bytes == 2**30
    measured = set(found.cluster.device.throughput)
    assert {"autoshard.attention.default", "autoshard.attention_backward.default"} <= measured
    assert {"autoshard.cross_entropy.default", "aten._fused_rms_norm.default"} <= measured
