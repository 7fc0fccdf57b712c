"""`MeshStrategy`, Lightning's Trainer on a mesh. Forward, backward and update of a batch are one call of a `TrainStep`.

To Lightning's loops the whole mesh is one device. Every rank reads the same whole batches, and the compiled step
computes this rank's part. So the losses of a script do not depend on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import Strategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.api import compile as compile_model
from autoshard.call import Options
from autoshard.errors import NotAvailableError
from autoshard.integrations.lightning.refused import check_run, precision_of
from autoshard.integrations.lightning.step_module import StepModule
from autoshard.integrations.short_batches import cut_short_batch, rows_in
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.launch import share_among_processes
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster


class MeshStrategy(Strategy):
    """A strategy of Lightning's Trainer that compiles `training_step`, with the arguments of `autoshard.compile`.

    A batch of the loader is the batch of the whole mesh. `gradient_clip_val` becomes the clipping of the step,
    `precision` its precision. Validation, test and prediction run the module's own code on whole parameters. The page
    docs/how_to/lightning.md has more.

    Args:
        mesh: a torch `DeviceMesh`, a `Mesh`, `cluster.mesh(...)` or a `Cluster`, by the rules of `compile`.
        plan, recipe, memory_budget, micro_batches, backend, time_budget_s, cluster, options: arguments of `compile`.
        constraints: specs by name, as for `compile`; a name is that of the LightningModule ("net.0.weight").
    """

    def __init__(
        self,
        mesh: DeviceMesh | Mesh | ClusterMesh | Cluster,
        *,
        plan: Plan | str | Path | None = None,
        recipe: Recipe | None = None,
        constraints: Mapping[str, PartitionSpec] | None = None,
        memory_budget: int | None = None,
        micro_batches: int | None = None,
        backend: str = "auto",
        time_budget_s: float = 60.0,
        cluster: Cluster | None = None,
        options: Options = Options(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._how_to_compile = {
            "plan": plan,
            "recipe": recipe,
            "constraints": constraints and {_name_in_step(name): spec for name, spec in constraints.items()},
            "memory_budget": memory_budget,
            "micro_batches": micro_batches,
            "backend": backend,
            "time_budget_s": time_budget_s,
            "cluster": cluster,
            "options": options,
        }
        self._traced: StepModule | None = None
        self._sharded: ShardedModule | None = None
        self._step: TrainStep | None = None
        self._unloaded: Mapping[str, Any] | None = None
        self._rows = 0

    @property
    def step(self) -> TrainStep:
        """The compiled step, with its plan and `export`. The first batch of a fit makes it.

        Raises:
            NotAvailableError: no batch was trained on yet.
        """
        if self._step is None:
            raise NotAvailableError("strategy.step: no step is compiled before the first batch of trainer.fit.")
        return self._step

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        is_gpu = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", self.local_rank) if is_gpu else torch.device("cpu")

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.global_rank == 0

    def connect(self, model: LightningModule) -> None:
        """Take a module. The compiled model of another module is forgotten."""
        super().connect(model)
        if self._traced is not None and self._traced.module is not model:
            self._traced = self._sharded = self._step = None

    def setup_environment(self) -> None:
        """Wait for all processes of the run. A process group is made if there is none."""
        super().setup_environment()
        share_among_processes(lambda: None)

    def setup(self, trainer: Trainer) -> None:
        """Make the optimizer. Before training, forget the step of an earlier fit too.

        Raises:
            NotAvailableError: a compiled step cannot train the module as the Trainer asks for (`check_run`).
        """
        super().setup(trainer)
        if trainer.training:
            module = self.lightning_module
            assert module is not None, "the Trainer has connected it"
            check_run(trainer, module)
            precision_of(self.precision_plugin)
            self._traced, self._step = self._traced or StepModule(module), None
            self._unloaded = None  # of an earlier fit that trained no batch; Lightning restores this fit's state later

    def model_to_device(self) -> None:
        """Move the module to this process's device, unless its weights are placed already."""
        module = self.lightning_module
        if module is not None and self._sharded is None and not any(item.is_meta for item in module.parameters()):
            module.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader. If Lightning seeds its workers, they get the same seeds on all ranks."""
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(dataloader, "worker_init_fn", self) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return dataloader

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        """Train on a batch: forward, backward, clipping and update. Return the loss of the whole batch."""
        module, traced = self.lightning_module, self._traced
        assert module is not None, "the Trainer has connected it"
        assert traced is not None, "`setup` has made it"
        if module.trainer.accumulate_grad_batches != 1:  # a callback may set it
            check_run(module.trainer, module)
        if self._step is None:
            self._step = self._compile(module, traced, batch)
        step = self._step
        traced.batch_idx, traced.current_epoch, traced.global_step = batch_idx, module.current_epoch, module.global_step
        loss = step(cut_short_batch(batch, step, self._rows, self.root_device)).detach()
        for call, value in traced.take_logged(loss):
            call.module.log(call.name, value, **call.options)
        return loss

    def _compile(self, module: LightningModule, traced: StepModule, batch: Any) -> TrainStep:
        step = compile_model(
            traced,
            self._mesh,
            optimizer=self.optimizers[0],
            precision=precision_of(self.precision_plugin),
            max_grad_norm=module.trainer.gradient_clip_val or None,
            example_inputs=(batch,) if isinstance(self._mesh, Cluster) else None,
            **self._how_to_compile,
        )
        assert isinstance(step, TrainStep), "an optimizer is given"
        self._sharded = step.sharded
        traced.is_cut, self._rows = step.micro_batches > 1, rows_in(batch) or 0
        step.compile_for(batch)
        if self._unloaded is not None:
            self._load_optimizer(step, self._with_present_options(self._unloaded))
            self._unloaded = None
        return step

    def backward(self, closure_loss: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Do nothing, because the step has run the backward."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **options: Any) -> Any:
        """Run the closure, whose `training_step` updates the weights."""
        return closure()

    def validation_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's own code on whole weights."""
        with self._whole_weights():
            return super().validation_step(*args, **options)

    def test_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's own code on whole weights."""
        with self._whole_weights():
            return super().test_step(*args, **options)

    def predict_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's own code on whole weights."""
        with self._whole_weights():
            return super().predict_step(*args, **options)

    def _whole_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sharded is None else self._sharded.whole_parameters()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module. All ranks must call.

        DTensors become whole tensors on the CPU of the first rank, and None on all other ranks.
        """
        with self._whole_weights():  # raises an error if a rank holds the parameters of its stages only
            return self._whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the optimizer, and the loss scale of the step. All ranks must call.

        DTensors become whole tensors on the CPU of the first rank, and None on all other ranks. State that was given to
        `load_optimizer_state_dict`, and is not loaded yet, is returned itself.
        """
        if self._unloaded is not None:
            return self._with_present_options(self._unloaded)
        scale = {} if self._step is None else self._step.loss_scale_state()
        return self._whole(super().optimizer_state(optimizer)) | scale

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        def whole(tensor: DTensor) -> torch.Tensor | None:
            full = tensor.full_tensor()
            return full.cpu() if self.is_global_zero else None

        return pytree.tree_map_only(DTensor, whole, dict(state))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint into the module, or into its shards."""
        if self._sharded is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            state = {_name_in_step(name): value for name, value in checkpoint["state_dict"].items()}
            self._sharded.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's options of a checkpoint, and its state, if the step is compiled.

        Otherwise the state is kept, and loaded when the step is compiled, at the first batch.
        """
        (saved,) = checkpoint["optimizer_states"]
        if self._step is not None:
            self._load_optimizer(self._step, saved)
            return
        (optimizer,) = self.optimizers
        state = optimizer.state
        optimizer.load_state_dict({**saved, "state": {}})
        optimizer.state = state  # `compile` refuses the state of an optimizer that has taken steps
        self._unloaded = saved

    def _with_present_options(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state with the present options of the optimizer, which callbacks may have changed."""
        return {**saved, "param_groups": self.optimizers[0].state_dict()["param_groups"]}

    def _load_optimizer(self, step: TrainStep, saved: Mapping[str, Any]) -> None:
        step.optimizer.load_state_dict(dict(saved))
        step.load_loss_scale(saved)

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Return `tensor` unchanged, because every rank computes the value of the whole batch."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return `tensor` unchanged, because every rank has the whole tensor."""
        return tensor

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all processes."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of the process `src`."""
        sent = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(sent, src)
        return sent[0]

    def teardown(self) -> None:
        """Tear down the plugins, but leave weights and optimizer on their device."""
        assert self.accelerator is not None, "the Trainer has set it"
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _name_in_step(name: str) -> str:
    """Return the name in a `StepModule` of a value in its LightningModule; names such as "input:0" stay."""
    return name if ":" in name else f"module.{name}"
