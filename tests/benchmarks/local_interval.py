"""The interval of step times predicted for searched plans on a calibrated machine, from the errors of plans that ran.

Run: python -m tests.benchmarks.local_interval, after python -m tests.benchmarks.local_plans.

Reads results/local_plans.json and writes the kind `MEASURED` of cost_models/data/runtime/step_time.toml.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from cost_models.intervals import MEASURED, Uncertainty
from tests.benchmarks.uncertainty import conformal, keep_step_time_uncertainty

RESULTS = Path(__file__).parent / "results" / "local_plans.json"


def write_interval(path: Path = RESULTS) -> Uncertainty:
    """Write the uncertainty of the plans of a results file to the data file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    errors = [math.log(row["predicted_s"] / row["measured_s"]) for row in found["rows"]]
    uncertainty = conformal(errors)
    source = (
        f"{len(errors)} plans on Gloo processes after calibrate, {found['machine']}, torch {found['torch']}: "
        "tests/benchmarks/results/local_plans.json"
    )
    keep_step_time_uncertainty(MEASURED, uncertainty, source, found["date"])
    return uncertainty


if __name__ == "__main__":
    sys.stdout.write(f"{write_interval()}\n")
