"""Train a byte-level GPT on the source of Python's library, on four ranks exactly like on one device.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py     four processes (Gloo, or NCCL on GPUs)
    python examples/train_gpt.py                                       four simulated ranks in this process

The model is plain PyTorch. One line, `autoshard.compile(model, mesh, optimizer=optimizer)`, makes the whole training
step run on a mesh: forward, backward and update.
"""

import argparse
import copy
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard

VOCABULARY = 256

MEMORY_SHARE = 0.75
"""If the fastest plan copies all parameters, the demo plans again within this share of that plan's memory.

The new plan must then shard the parameters.
"""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)  # [B, H, T, D]
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(initialise)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to learn from; batch number `step` is the same in every process."""

    data: torch.Tensor
    batch: int
    length: int

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - self.length - 1, (self.batch,), generator=random)
        rows = torch.stack([self.data[start : start + self.length + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_standard_library(max_bytes: int = 8_000_000) -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:max_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_mesh() -> DeviceMesh | autoshard.Mesh:
    """Return a mesh with two ranks along `model`, the rest along `data`; of simulated ranks if there is one process."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return autoshard.Mesh({"data": 2, "model": 2})
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    model_ranks = 2 if ranks % 2 == 0 else 1
    return init_device_mesh(device, (ranks // model_ranks, model_ranks), mesh_dim_names=("data", "model"))


def make_plan(
    model: nn.Module,
    mesh: DeviceMesh | autoshard.Mesh,
    example: tuple[torch.Tensor, ...],
    measure_s: float,
    console: Console,
) -> autoshard.Plan | None:
    """Return the plan of the first rank, priced for this machine as measured now.

    None for simulated ranks: `compile` then plans by itself.
    """
    if not isinstance(mesh, DeviceMesh):
        return None
    console.print("Measuring this machine: products, memory, and collectives of all ranks at once ...")
    cluster = autoshard.calibrate(budget_s=measure_s).cluster
    plans: list[autoshard.Plan | None] = [None]
    if dist.get_rank() == 0:

        def plan_within(memory_budget: int | None) -> autoshard.Plan:
            return autoshard.plan(
                model,
                cluster.mesh(mesh),
                example_inputs=example,
                optimizer=make_optimizer(model),
                precision=None,
                memory_budget=memory_budget,
            )

        plan = plan_within(None)
        if all(layout.startswith("copied") for layout in plan.layouts):
            peak, limit = plan.predicted.peak_memory_bytes, int(MEMORY_SHARE * plan.predicted.peak_memory_bytes)
            console.print(
                f"The fastest plan copies all parameters, and takes {peak / 2**20:.0f} MiB a rank. "
                f"Planning for devices of {limit / 2**20:.0f} MiB, which must shard ..."
            )
            plan = plan_within(limit)
        plans = [plan]
    dist.broadcast_object_list(plans)
    return plans[0]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""One training step: update the parameters from tokens and targets, and return the loss."""


def one_device_step(model: nn.Module) -> Step:
    """Return the same step as a plain loop on one device."""
    optimizer = make_optimizer(model)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@dataclass(frozen=True, slots=True)
class Curve:
    """The loss and the seconds of each step."""

    losses: list[float]
    times_s: list[float]


def typical(times_s: list[float]) -> float:
    """Return the median of the times without the first time, which is a warm-up."""
    return statistics.median(times_s[1:] or times_s)


def train(
    step: Step, text: Text, steps: int, device: torch.device, after_step: Callable[[float, float], None]
) -> Curve:
    """Run `steps` steps, and call `after_step` with the loss and the seconds of each step."""
    curve = Curve([], [])
    for number in range(steps):
        tokens, targets = (part.to(device) for part in text.at(number))
        start = time.perf_counter()
        curve.losses.append(step(tokens, targets).item())
        curve.times_s.append(time.perf_counter() - start)
        after_step(curve.losses[-1], curve.times_s[-1])
    return curve


def train_with_bar(title: str, step: Step, text: Text, steps: int, device: torch.device, console: Console) -> Curve:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(title, total=steps, status="")

        def show(loss: float, step_time_s: float) -> None:
            status = f"loss {loss:.4f}  {text.batch * text.length / step_time_s:,.0f} tokens/s"
            progress.update(task, advance=1, status=status)

        return train(step, text, steps, device, show)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--measure-s", type=float, default=20.0, help="seconds in which the machine is measured")
    parser.add_argument("--plan", type=Path, default=Path("plan.json"), help="where the plan is written")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    mesh = make_mesh()
    on_cuda = isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not is_first)

    torch.manual_seed(0)
    model = GPT(options.layers, options.width, options.heads, options.length).to(device)
    reference = copy.deepcopy(model)
    text = Text(read_standard_library(), options.batch, options.length)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"A GPT of {parameters:,} parameters on {len(text.data):,} bytes of Python's standard library.")

    example = tuple(part.to(device) for part in text.at(0))
    plan = make_plan(model, mesh, example, options.measure_s, console)
    sharded = autoshard.compile(model, mesh, optimizer=make_optimizer(model), example_inputs=example, plan=plan)
    plan = sharded.plan
    console.print(str(plan), highlight=False, markup=False, soft_wrap=True)
    curve = train_with_bar("sharded   ", sharded, text, options.steps, device, console)
    if is_first:
        plan.save(options.plan)
        alone = train_with_bar("one device", one_device_step(reference), text, options.steps, device, console)
        report(curve, alone, plan, console)
        console.print(f"The plan is in {options.plan.resolve()}.", soft_wrap=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def report(sharded: Curve, alone: Curve, plan: autoshard.Plan, console: Console) -> None:
    differences = [abs(a - b) for a, b in zip(sharded.losses, alone.losses, strict=True)]
    predicted_s, measured_s = plan.predicted.step_time_s, typical(sharded.times_s)
    console.print(f"Loss {sharded.losses[0]:.4f} -> {sharded.losses[-1]:.4f} in {len(sharded.losses)} steps.")
    console.print(f"A step: predicted {predicted_s * 1e3:.1f} ms, measured {measured_s * 1e3:.1f} ms (median).")
    console.print(f"Largest difference of the loss curve to one device: {max(differences):.2e}")


if __name__ == "__main__":
    main()
