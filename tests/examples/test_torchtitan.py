"""The `parallelize_fn` for torchtitan, in a loop that calls it as torchtitan's Trainer does."""

from pathlib import Path

from tests.examples.scripts import run_python


def test_two_ranks_have_the_losses_of_one_device(tmp_path: Path) -> None:
    """On two ranks with different rows, the losses, as sums divided by all targets, equal one device's."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_python(*start, "-m", "tests.examples.torchtitan_loop", folder=tmp_path)
