"""Train a language model of transformers on a folder of text, on any number of ranks.

    python examples/train_hf.py examples/llama.json docs                                      one device
    torchrun --standalone --nproc-per-node 2 examples/train_hf.py examples/llama.json docs    two ranks

The losses are the same. Documents share rows (packing). Every twentieth document is held out for the evaluation. The
run goes on from its last checkpoint, whenever and on whatever number of ranks it is started again. A folder for
`from_pretrained` is its result.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import autoshard
from autoshard.data import Loader, PackedRows, loader
from autoshard.trackers import CSV, Progress, TensorBoard, WandB

HELD_OUT = 20


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a config file, or a folder with a config, weights and a tokenizer")
    parser.add_argument("text", type=Path, help="a folder of *.txt and *.md files")
    parser.add_argument("--out", type=Path, default=Path("runs/train_hf"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, on all ranks together")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is reached")
    parser.add_argument("--norm", type=float, default=1.0, help="gradients are scaled down to this norm")
    parser.add_argument("--precision", choices=["bf16", "f16"], help="default: float32")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--trackers", nargs="*", choices=["csv", "tensorboard", "wandb"], default=["csv"])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_documents(folder: Path, tokenizer: Any, length: int) -> list[torch.Tensor]:
    """Return the tokens of all files, in pieces of `length` tokens. Without a tokenizer, bytes are tokens."""
    pieces = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md")):
        text = path.read_text(encoding="utf-8")
        tokens = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
        pieces += torch.tensor(tokens, dtype=torch.int64).split(length)
    documents = [piece for piece in pieces if len(piece) > 1]
    if len(documents) < HELD_OUT:
        sys.exit(f"{folder} has text for {len(documents)} documents of {length} tokens; {HELD_OUT} are needed.")
    return documents


def make_model(options: argparse.Namespace, words: int) -> Any:
    """Return the model on the meta device, so that each rank makes or reads only its part of the weights."""
    config = AutoConfig.from_pretrained(options.model, use_cache=False)
    sizes = {"vocab_size": words, "max_position_embeddings": options.length}
    for name, needed in sizes.items():
        if (found := getattr(config.get_text_config(), name, needed)) < needed:
            sys.exit(f"{options.model} has {name}={found}, but the text and --length need {needed}.")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).float().train()


def make_schedule(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> LRScheduler:
    rising = LinearLR(optimizer, start_factor=1 / max(1, warmup), total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])


def forever(batches: Loader) -> Iterator[dict[str, torch.Tensor]]:
    while True:  # an iteration is an epoch
        yield from batches


@torch.no_grad()
def evaluate(step: autoshard.TrainStep, batches: Loader) -> float:
    """Return the mean loss of the held-out batches."""
    step.sharded.eval()
    losses = [step.sharded(**batch).item() for batch in batches]
    step.sharded.train()
    return sum(losses) / len(losses)


def train(run: autoshard.Run, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)  # of dropout, the same on every rank
    has_tokenizer = any(options.model.glob("tokenizer*"))
    tokenizer = AutoTokenizer.from_pretrained(options.model) if has_tokenizer else None
    documents = read_documents(options.text, tokenizer, options.length)
    model = make_model(options, words=max(int(tokens.max()) for tokens in documents) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = make_schedule(optimizer, options.warmup, options.steps)
    step = autoshard.compile(
        model,
        autoshard.Mesh({"ranks": run.ranks}),  # or {"data": 2, "model": 2}
        optimizer=optimizer,
        max_grad_norm=options.norm,
        precision=options.precision,
        options=autoshard.Options(outputs="loss", on_nonfinite="raise"),
    )
    held_out = PackedRows(documents[::HELD_OUT], options.length)
    del documents[::HELD_OUT]
    rows = PackedRows(documents, options.length)
    batches = loader(rows, step, batch_size=options.batch, seed=options.seed, drop_last=True)  # plans the step
    held_out_batches = loader(held_out, step, batch_size=options.batch, shuffle=False, drop_last=True)
    if any(options.model.glob("*.safetensors")):
        step.load_weights(options.model, cast=True)
    else:
        step.init_weights(options.seed)

    writers = {"csv": CSV(options.out / "steps.csv"), "tensorboard": TensorBoard(options.out), "wandb": WandB()}
    chosen = [writers[name] for name in options.trackers]
    taken = forever(batches)
    with autoshard.track(step, Progress(options.steps), *chosen) as tracker:
        for number in run.steps(step, options.steps, schedule=schedule, data=batches):
            step(**next(taken))
            schedule.step()
            if (number + 1) % options.eval_every == 0 or number + 1 == options.steps:
                loss = evaluate(step, held_out_batches)
                tracker.add(held_out_loss=loss, perplexity=math.exp(loss))
                if run.rank == 0:
                    print(f"step {number + 1}: held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}", flush=True)
    step.export(options.out / "model")
    if tokenizer is not None and run.rank == 0:
        tokenizer.save_pretrained(options.out / "model")


if __name__ == "__main__":
    options = read_options()
    checkpoints = autoshard.Checkpoints(options.out / "checkpoints", every=options.save_every, keep=2)
    autoshard.run(lambda run: train(run, options), checkpoints=checkpoints)
