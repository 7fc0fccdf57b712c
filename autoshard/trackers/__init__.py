"""Trackers write the numbers of a training run: `autoshard.track(step, TensorBoard("runs/a"))`.

* `writer` is the protocol of a writer; `tensorboard`, `csv_file`, `wandb_run` and `progress_line` are writers;
* `tracker` takes the numbers of each step and hands them to the writers a step later;
* `late_scalars` copies numbers from an accelerator without waiting for it; `step_clock` measures steps.
"""

from autoshard.trackers.csv_file import CSV
from autoshard.trackers.progress_line import Progress
from autoshard.trackers.tensorboard import TensorBoard
from autoshard.trackers.tracker import Tracker, track
from autoshard.trackers.wandb_run import WandB
from autoshard.trackers.writer import RunWriter

__all__ = ["CSV", "Progress", "RunWriter", "TensorBoard", "Tracker", "WandB", "track"]
