"""Fine-tune a causal language model. Each run goes on from the last checkpoint, whatever its number of ranks was.

    torchrun --nproc-per-node N examples/finetune.py FOLDER STEPS

FOLDER is a model in the form of Hugging Face, and STEPS is the number of steps of all runs together.
"""

import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autoshard

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)  # the same on every rank
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = torch.distributed.init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ranks",))
config = AutoConfig.from_pretrained(folder)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)


def batch(number: int) -> dict[str, torch.Tensor]:  # your data: whole batches, the same on every rank
    words = torch.randint(config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(number))
    return {"input_ids": words.to(device), "labels": words.to(device)}


step = autoshard.compile(model, mesh, optimizer=optimizer, example_inputs=batch(0))
step.load_weights(folder)
checkpoints = autoshard.Checkpoints("checkpoints", every=2, keep=2)
for number in range(checkpoints.load(step, schedule=schedule), steps):
    loss = step(**batch(number))
    if torch.distributed.get_rank() == 0:
        print(f"step {number}: loss {loss.item():.6f}", flush=True)
    schedule.step()
    checkpoints.save(step, at=number + 1, schedule=schedule)
checkpoints.wait()
step.export("trained")
torch.distributed.destroy_process_group()
