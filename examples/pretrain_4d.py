"""Pretrain a Mixtral on 8 ranks, along four axes at once, exactly like on one device.

    torchrun --standalone --nproc-per-node 8 examples/pretrain_4d.py     eight processes (Gloo, or NCCL on GPUs)
    python examples/pretrain_4d.py                                       eight simulated ranks in this process

The pipeline has two stages. Each stage has two ranks along "data" by two along "model". Attention is split along
"model". Experts are split along "data", so each rank of this axis has half of the experts. The planner chooses all
other specs. The page of the plan, plan_4d.html, shows stages and schedule.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import MixtralConfig, MixtralForCausalLM

import autoshard
from autoshard import P

VOCABULARY, LENGTH, BATCH, NORM = 256, 64, 32, 1.0

MESH = autoshard.Mesh({"pipeline": 2, "data": 2, "model": 2})
LAYOUT = {
    "*.[qkv]_proj.weight": P("model"),
    "*.o_proj.weight": P(None, "model"),
    "*.experts.*": P("data"),
    "*:*.experts.*": P("data"),  # and the optimizer's state
}
TOLERANCE = 1e-5
"""Largest relative difference between a loss here and the loss of one device that rounding can explain."""


def build() -> MixtralForCausalLM:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(number: int) -> dict[str, torch.Tensor]:
    """Your data: whole batches, the same on every rank. Here each word is the word before it plus 1, 2, 3 or 4."""
    random = torch.Generator().manual_seed(number)
    steps = torch.randint(1, 5, (BATCH, LENGTH), generator=random)
    words = (torch.randint(VOCABULARY, (BATCH, 1), generator=random) + steps.cumsum(1)) % VOCABULARY
    return {"input_ids": words, "labels": words}


def train_on_one_device(steps: int, held_out: dict[str, torch.Tensor]) -> list[float]:
    """Return the loss of each step, then the loss of a held-out batch."""
    model = build()
    optimizer, losses = optimizer_of(model), []
    for number in range(steps):
        loss = model(**batch(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model(**held_out).loss.item()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--page", type=Path, default=Path("plan_4d.html"), help="where the page of the plan goes")
    options = parser.parse_args()

    model = build()
    step = autoshard.compile(
        *(model, MESH),
        optimizer=optimizer_of(model),
        micro_batches=4,
        max_grad_norm=NORM,
        constraints=LAYOUT,
        example_inputs=batch(0),
        time_budget_s=20.0,
    )
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not is_first)
    plan = step.plan
    assert plan is not None, "example_inputs= had it made"
    console.print(str(plan), highlight=False, markup=False, soft_wrap=True)

    losses, held_out = [], batch(options.steps)
    for number in range(options.steps):
        losses.append(step(**batch(number)).item())
        console.print(f"step {number}: loss {losses[-1]:.6f}")
    with torch.no_grad():
        losses.append(step.sharded(**held_out).loss.item())
    console.print(f"held out: loss {losses[-1]:.6f}")

    differs = False
    if is_first:
        plan.report(options.page)
        alone = train_on_one_device(options.steps, held_out)
        worst = max(abs(mine - its) / its for mine, its in zip(losses, alone, strict=True))
        differs = worst > TOLERANCE
        console.print(f"Largest relative difference of a loss to one device: {worst:.1e}")
        console.print(f"The page of the plan is {options.page.resolve()}.", soft_wrap=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.exit("The losses are not those of one device." if differs else 0)


if __name__ == "__main__":
    main()
