"""A rank of a training loop that calls `parallelize_fn` and the model as the Trainer of torchtitan 0.3.0 does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROWS, LENGTH, WORDS = 4, 8, 32


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 16), nn.RMSNorm(16)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        return self.head(h + self.mix(self.norm(h)).relu())


def batch(number: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of all ranks. About a fifth of the targets are ignored."""
    random = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (ROWS * ranks, LENGTH + 1), generator=random)
    return words[:, :-1], words[:, 1:].where(torch.rand(ROWS * ranks, LENGTH, generator=random) < 0.8, -100)


def loss_of(logits: torch.Tensor, targets: torch.Tensor, valid: int) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / valid


def train(model: nn.Module, rows: slice, ranks: int) -> list[float]:
    """Train three steps, and return the losses of these rows. Their sum over ranks is the loss of the batch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(3):
        tokens, targets = batch(number, ranks)
        loss = loss_of(model(tokens[rows]), targets[rows], int((targets != -100).sum()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchtitan"))
    from parallelize import parallelize  # pyright: ignore[reportMissingImports]

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder()
    training = SimpleNamespace(local_batch_size=ROWS, seq_len=LENGTH, mixed_precision_param="float32")
    others = dict.fromkeys(("parallel_dims", "parallelism", "compile_config", "ac_config"))
    model = parallelize(model, training=training, dump_folder="", **others)
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    model.train()
    one_device = Decoder()
    one_device.load_state_dict(
        {name.removeprefix("model."): item.full_tensor() for name, item in model.named_parameters()}
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = torch.tensor(train(model, slice(rank * ROWS, (rank + 1) * ROWS), ranks))
    dist.all_reduce(found)
    torch.testing.assert_close(found, torch.tensor(train(one_device, slice(None), ranks)), rtol=1e-5, atol=1e-5)
    for name, item in one_device.named_parameters():
        torch.testing.assert_close(model.get_parameter(f"model.{name}").full_tensor(), item, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
