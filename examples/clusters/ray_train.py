"""The run of `train.py` on a Ray cluster: python ray_train.py. Ray starts the ranks, and starts them again."""

from __future__ import annotations

from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]
from train import DEVICE, train  # pyright: ignore[reportMissingImports]

import autoshard

FOLDER = "/shared/checkpoints"
"""A folder that all nodes see."""


def worker(config: dict[str, str]) -> None:
    """Run on each rank; Ray has made the process group."""
    autoshard.run(train, checkpoints=autoshard.Checkpoints(config["folder"], every=20, keep=2))


if __name__ == "__main__":
    TorchTrainer(
        worker,
        train_loop_config={"folder": FOLDER},
        scaling_config=ScalingConfig(num_workers=16, use_gpu=DEVICE == "cuda"),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
