"""tests cost_models/calibration.py."""

from cost_models.calibration import calibrate
from cost_models.hardware import Cluster


def test_calibration_of_one_rank_gives_a_cluster_that_survives_saving(tmp_path):
    """Without a process group one rank is measured; every number is positive and the file reads back equal."""
    found = calibrate(name="here", memory_bytes=2**30, budget_s=0.2)
    unit = found.cluster.device
    assert (found.cluster.size, unit.memory_bytes) == (1, 2**30)
    assert min(*unit.peak_flops.values(), unit.memory_bandwidth_bytes_per_s, unit.launch_latency_s) > 0
    found.save(tmp_path / "here.toml")
    assert Cluster.load(tmp_path / "here.toml") == found.cluster
