"""Draw the pictures of the documentation, `docs/pictures/*.svg`, from plans, by `python -m tests.docs.pictures`.

`block.svg` is a block of a Llama as planned over data x model. The picture shows each product with the specs of its
weight and result, and each collective. `schedule.svg` is the order of a pipeline's work over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard import Cluster, Recipe
from cost_models.schedule_orders import Action, ActionKind, rank_orders

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
RANKS, MICRO_BATCHES = 4, 8

_COLOURS = {"F": "#7fb3e6", "B": "#f2b66d", "product": "#7fb3e6", "collective": "#f2b66d", "other": "#b8d8b8"}
_HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="12">'


def schedule() -> str:
    """A picture of 1F1B: a row for each rank, time to the right, and backwards twice as long as forwards."""
    orders = rank_orders("1F1B", RANKS, MICRO_BATCHES)
    spans = _spans([[action for slot in order for action in slot] for order in orders])
    end = max(stop for _, stop in spans.values())
    unit, height = 24, 28
    boxes = []
    for (stage, kind, index), (start, stop) in spans.items():
        x, width = 60 + start * unit, (stop - start) * unit - 2
        boxes.append(_box(x, stage * height + 8, width, height - 4, kind.letter, str(index)))
    rows = [_text(4, rank * height + 24, f"stage {rank}") for rank in range(RANKS)]
    return "\n".join([_HEAD.format(70 + end * unit, RANKS * height + 12), *rows, *boxes, "</svg>"]) + "\n"


def _spans(orders: Sequence[Sequence[Action]]) -> Mapping[Action, tuple[int, int]]:
    """Start and end of each action, which begins when its rank is free and the actions that it needs have ended."""
    spans: dict[Action, tuple[int, int]] = {}
    places, free = [0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and all(need in spans for need in _needs(order[places[rank]])):
                action = order[places[rank]]
                start = max([free[rank], *(spans[need][1] for need in _needs(action))])
                free[rank] = start + (1 if action.kind is ActionKind.FORWARD else 2)
                spans[action] = (start, free[rank])
                places[rank] += 1
    return spans


def _needs(action: Action) -> Iterator[Action]:
    stage, kind, index = action
    if kind is ActionKind.FORWARD and stage > 0:
        yield Action(stage - 1, kind, index)
    if kind is ActionKind.BACKWARD:
        yield Action(stage, ActionKind.FORWARD, index)
        if stage < RANKS - 1:
            yield Action(stage + 1, kind, index)


def block() -> str:
    """Return a picture of the first block of a Llama under tensor parallelism, from top to bottom."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
    sharded = autoshard.compile(
        model,
        autoshard.Mesh({"data": 2, "model": 2}),
        example_inputs={"input_ids": tokens, "labels": tokens},
        precision="bf16",
        recipe=Recipe(data=2, tensor=2, sequence_parallel=True, zero=0),
        cluster=Cluster("h100_sxm", nodes=1, devices_per_node=4),
    )
    assert sharded.program is not None, "example_inputs= had it made"
    rows = list(_rows(sharded.program.phased.forward, sharded.specs))
    boxes = [_box(10, 10 + 30 * number, 460, 24, kind, label) for number, (kind, label) in enumerate(rows)]
    return "\n".join([_HEAD.format(480, 30 * len(rows) + 16), *boxes, "</svg>"]) + "\n"


def _rows(forward: fx.GraphModule, specs: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Return kind and label of each product, attention and collective of block 0."""
    for node in forward.graph.nodes:
        module, target = str(node.meta.get("module", "")), str(node.target)
        if not module.startswith("model.layers.0"):
            continue
        short = module.removeprefix("model.layers.0.")
        if "_c10d_functional" in target and "wait" not in target:
            yield "collective", f"{target.split('.')[1]} over {node.args[-1]!r}"
        elif ".mm." in target:
            yield "product", f"{short}: weight {specs.get(f'{module}.weight')}, result {node.meta['spec']}"
        elif "attention" in target:
            yield "other", f"{short}: attention of each rank's heads"


def _box(x: float, y: float, width: float, height: float, kind: str, label: str) -> str:
    rectangle = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{_COLOURS[kind]}"/>'
    return rectangle + _text(x + 6, y + height / 2 + 4, label)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}">{words.replace("<", "&lt;")}</text>'


PICTURES = {"schedule.svg": schedule, "block.svg": block}


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
