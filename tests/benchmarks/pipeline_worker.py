"""One rank of `tests.benchmarks.pipeline_time`, which races our pipeline with torch's.

Both train a Llama of transformers with equal weights by fused AdamW, with the layers of each stage in our plan. Torch's
stages are the best code of a user of `torch.distributed.pipelining`. Rotary tables and shapes are made once, outputs of
the last stage are not collected, and gradients are freed between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.benchmarks.races import mesh_along, serve, take_turns

BATCHES = 4
SEQUENCES, TOKENS, LAYERS, VOCABULARY = 16, 128, 8, 2048
OURS, TORCH = "autoshard", "torch.distributed.pipelining"


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run `order` on this rank: see `take_turns`."""
    ours, stages = _ours(order)
    return take_turns({OURS: ours, TORCH: _torch(order, stages)}, _batches(), order["rounds"], _of_last_rank)


def _of_last_rank(loss: Any) -> float:
    """Torch's pipeline knows its loss there."""
    import torch
    import torch.distributed as dist

    found = torch.zeros(()) if loss is None else loss.detach().clone()
    dist.broadcast(found, dist.get_world_size() - 1)
    return found.item()


def _batches() -> list[dict[str, Any]]:
    from tests.models import words

    return [words(SEQUENCES, TOKENS, VOCABULARY, seed) for seed in range(BATCHES)]


def _model() -> Any:
    from tests.models import build

    sizes = {"layers": LAYERS, "width": 256, "heads": 8, "inner": 688, "words": VOCABULARY, "length": TOKENS}
    return build("llama", **sizes).train()


def _ours(order: Mapping[str, Any]) -> tuple[Callable[[Any], Any], Mapping[str, int]]:
    """The compiled step, and the stage of each parameter."""
    import torch

    import autoshard

    model = _model()
    step = autoshard.compile(
        *(model, mesh_along("pipeline", is_delayed=order["is_delayed"])),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        micro_batches=order["micro_batches"],
        recipe=autoshard.Recipe(schedule=order["schedule"], virtual_stages=order["virtual_stages"]),
        time_budget_s=5.0,
        example_inputs=_batches()[0],
    )
    program = step.sharded.program
    assert program is not None
    assert program.staged is not None, "the step is cut into stages"
    return lambda batch: step(**batch), program.staged.stage_of_parameters()


def _torch(order: Mapping[str, Any], stages: Mapping[str, int]) -> Callable[[Any], Any]:
    """The same step by torch's stages and schedules."""
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
    from torch.nn import functional

    count, rank, ranks = max(stages.values()) + 1, dist.get_rank(), dist.get_world_size()
    micro_batches, cpu = order["micro_batches"], torch.device("cpu")
    rows, model, group = (
        SEQUENCES // micro_batches,
        _model(),
        mesh_along("pipeline", is_delayed=order["is_delayed"]).get_group(),
    )
    parts = {number: _part(model, stages, number) for number in range(rank, count, ranks)}

    def value(number: int) -> Tensor:
        """Between a stage and the next, or at the ends."""
        if number == 0:
            return torch.empty(rows, TOKENS, dtype=torch.long, device="meta")
        width = VOCABULARY if number == count else model.config.hidden_size
        return torch.empty(rows, TOKENS, width, device="meta", requires_grad=True)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        """The model's own: each position's target is the next token."""
        shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(logits.view(-1, VOCABULARY), shifted.reshape(-1))

    made = [
        PipelineStage(part, number, count, cpu, input_args=value(number), output_args=value(number + 1), group=group)
        for number, part in parts.items()
    ]
    schedule: Any
    if order["virtual_stages"] == 1:
        schedule = Schedule1F1B(made[0], micro_batches, loss_of)
    else:
        schedule = ScheduleInterleaved1F1B([*made], micro_batches, loss_of)
    trained = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def step(batch: Mapping[str, Tensor]) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if 0 in parts else ()
        targets = {"target": batch["labels"], "losses": losses} if count - 1 in parts else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return step


def _part(model: Any, stages: Mapping[str, int], number: int) -> Any:
    """Return the modules of a stage in sequence."""
    import torch
    from torch import Tensor, nn

    inner, held = model.model, {name for name, stage in stages.items() if stage == number}

    def has(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in held)

    layers: Sequence[nn.Module] = [layer for index, layer in enumerate(inner.layers) if has(f"model.layers.{index}.")]
    positions = torch.arange(TOKENS)[None]
    tables = inner.rotary_emb(torch.empty(0), positions)

    class Part(nn.Module):
        """The modules that a user gives a stage by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = inner.embed_tokens if has("model.embed_tokens") else None
            self.layers = nn.ModuleList(layers)
            self.norm = inner.norm if has("model.norm") else None
            self.head = model.lm_head if has("lm_head") else None

        def forward(self, value: Tensor) -> Tensor:
            if self.embedding is not None:
                value = self.embedding(value)
            for layer in self.layers:
                value = layer(value, position_ids=positions, position_embeddings=tables)
            if self.norm is not None:
                value = self.norm(value)
            return value if self.head is None else self.head(value)

    part = Part()
    assert sum(1 for _ in part.parameters()) == len(held), "a stage has the parameters of whole modules"
    return part


if __name__ == "__main__":
    serve(_run)
