"""A script with DistributedDataParallel, and the same script with autoshard."""

import difflib
import re
from pathlib import Path

import pytest

from tests.examples.scripts import ROOT, run_python

FOLDER = ROOT / "examples" / "ddp"
PAGE = ROOT / "docs" / "tutorials" / "from_ddp_fsdp_accelerate.md"


def test_both_scripts_have_the_same_losses(tmp_path: Path) -> None:
    """Over two epochs on two ranks, the script with DDP and the script with autoshard print equal losses."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    before, after = (
        [float(loss) for loss in re.findall(r"loss (\S+)", run_python(*start, str(FOLDER / name), folder=tmp_path))]
        for name in ("before.py", "after.py")
    )
    assert len(before) == 32
    assert after == pytest.approx(before, rel=1e-5)


def test_the_page_has_the_difference() -> None:
    """The page has the difference of the two scripts, as `diff -U 2` prints it."""
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("before.py", "after.py"))
    lines = [*difflib.unified_diff(before, after, lineterm="", n=2)][2:]
    assert "\n".join(lines) in PAGE.read_text()
