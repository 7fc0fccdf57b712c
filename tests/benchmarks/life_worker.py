"""One rank of `tests.benchmarks.life_time`: a step with and without a loader, trackers and the check of numbers.

All variants train a Llama with equal weights under one plan, and clip gradients. The variants without a loader take
batches that a loader has made before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

from tests.benchmarks.races import mesh_along, serve, take_turns

BATCHES, VOCABULARY = 64, 2048
WITHOUT, LOADER, TRACKERS, CHECK, ALL = "without", "loader", "trackers", "check", "all three"
VARIANTS: Mapping[str, frozenset[str]] = {
    WITHOUT: frozenset(),
    LOADER: frozenset([LOADER]),
    TRACKERS: frozenset([TRACKERS]),
    CHECK: frozenset([CHECK]),
    ALL: frozenset([LOADER, TRACKERS, CHECK]),
}
"""The parts of each variant."""


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run `order` on this rank: see `take_turns`."""
    plans: list[Any] = []
    steps = {name: _step(parts, order, plans) for name, parts in VARIANTS.items()}
    return take_turns(steps, [None], order["rounds"], float)


def _step(parts: frozenset[str], order: Mapping[str, Any], plans: list[Any]) -> Callable[[Any], Any]:
    """Return a variant, which takes its next batch at each call. The first variant's plan is that of all."""
    import torch

    import autoshard
    from tests.models import build

    sizes = {"layers": 4, "width": 256, "heads": 8, "inner": 688, "words": VOCABULARY, "length": order["tokens"]}
    model = build("llama", **sizes).train()
    rows = _rows(order["tokens"], order["batch"] * BATCHES)
    step = autoshard.compile(
        *(model, mesh_along("data")),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        max_grad_norm=1.0,
        plan=plans[0] if plans else None,
        options=autoshard.Options(on_nonfinite="raise" if CHECK in parts else None),
        example_inputs=torch.utils.data.default_collate([rows[index] for index in range(order["batch"])]),
    )
    assert isinstance(step, autoshard.TrainStep)
    plans.append(step.plan)
    made = autoshard.data.loader(rows, step, batch_size=order["batch"], drop_last=True, num_workers=order["workers"])
    batches = _forever(made) if LOADER in parts else cycle(list(islice(made, BATCHES)))
    if TRACKERS in parts:
        autoshard.track(step, *_writers(order["folder"], len(plans)))
    return partial(_take, step, batches)


def _take(step: Any, batches: Iterator[Any], _: None) -> Any:
    return step(**next(batches))


def _forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _rows(tokens: int, count: int) -> Any:
    """Return packed rows of documents of many lengths, which fill at least `count` rows."""
    import torch

    import autoshard

    random, documents, found = torch.Generator().manual_seed(0), [], 0
    while found < tokens * count:
        length = int(torch.randint(tokens // 8, tokens + 1, (), generator=random))
        documents.append(torch.randint(VOCABULARY, (length,), generator=random))
        found += length
    return autoshard.data.PackedRows(documents, tokens)


def _writers(folder: str, number: int) -> list[Any]:
    """Return three writers: two files of a run, and a terminal whose text goes to a third file."""
    from pathlib import Path

    from rich.console import Console

    from autoshard.trackers import CSV, Progress, TensorBoard

    run = Path(folder) / str(number)
    run.mkdir(exist_ok=True)
    console = Console(file=(run / "terminal").open("w"), force_terminal=True, width=160)
    return [TensorBoard(run), CSV(run / "steps.csv"), Progress(10_000, console=console)]


if __name__ == "__main__":
    serve(_run)
