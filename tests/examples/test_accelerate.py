"""A training loop with an Accelerator, in which autoshard compiles the step."""

from pathlib import Path

import pytest

from tests.examples.scripts import run_python


@pytest.mark.slow
def test_a_step_has_the_losses_of_a_prepared_model(tmp_path: Path) -> None:
    """On two ranks, a compiled step has the losses of `accelerator.prepare` with the same batches and clipping."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run_python(*start, "-m", "tests.examples.accelerate_run", folder=tmp_path)
    assert "4 equal losses" in text
