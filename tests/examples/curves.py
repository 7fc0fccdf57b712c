"""Loss curves of examples/train_hf.py on two ranks, and of plain PyTorch on one device, in one picture.

Usage: python -m tests.examples.curves [--steps 200]

Both train examples/llama.json, from the same weights, on the pages of this documentation. The picture goes to
docs/pictures/train_hf.svg, and the largest difference of a loss to tests/benchmarks/results/train_hf_curves.md.
"""

from __future__ import annotations

import argparse
import csv
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoModelForCausalLM

from autoshard.data import PackedRows
from autoshard.data.rows import order_of
from tests.examples.scripts import ROOT, run_python

SCRIPT, CONFIG, TEXT = ROOT / "examples" / "train_hf.py", ROOT / "examples" / "llama.json", ROOT / "docs"
PICTURE = ROOT / "docs" / "pictures" / "train_hf.svg"
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "train_hf_curves.md"
WIDTH, HEIGHT, LEFT, TOP = 640, 320, 48, 16
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, slots=True)
class Run:
    """The arguments of a run of examples/train_hf.py: a folder with a model, a folder of text, and numbers."""

    model: Path
    text: Path
    steps: int
    batch: int = 8
    length: int = 128
    warmup: int = 20
    lr: float = 1e-3

    def words(self, out: Path, *more: str) -> list[str]:
        """The command line after `python` or a launcher."""
        numbers = {name: str(getattr(self, name)) for name in ("steps", "batch", "length", "warmup", "lr")}
        options = [word for name, value in numbers.items() for word in (f"--{name}", value)]
        return [str(SCRIPT), str(self.model), str(self.text), "--out", str(out), *options, *more]


def save_model(config: Path, folder: Path) -> None:
    """Write a folder with the config and random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).save_pretrained(folder)


def losses_of(out: Path) -> list[float]:
    """Return the losses that the script wrote, in the order of steps, each step once."""
    with (out / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def losses_of_plain_pytorch(run: Run) -> list[float]:
    """The losses of a loop in plain PyTorch on one device, with the script's batches."""
    script = runpy.run_path(str(SCRIPT), run_name="train_hf")
    documents = script["read_documents"](run.text, None, run.length)
    del documents[:: script["HELD_OUT"]]
    model = AutoModelForCausalLM.from_pretrained(run.model, use_cache=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    schedule = script["make_schedule"](optimizer, run.warmup, run.steps)
    batches, losses = _batches(PackedRows(documents, run.length), run.batch), list[float]()
    for _ in range(run.steps):
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def _batches(rows: PackedRows, size: int) -> Iterator[dict[str, torch.Tensor]]:
    epoch = 0
    while True:
        order = order_of(len(rows), epoch, shuffle=True, seed=0).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield default_collate([rows[index] for index in order[start : start + size]])
        epoch += 1


def largest_difference(mine: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference between paired losses."""
    return max(abs(a - b) / b for a, b in zip(mine, other, strict=True))


def draw(two_ranks: Sequence[float], one_device: Sequence[float]) -> str:
    """A picture of both curves in SVG: steps to the right, and losses upwards."""
    low, high = 0.0, max(*two_ranks, *one_device)
    right, bottom = WIDTH - 12, HEIGHT - 32

    def place(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (right - LEFT) * step / max(1, len(two_ranks) - 1)
        return round(x, 1), round(bottom - (bottom - TOP) * (loss - low) / (high - low), 1)

    def line(losses: Sequence[float], style: str) -> str:
        points = " ".join("{},{}".format(*place(step, loss)) for step, loss in enumerate(losses))
        return f'<polyline fill="none" {style} points="{points}"/>'

    words = [
        f'<text x="{LEFT - 8}" y="{place(0, loss)[1] + 4}" text-anchor="end">{loss:g}</text>'
        for loss in range(int(high) + 1)
    ]
    words += [
        f'<text x="{place(step, 0)[0]}" y="{bottom + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, len(two_ranks), max(1, len(two_ranks) // 4))
    ]
    difference = largest_difference(two_ranks, one_device)
    legend = [
        ("#f2b66d", 'stroke-width="5"', "plain PyTorch on one device"),
        ("#1f5f99", 'stroke-width="1.2"', f"two ranks; the largest relative difference is {difference:.1e}"),
    ]
    for row, (colour, width, text) in enumerate(legend):
        y = TOP + 16 + 20 * row
        words.append(f'<line x1="250" y1="{y}" x2="280" y2="{y}" stroke="{colour}" {width}/>')
        words.append(f'<text x="288" y="{y + 4}">{text}</text>')
    frame = f'<path fill="none" stroke="#888" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    curves = [
        line(losses, f'stroke="{colour}" {width}')
        for losses, (colour, width, _) in zip((one_device, two_ranks), legend, strict=True)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    return "\n".join([f'{head}font-size="12">', frame, *curves, *words, "</svg>"]) + "\n"


def compare(steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """Train the example's own model, and return the losses on two ranks and those of plain PyTorch."""
    save_model(CONFIG, folder / "model")
    run = Run(folder / "model", TEXT, steps)
    run_python(*TWO_RANKS, *run.words(folder / "out"), folder=folder)
    return losses_of(folder / "out"), losses_of_plain_pytorch(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        two_ranks, one_device = compare(options.steps, Path(folder))
    PICTURE.write_text(draw(two_ranks, one_device))
    difference = largest_difference(two_ranks, one_device)
    RESULTS.write_text(
        "# Loss curves of examples/train_hf.py\n\n"
        f"`python -m tests.examples.curves --steps {options.steps}`: examples/llama.json on the pages of docs, on two "
        "Gloo ranks, beside a loop in plain\nPyTorch on one device. "
        f"![The picture](../../../docs/pictures/train_hf.svg) shows all steps.\n\n"
        "| steps | first loss | last loss | largest relative difference of a loss |\n|---|---|---|---|\n"
        f"| {len(two_ranks)} | {two_ranks[0]:.4f} | {two_ranks[-1]:.4f} | {difference:.1e} |\n"
    )
    sys.stdout.write(RESULTS.read_text())


if __name__ == "__main__":
    main()
