"""What every test shares: Hypothesis profiles, one thread per process, and the skipping of GPU tests."""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

_slow_draws = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=_slow_draws)
settings.register_profile(
    "ci",
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_slow_draws,
)
settings.register_profile(
    "nightly",
    max_examples=10_000,
    deadline=None,
    phases=list(Phase),
    suppress_health_check=_slow_draws,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)
torch.manual_seed(0)  # what is drawn while tests are collected must be the same in every worker

if not torch.cuda.is_available():
    # Read where a Triton kernel is decorated, so before any test imports autoshard's kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
