"""One rank of `tests.benchmarks.pipeline_time`: our pipeline and torch's take turns. Started by it.

Both train a Llama of transformers with the same weights, by fused AdamW, and hold the same layers in each stage: our
plan says which. Torch's stages are written by hand, as a user of `torch.distributed.pipelining` would at best: rotary
tables and shapes are made once, outputs of the last stage are not collected, gradients are freed between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tests.benchmarks.step_worker import serve

WARM_UP, BATCHES, LOSSES = 3, 4, 3
SEQUENCES, TOKENS, LAYERS, VOCABULARY = 16, 128, 8, 2048
LATENCY_S, BANDWIDTH_BYTES_PER_S = 5e-4, 125e6
OURS, TORCH = "autoshard", "torch.distributed.pipelining"


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run `order` on this rank: see `take_turns`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = _batches()
    ours, stages = _ours(order)
    steps = {OURS: ours, TORCH: _torch(order, stages)}
    found = take_turns(steps, batches, order["rounds"], _of_last_rank)
    if order["profiles"]:
        for name, step in steps.items():
            _profile(Path(order["profiles"]), f"{name} {order['schedule']} {order['micro_batches']}", step, batches[0])
    found["stages"] = {name: len(set(stages.values())) for name in steps}
    return found


def take_turns(
    steps: Mapping[str, Callable[[Any], Any]], batches: Sequence[Any], rounds: int, loss_of: Callable[[Any], float]
) -> dict[str, Any]:
    """Times, processor times and first losses of contenders, whose order changes with each round."""
    found: dict[str, Any] = {name: {"times_s": [], "cpu_s": []} for name in steps}
    for name, step in steps.items():
        found[name]["losses"] = [loss_of(step(batch)) for batch in islice(cycle(batches), LOSSES)]
        for batch in islice(cycle(batches), WARM_UP):
            step(batch)
    for index, batch in enumerate(islice(cycle(batches), rounds)):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            seconds, worked = _times(steps[name], batch)
            found[name]["times_s"].append(seconds)
            found[name]["cpu_s"].append(worked)
    return found


def _times(step: Any, batch: Any) -> tuple[float, list[float]]:
    """Seconds of a step on the slowest rank, and what the processor of each rank worked."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step(batch)
    mine = torch.tensor([time.perf_counter() - start, time.process_time() - worked], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return max(item[0].item() for item in every), [item[1].item() for item in every]


def _of_last_rank(loss: Any) -> float:
    """Torch's pipeline knows its loss there."""
    import torch
    import torch.distributed as dist

    found = torch.zeros(()) if loss is None else loss.detach().clone()
    dist.broadcast(found, dist.get_world_size() - 1)
    return found.item()


def _batches() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=generator) for _ in range(BATCHES)]
    return [{"input_ids": item, "labels": item} for item in words]


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=256, num_attention_heads=8, intermediate_size=688,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def mesh_along(axis: str, *, is_delayed: bool) -> Any:
    """All ranks along one axis, whose links are delayed or not."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autoshard.testing import Link, delayed_mesh

    ranks = dist.get_world_size()
    if is_delayed:
        return delayed_mesh({axis: ranks}, {axis: Link(LATENCY_S, BANDWIDTH_BYTES_PER_S)})
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))


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
    """The modules of a stage, called one after another."""
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


def _profile(folder: Path, name: str, step: Any, batch: Any) -> None:
    """A table of operators of one step on each rank."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batch)
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=50)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name} {dist.get_rank()}".replace(" ", "_")
    (folder / f"{stem}.txt").write_text(table)
    profiler.export_chrome_trace(str(folder / f"{stem}.json"))


if __name__ == "__main__":
    serve(_run)
