"""A training loop with an Accelerator, whose model is a step of autoshard."""

from pathlib import Path

import pytest

from tests.examples.scripts import run_python


@pytest.mark.slow
def test_a_step_has_the_losses_of_a_prepared_model(tmp_path: Path) -> None:
    """On two ranks, with the batches and the clipping of `accelerator.prepare`."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run_python(*start, "-m", "tests.examples.accelerate_run", folder=tmp_path)
    assert "4 equal losses" in text
