"""The table of results for the terminal, and as a page in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from rich.table import Table

from tests.zoo.check import MESH, STEPS, Result

COLUMNS = (
    "architecture",
    "family",
    "nodes",
    "trace s",
    "plan s",
    "lower s",
    "verify s",
    "run s",
    "memory",
    "gap",
    "split",
    "programs",
    "error",
    "rounding",
    "runs whole",
    "run at",
    "result",
)


LEFT_OUT = (
    "timm is left out: it imports torchvision, whose build on PyPI (0.28.0, the one for torch 2.13.0) is linked with",
    "CUDA and does not load beside torch without it (`operator torchvision::nms does not exist`). Of torch_geometric,",
    "what needs a compiled extension is left out: DimeNet (torch_sparse), and SchNet's own search for neighbours",
    "(pyg_lib; SchNet runs on given pairs).",
)

_STAGES = ("trace", "plan", "lower", "verify", "run")


def row(result: Result) -> tuple[str, ...]:
    """The cells of a result's line in the table."""
    replicated = ", ".join(f"{_short(name)} x{count}" for name, count in result.replicated.items())
    compared = result.stage == "done"
    return (
        result.name,
        result.family,
        str(result.nodes or ""),
        *(f"{result.seconds[stage]:.1f}" if stage in result.seconds else "" for stage in _STAGES),
        f"{result.memory:.0%}" if result.memory else "",
        f"{result.gap:.0%}" if result.gap else "",
        f"{result.split}/{result.parameters}" if result.parameters else "",
        str(result.programs or ""),
        f"{result.error:.1e}" if compared else "",
        f"{result.rounding:.1e}" if compared and result.rounding else "",
        replicated,
        f"{result.date} {result.revision}".strip(),
        "passed" if result.passed else f"{result.stage}: {result.reason[:300]}",
    )


def rich_table(results: Sequence[Result]) -> Table:
    """Return the table for the terminal."""
    table = Table(*COLUMNS, title=summary(results))
    for result in results:
        cells = row(result)
        table.add_row(*cells, style=None if result.passed else "red")
    return table


def markdown(results: Sequence[Result], known: Sequence[str]) -> str:
    """The page in Markdown: runs of all `known` architectures, failures, results, and operators without a rule by
    frequency."""
    failing = [result for result in results if not result.passed]
    waiting = [name for name in known if name not in {result.name for result in results}]
    lines = [
        "# The zoo",
        "",
        "Written by `make zoo`: architectures of transformers, diffusers (diffusion) and torch_geometric (graph)",
        "with small random configs, each traced, planned under a memory limit near the smallest there is a plan",
        f"for, and run on the simulator: {STEPS} steps of plain gradient descent in training mode (with dropout and",
        "statistics of the batch), each on a batch of its own, then an evaluation. Compared with one device: the",
        "loss and all gradients of each step, parameters and buffers behind the last, outputs of the evaluation;",
        "the error is relative to the largest element of each tensor. One device draws the same random numbers, by",
        "the definitions of our operators; what draws none, and each evaluation, is plain PyTorch there. Off is",
        "what models draw with NumPy (wav2vec2's masks of spectra) and layers dropped by the toss of a coin, each",
        "choice of which is a program. Programs: how many were compiled, two unless a model reads values. Models",
        "that give no loss get the mean square of their outputs' distance to random targets, and parameters of",
        "theirs that start as zeros are drawn: all gradients behind them would be zero.",
        "Rounding is the same error of one device in float32 against float64: where it is large, the model is",
        "ill-conditioned, and the limit of the error, 1e-5, becomes four times the rounding, at most 1e-3.",
        "Memory is the limit per device, as a share of the peak of a plan without splits; gap, how far the predicted",
        "time of the plan that was found is from the proven bound, as a share of it. Each lowered program was proven",
        "equal to the traced one before it ran.",
        "",
        f"{summary(results)}; the table has {len(known)}.",
        *([f"Not run yet: {', '.join(waiting)}."] if waiting else []),
        f"{_dates(results)}; {MESH}, torch {torch.__version__}.",
        *(_by_library(results)),
        "",
        "## What does not pass",
        "",
        *([f"* **{result.name}** ({result.stage}): {_escape(result.reason)}" for result in failing] or ["Nothing."]),
        "",
        *LEFT_OUT,
        "",
        "## Results",
        "",
        "Split: parameters that the plan splits, of all. Runs whole: operators without a sharding rule, and calls.",
        "",
        _line(COLUMNS),
        _line(["---"] * len(COLUMNS)),
        *(_line([_escape(cell) for cell in row(result)]) for result in results),
        "",
        "## Operators without a rule",
        "",
        *_ranking(results),
    ]
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    """One line: how many architectures pass, by family."""
    families = Counter(result.family for result in results if result.passed)
    parts = ", ".join(f"{count} {family}" for family, count in families.items())
    return f"{sum(result.passed for result in results)} of {len(results)} architectures pass ({parts})"


def _by_library(results: Sequence[Result]) -> list[str]:
    """Count how many architectures of each library pass."""
    known, passed = Counter(), Counter()
    for result in results:
        known[result.library] += 1
        passed[result.library] += result.passed
    return ["", *(f"* {library}: {passed[library]} of {count} pass" for library, count in known.items())]


def _dates(results: Sequence[Result]) -> str:
    """Return the dates and commits of the runs, with their counts."""
    dates = Counter((result.date or "an earlier day", result.revision or "an unknown commit") for result in results)
    return "Run on " + ", ".join(f"{date} at {commit} ({count})" for (date, commit), count in sorted(dates.items()))


def _ranking(results: Sequence[Result]) -> list[str]:
    models = Counter(name for result in results for name in result.replicated)
    calls = Counter()
    for result in results:
        calls.update(result.replicated)
    if not models:
        return ["None."]
    ranked = sorted(models, key=lambda name: (-models[name], -calls[name], name))
    return [f"* `{name}`: {models[name]} architectures, {calls[name]} calls" for name in ranked]


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
