"""accelerate's objects for a mesh that counts as one device: nothing is wrapped, cut or gathered."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from autoshard.errors import NotAvailableError

_STRATEGIES = tuple(f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"))
"""Variables by which `accelerate launch` chooses a strategy."""


class MeshAccelerator(Accelerator):
    """An Accelerator with one process, so every rank reads the whole of each batch.

    Raises:
        NotAvailableError: `accelerate launch` has chosen FSDP, DeepSpeed or another strategy.
    """

    def __init__(self, args: TrainingArguments) -> None:
        for name in _STRATEGIES:
            if os.environ.get(name, "false").lower() in ("true", "1"):
                raise NotAvailableError(
                    f"Trainer(mesh=...) found {name}={os.environ[name]} of `accelerate launch`. Start the script by "
                    "`torchrun`, because the planner decides how the model is split."
                )
        given: Any = args.accelerator_config
        seed: Any = args.data_seed
        super().__init__(
            dataloader_config=DataLoaderConfiguration(
                dispatch_batches=False,
                use_seedable_sampler=given.use_seedable_sampler,
                non_blocking=given.non_blocking,
                data_seed=seed,
            )
        )
        self.scaler = None  # the step scales the loss

    @property
    def distributed_type(self) -> DistributedType:
        """No strategy of accelerate."""
        return DistributedType.NO

    @property
    def use_distributed(self) -> bool:
        """False, because the whole mesh counts as one process."""
        return False

    @property
    def num_processes(self) -> int:
        """1, because the whole mesh counts as one process."""
        return 1

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **options: Any) -> Any:
        """Return the prepared loader. Its workers get the same seeds on all ranks."""
        start = data_loader.worker_init_fn
        if isinstance(start, partial) and "rank" in start.keywords:
            data_loader.worker_init_fn = partial(start, rank=0)
        return super().prepare_data_loader(data_loader, *args, **options)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Return the optimizer as an `UpdatedByStep`, whose `step` does nothing."""
        prepared = optimizer if isinstance(optimizer, UpdatedByStep) else UpdatedByStep(optimizer)
        self._optimizers.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Return `tensor` unchanged, because every rank has the whole tensor."""
        return tensor

    def pad_across_processes(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Return `tensor` unchanged, because it has the same shape on all ranks."""
        return tensor


class UpdatedByStep(AcceleratedOptimizer):
    """An optimizer whose update the compiled step has done, so `step` does nothing.

    Attributes:
        was_skipped: whether the compiled step skipped its last update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self.was_skipped = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the compiled step skipped its last update. The schedule of the learning rate then must not step."""
        return self.was_skipped

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing."""
