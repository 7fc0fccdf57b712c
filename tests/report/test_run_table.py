"""The table of a whole run."""

from __future__ import annotations

from autoshard.ir.run_estimate import RunEstimate

RUN = RunEstimate(
    hardware="h100_sxm:8x8", devices=64, steps=1000, tokens=15e12, step_time_s=7.5, mtbf_hours=50.0, days=100.0,
    device_hours=153_600.0, checkpoint_bytes=2**40, save_s=140.0, restart_s=600.0, checkpoint_every=120, failures=48.2,
    lost_to_checkpoints=0.031, lost_to_failures=0.042,
)  # fmt: skip


def test_every_figure_is_in_the_table() -> None:
    """The table has every figure of a run with its unit."""
    text = " ".join(str(RUN).split())
    for told in (
        "A run on 64 devices, priced for h100_sxm:8x8.", "tokens │ 1.5e+13", "steps │ 1,000 of 7.5 s",
        "time │ 100.0 days; the steps alone take 2.1 h", "device-hours │ 153,600", "checkpoint │ 1.00 TiB in 2.3 min",
        "distance of checkpoints │ 120 steps, 15.0 min", "lost to checkpoints │ 3.10%", "failures │ 48, one every 50 h",
        "lost to failures │ 4.20%",
    ):  # fmt: skip
        assert told in text
