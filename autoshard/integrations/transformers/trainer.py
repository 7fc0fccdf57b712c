"""`Trainer`, transformers' Trainer on a mesh. Forward, backward and update of a batch are one call of a `TrainStep`.

To transformers' training loop the whole mesh is one device. Every rank reads the same whole batches, and the compiled
step computes this rank's part. So the losses of a script do not depend on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import TrainOutput

from autoshard.api import compile as compile_model
from autoshard.call import Options
from autoshard.checkpoints import Checkpoints
from autoshard.data.sources import first_samples
from autoshard.errors import CheckpointError, NotAvailableError
from autoshard.integrations.short_batches import cut_short_batch
from autoshard.integrations.transformers.accelerator import MeshAccelerator, UpdatedByStep
from autoshard.integrations.transformers.arguments import as_one_device, check_arguments, precision_of
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster

FOLDER = "autoshard"
"""The folder within transformers' `checkpoint-N` that `Checkpoints` writes."""

_OWN = ("compute_loss", "training_step", "prediction_step", "get_batch_samples")
"""Methods of transformers' loop that a subclass may not override, because the compiled step does their work."""


class Trainer(transformers.Trainer):
    """transformers' `Trainer`, with the arguments of `autoshard.compile` that choose how the model runs on a mesh.

    `per_device_train_batch_size` counts the rows of a batch on the whole mesh, so the losses of a script are those of
    one device. `gradient_accumulation_steps` becomes the `micro_batches` of the step, `max_grad_norm` its clipping,
    `bf16` its precision. The page docs/how_to/transformers_trainer.md has more.

    Args:
        model, args, rest, others: the arguments of `transformers.Trainer`, in its order or by keyword.
        mesh: a torch `DeviceMesh`, a `Mesh`, `cluster.mesh(...)` or a `Cluster`, by the rules of `compile`.
        plan, recipe, constraints, memory_budget, backend, time_budget_s, cluster, options: arguments of `compile`.

    Raises:
        NotAvailableError: an argument cannot work on a mesh; the message names each.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        mesh: DeviceMesh | Mesh | ClusterMesh | Cluster,
        plan: Plan | str | Path | None = None,
        recipe: Recipe | None = None,
        constraints: Mapping[str, PartitionSpec] | None = None,
        memory_budget: int | None = None,
        backend: str = "auto",
        time_budget_s: float = 60.0,
        cluster: Cluster | None = None,
        options: Options = Options(),  # noqa: B008  (frozen)
        **others: Any,
    ) -> None:
        given = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(given)
        for name in _OWN:
            if getattr(type(self), name) is not getattr(Trainer, name):
                raise NotAvailableError(
                    f"{type(self).__name__}.{name} overrides a method that the compiled step replaces. Give the model "
                    "a forward that returns the loss."
                )
        self._given, self._mesh = given, mesh
        self._how_to_compile = {
            "plan": plan,
            "recipe": recipe,
            "constraints": constraints,
            "memory_budget": memory_budget,
            "backend": backend,
            "time_budget_s": time_budget_s,
            "cluster": cluster,
            "options": options,
        }
        self._compiled: tuple[nn.Module, TrainStep] | None = None
        self._unloaded: Path | None = None
        super().__init__(model, as_one_device(given), *rest, **others)
        if self.compute_loss_func is not None:
            raise NotAvailableError(
                f"compute_loss_func={self.compute_loss_func!r}: the loss is the loss that the model returns. Give the "
                "model a forward that returns the loss."
            )

    @property
    def step(self) -> TrainStep:
        """The compiled step of the model, with its plan and `export`. It is made at the first use."""
        if self._compiled is None or self._compiled[0] is not self.model:
            assert self.model is not None, "transformers refuses a Trainer without a model"
            self._compiled = self.model, self._compile(self.model)
        return self._compiled[1]

    def _compile(self, model: nn.Module) -> TrainStep:
        model.train()
        optimizer, parts = self.create_optimizer(), self._given.gradient_accumulation_steps
        step = compile_model(
            model,
            self._mesh,
            optimizer=optimizer.optimizer if isinstance(optimizer, UpdatedByStep) else optimizer,
            precision=precision_of(self._given),
            micro_batches=parts if parts > 1 else None,
            max_grad_norm=self._given.max_grad_norm or None,
            example_inputs=self.example_inputs() if isinstance(self._mesh, Cluster) else None,
            **self._how_to_compile,
        )
        assert isinstance(step, TrainStep), "an optimizer is given"
        return step

    def example_inputs(self) -> dict[str, Any]:
        """Return the first samples as a batch of the step: the `example_inputs` of `autoshard.plan`.

        Raises:
            NotAvailableError: the dataset for training has no rows with indices.
        """
        dataset: Any = self.train_dataset
        if dataset is None or isinstance(dataset, IterableDataset):
            raise NotAvailableError(
                f"train_dataset={type(dataset).__name__} has no rows with indices, so there is no example of a batch. "
                "Pass a Mesh, or cluster.mesh(...), and plan for a batch of your own."
            )
        loader: Any = self.get_train_dataloader()
        with torch.random.fork_rng(devices=[]):
            samples = first_samples(loader.dataset, self._train_batch_size)
            batch = self._prepare_inputs(loader.collate_fn(list(samples)))
        return {**batch, **self._counted(self._get_num_items_in_batch([batch], self.args.device))}

    def _counted(self, items: torch.Tensor | int | None) -> dict[str, Any]:
        """Return `items`, the number of targets in a batch, as keyword arguments of the model.

        The dict is empty if the model takes no such number, or if `items` is None.
        """
        return {"num_items_in_batch": items} if self.model_accepts_loss_kwargs and items is not None else {}

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which leaves the model and the batches as they are."""
        self.accelerator = MeshAccelerator(self.args)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.step.sharded

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Train on a batch: forward, backward, clipping and update. Return the loss of the whole batch."""
        model.train()
        step, optimizer = self.step, self.optimizer
        assert isinstance(optimizer, UpdatedByStep), "the accelerator prepared it"
        optimizer.train()
        cut = cut_short_batch(self._prepare_inputs(inputs), step, self._train_batch_size, self.args.device)
        batch = {**cut, **self._counted(num_items_in_batch)}
        self._load_checkpoint(lambda: step.compile_for(**batch))
        skipped = step.skipped_steps
        loss = step(**batch)
        optimizer.was_skipped = step.skipped_steps > skipped
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing, because the step has clipped the gradients."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor | None:
        """Return the norm of the step's gradients before clipping; None if the step does not compute it."""
        return self.step.last_grad_norm if self.step.has_grad_norm else None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluate the compiled model on a batch; return loss, logits and labels as whole tensors, or None."""
        sharded, batch = self.step.sharded, self._prepare_inputs(inputs)
        counted = self._counted(self._get_num_items_in_batch([batch], self.args.device))
        has_labels = bool(self.label_names) and all(batch.get(name) is not None for name in self.label_names)
        with torch.no_grad():
            self._load_checkpoint(lambda: sharded.compile_for(**batch, **counted))
            if prediction_loss_only and has_labels:
                return sharded.run_for_loss((), {**batch, **counted}), None, None
            found = super().prediction_step(model, batch, prediction_loss_only, ignore_keys=ignore_keys)
            return pytree.tree_map_only(DTensor, DTensor.full_tensor, found)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write a folder for `from_pretrained`: weights, configuration, tokenizer and training arguments."""
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        self.step.export(folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self._given, os.path.join(folder, TRAINING_ARGS_NAME))
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints = Checkpoints(Path(output_dir) / FOLDER, asynchronous=False)
        checkpoints.save(self.step, at=self.state.global_step, schedule=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the state of random generators on the saving process alone, because it is the same on all ranks."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that the folder is a checkpoint of this class; its state is loaded when a program is compiled."""
        if Checkpoints(Path(resume_from_checkpoint) / FOLDER).latest is None:
            raise CheckpointError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} has no complete checkpoint in {FOLDER}/. The "
                "Trainer of autoshard writes it, unless save_only_model=True. To start from the weights alone, load "
                "the model by from_pretrained."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._unloaded = None if checkpoint is None else Path(checkpoint) / FOLDER

    def _inner_training_loop(self, *given: Any, **named: Any) -> TrainOutput:
        result = super()._inner_training_loop(*given, **named)
        self._load_for_no_step()
        return result

    def _load_for_no_step(self) -> None:
        """Load the checkpoint to resume from, if no step was left that would have loaded it."""
        self._load_checkpoint(lambda: self.step.compile_for(**self.example_inputs()))

    def _load_checkpoint(self, place: Callable[[], Any]) -> None:
        """Load the checkpoint to resume from, if it is not loaded yet; `place` shards the parameters before."""
        if self._unloaded is not None:
            place()
            Checkpoints(self._unloaded).load(self.step, schedule=self.lr_scheduler)
            self._unloaded = None

    def _load_best_model(self) -> None:
        self._load_for_no_step()  # a later load would replace the best weights
        self.step.load_weights(str(self.state.best_model_checkpoint))
