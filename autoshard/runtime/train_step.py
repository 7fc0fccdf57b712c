"""`TrainStep`: a whole training step with forward, backward, clipping and update.

The update of SGD, Adam, AdamW and Muon is traced. The step is then one program, whose plan also has the specs of
gradients and optimizer state. Any other optimizer takes its own step, on the module's parameters and their gradients.
If its update is not elementwise, the plan keeps its parameters whole (`autoshard.runtime.whole_parameters`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import NotAvailableError
from autoshard.ir.files import check_can_write
from autoshard.ir.loss_weights import LossWeights
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.pipeline_order import one_after_another
from autoshard.ir.plan import Plan
from autoshard.ir.profile import PredictSteps, Profile
from autoshard.ir.update import checked_norm
from autoshard.runtime.executable import Executable
from autoshard.runtime.executor import Executor
from autoshard.runtime.graphed_passes import GraphedPasses
from autoshard.runtime.loss_scale import LossScale
from autoshard.runtime.members import Members
from autoshard.runtime.micro_batches import (
    LossWeigher,
    MicroBatches,
    Part,
    Weigh,
    naming_micro_batches,
    parts_of,
    share_of,
    sum_of,
    weighs_nothing,
)
from autoshard.runtime.of_model import refuse_capture
from autoshard.runtime.optimizer_state import HyperparameterText, lay_out_loaded_state
from autoshard.runtime.profiling.profile_run import ProfileRun
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall
from autoshard.runtime.step_check import StepCheck
from autoshard.runtime.step_loss import StepLoss
from autoshard.runtime.traced_optimizer import why_by_autograd
from autoshard.runtime.traced_step import TracedStep
from autoshard.runtime.weights.has_weights import HasWeights
from autoshard.runtime.weights.model_weights import Weights
from autoshard.runtime.whole_parameters import plain_parameters

_LOGGER = logging.getLogger(__name__)
_NOT_SHARDED = ("Sharding propagation failed", "does not have a sharding strategy registered")
"""Parts of torch's errors about an operator that it cannot run on DTensors."""


class StepObserver(Protocol):
    """Is told when a step begins and ends. A step that raises an error has no end."""

    def begin(self) -> None:
        """Called before a step."""
        ...

    def end(self, loss: torch.Tensor) -> None:
        """Called with the global loss after a step. An accelerator may still compute the loss."""
        ...


class TrainStep(HasWeights):
    """A training step: each call runs forward, backward, clipping and update on one global batch.

    `autoshard.compile(model, mesh, optimizer=optimizer)` makes it; the constructor is internal. A call takes the
    model's arguments, followed by the targets of `loss_fn`: `loss = step(*batch)`. It returns the loss of the whole
    batch on every rank, a scalar without gradient. Under `torchrun`, all ranks must call it together, with the same
    batch. `step.sharded` is the compiled model, and `step.optimizer` the optimizer.

    Raises:
        TraceError: on a call, if `micro_batches` does not divide dim 0 of the inputs, or the model cannot be traced.
        NotAvailableError: on a call with micro-batches, if an operator mixes samples (batch norm in training), or the
            loss is not a weighted sum over micro-batches.
        NonFiniteError: on a call with `Options(on_nonfinite="raise")`.
        RankMismatchError, LostRankError: on a call, if ranks differ, or another rank stopped.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        micro_batches: int = 1,
        traced: bool = False,
        executor: Executor | None = None,
        graphs: GraphedPasses | None = None,
        weigh: Weigh = weighs_nothing,
        plans_any_batch: bool = True,
        returns_norm: bool = False,
        on_nonfinite: str | None = None,
        loss_scale: LossScale | None = None,
        predict: PredictSteps | None = None,
    ) -> None:
        """Make a step; `compile` calls this.

        Args:
            sharded: the model; it returns a loss, or a structure whose first scalar is the loss.
            optimizer: an optimizer over the parameters of `sharded`.
            max_grad_norm, micro_batches, on_nonfinite: the arguments of `autoshard.compile`.
            traced: whether the update is part of the program, which optimizer and compiler must support.
            executor: runs the tasks of a step; the module's own executor, if the mesh has a pipeline.
            graphs: launches forward and backward as CUDA graphs; only if traced and without stages.
            weigh: see `LossWeigher`.
            plans_any_batch: whether no plan, recipe or constraint of inputs and outputs fixes the batch size.
            returns_norm: whether to compute `last_grad_norm` even without `max_grad_norm`.
            loss_scale, predict: the scale of float16 gradients, and the function that predicts a program's step.
        """
        self.sharded = sharded
        self.optimizer = optimizer
        max_grad_norm = checked_norm(max_grad_norm)
        self._max_grad_norm = max_grad_norm
        self.order = one_after_another(micro_batches)
        self._has_said_why = False
        self._observers: tuple[StepObserver, ...] = ()
        self._predict, self._has_graphs = predict, graphs is not None
        self._last_profile: Profile | None = None
        self._returns_norm = returns_norm
        self._loss_scale = loss_scale
        self._weigher = LossWeigher(sharded, weigh)
        self.plans_any_batch = plans_any_batch
        self._check = StepCheck(sharded.engine.control, on_nonfinite, loss_scale)
        self._hyperparameters = HyperparameterText(optimizer, max_grad_norm, on_nonfinite, loss_scale)
        sharded.agreement.describe_hyperparameters = self._hyperparameters
        executor = executor or Executor()
        executor.prove(self.order)
        self._has_stages = executor.has_stages
        self._traced: TracedStep | None = None
        if traced:
            self._traced = TracedStep(
                *(sharded, optimizer, max_grad_norm, self.order, executor, self._weigher, self._check, graphs),
                returns_norm=returns_norm,
                loss_scale=loss_scale,
            )
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set `max_grad_norm` or a private attribute; raise `NotAvailableError` for any other attribute."""
        if name != "max_grad_norm" and not name.startswith("_") and "_is_made" in vars(self):
            raise NotAvailableError(
                f"step.{name} = {value!r}: only max_grad_norm of a compiled step can be set. Set options of the "
                "optimizer in step.optimizer.param_groups, and attributes of the model on step.sharded. For another "
                "optimizer or other micro_batches, compile a second time."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `AttributeError`, which says if the model has the attribute. Python calls this for missing ones."""
        there = f" The model has: step.sharded.{name}." if hasattr(ShardedModule, name) else ""
        raise AttributeError(f"A compiled step has no attribute {name!r}.{there}")

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped; None: no clipping.

        It can be set between steps, to the same value on all ranks. If `is_traced`, the next step compiles a program
        for a new value.
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        value = checked_norm(value)
        self._max_grad_norm = self._hyperparameters.max_grad_norm = value
        if self._traced is not None:
            self._traced.clip_to(value)

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The norm over all gradients of the last step, before clipping and without the loss scale.

        It is a scalar on the device of the parameters, and equals the result of `torch.nn.utils.clip_grad_norm_` on one
        device. A skipped step has its norm too, which may be infinite or NaN. It is None before the first step, and if
        no sample of the batch counts in the loss. Reading its value (`.item()`) waits for the device.

        Raises:
            NotAvailableError: the step does not compute the norm. Compile with `max_grad_norm=` or
                `Options(grad_norm=True)`.
        """
        if not self.has_grad_norm:
            raise NotAvailableError(
                "step.last_grad_norm: the step does not compute the norm of its gradients. Compile with "
                "max_grad_norm=, or with options=autoshard.Options(grad_norm=True)."
            )
        return self._check.norm

    @property
    def has_grad_norm(self) -> bool:
        """Whether the step computes `last_grad_norm`."""
        return self._returns_norm or self._loss_scale is not None or self._max_grad_norm is not None

    @property
    def on_nonfinite(self) -> str | None:
        """The value of `Options(on_nonfinite=)`: "raise", "skip", or None for no check of loss and gradient norm."""
        return self._check.on_nonfinite

    @property
    def skipped_steps(self) -> int:
        """The number of steps without an update, because loss or gradients were not finite.

        Steps are skipped with `on_nonfinite="skip"`, and with `precision="f16"` if gradients overflow.
        """
        return self._check.skipped_steps

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step, as in `torch.amp.GradScaler`; None if the loss is not scaled."""
        return None if self._loss_scale is None else self._loss_scale.value

    @property
    def steps_done(self) -> int:
        """The number of steps that ended without an error, with skipped steps and those before a loaded checkpoint."""
        return self._check.steps_done

    def count_from(self, steps_done: int) -> None:
        """Set the number of steps done, from which later steps are counted."""
        self._check.steps_done = steps_done

    @property
    def is_traced(self) -> bool:
        """Whether the update is part of the program, so that the plan has the specs of optimizer state."""
        return self._traced is not None

    @property
    def micro_batches(self) -> int:
        """The number of equal parts, along dim 0, into which the batch of a step is split."""
        return self.order.micro_batches

    def loss_weights(self, *args: Any, **kwargs: Any) -> LossWeights | None:
        """`autoshard.data.loader` calls this: return how the loss of a batch follows from losses of micro-batches.

        The arguments are those of one micro-batch, whose program must be compiled. None if the model returns no loss.
        """
        assert self.sharded.program is not None, "it is compiled"
        return self._weigher.of(self.sharded.program, FlatCall.of(args, kwargs, Outputs.LOSS))

    @property
    def mesh(self) -> Mesh:
        """The mesh of `compile`; if it has an axis "pipeline", the mesh of one stage, without this axis."""
        return self.sharded.mesh

    @property
    def plan(self) -> Plan | None:
        """The plan of the program that ran or was compiled last; None before the first program."""
        return self.sharded.plan

    @torch.compiler.disable(reason="autoshard has compiled the step: leave fullgraph=True out")
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take one step on a global batch; return the global loss, a scalar without gradient.

        The step trains under `torch.no_grad` and `torch.inference_mode` too.
        """
        self._check.begin()
        for observer in self._observers:
            observer.begin()
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            self.sharded.agreement.one_thread,
            naming_micro_batches(self.micro_batches),
        ):
            loss = self._step(args, kwargs)
        self._check.end()
        for observer in reversed(self._observers):
            observer.end(loss)
        return StepLoss.of(loss)

    def add_observer(self, observer: StepObserver) -> None:
        """Call `observer.begin()` before each later step, and `observer.end(loss)` after it, on this rank."""
        self._observers = (*self._observers, observer)

    def remove_observer(self, observer: StepObserver) -> None:
        """Call the methods of `observer` no more; do nothing if it was not added."""
        self._observers = tuple(item for item in self._observers if item is not observer)

    @property
    def last_profile(self) -> Profile | None:
        """The last profile that `profile` measured; None before."""
        return self._last_profile

    def profile(self, *, steps: int = 3, path: str | Path | None = None) -> ProfileRun:
        """Measure the next steps on all ranks, and compare them with the predicted step. All ranks must call this.

        No steps are added: go on to call `step`. The next call warms up, and the `steps` calls after it are measured. A
        call that compiles a program is not measured. While steps are measured, no other `torch.profiler` may run.

        Args:
            steps: number of steps to measure, at least 1.
            path: file for the timelines of all ranks, for ui.perfetto.dev; None: no file.

        Returns:
            An object that prints as a table after the last step, with the `Profile` in `result`. It is also a context
            manager. Leaving it ends the measurement early, with the steps measured so far. All ranks must leave it
            together.

        Raises:
            NotAvailableError: `steps` is not a whole number above 0, or the step runs as a CUDA graph. Also if the
                folder of `path` does not exist.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise NotAvailableError(f"step.profile(steps={steps!r}): pass a whole number of steps, at least 1.")
        if self._has_graphs:
            raise NotAvailableError(
                "step.profile: with Options(cuda_graph=True), a step is one launch, and its operators have no names. "
                "Profile a step without cuda_graph."
            )
        if path is not None:
            self.sharded.engine.share(lambda: check_can_write(path))
        assert self._predict is not None, "`compile` made the step"
        run = ProfileRun(self.sharded, steps, path, self._predict, lambda found: self._end_profile(run, found))
        self.add_observer(run)
        return run

    def _end_profile(self, run: ProfileRun, found: Profile | None) -> None:
        self.remove_observer(run)
        self._last_profile = found or self._last_profile

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        members = self.sharded.members()
        if self._traced is not None and not self._needs_gradients(members):
            return self._traced.run(self._parts(args, kwargs), members)
        return self._run(self._parts(args, kwargs))

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise `TraceError`: `torch.jit.script`, which calls this method, cannot compile this step."""
        refuse_capture("TrainStep")

    def compile_for(self, *args: Any, **kwargs: Any) -> Plan | None:
        """Compile the program of a step on a global batch without running it, on all ranks together.

        Return its plan, or None for a program that was written by hand.
        """
        part_args, part_kwargs = self._parts(args, kwargs).parts[0]
        with naming_micro_batches(self.micro_batches):
            if self._traced is not None:
                return self._traced.compile_for(part_args, part_kwargs)
            with torch.enable_grad():
                return self.sharded.compile_for_loss(part_args, part_kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model and the optimizer, for `load_state_dict` and torch's own savers.

        Under `torchrun`, each rank gets DTensors with its own shards. Save them with `torch.distributed.checkpoint`, or
        use `Checkpoints`.

        Returns:
            The model's state dict under "model", with the state of its random numbers, and the optimizer's under
            "optimizer". If the loss is scaled, "loss_scale" has a state of `torch.amp.GradScaler`.
        """
        found = {"model": self.sharded.state_dict(), "optimizer": self.optimizer.state_dict()}
        return found | self.loss_scale_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. A state without a loss scale leaves the scale as it is.

        Raises:
            NotAvailableError: the state is not that of a step.
        """
        if not state.keys() >= {"model", "optimizer"}:
            raise NotAvailableError(
                f"step.load_state_dict: the state has the keys {[*state][:4]}, without 'model' and 'optimizer'. Load a "
                "result of step.state_dict(); the state of a model alone, with step.sharded.load_state_dict(state)."
            )
        self.sharded.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_loss_scale(state)

    def loss_scale_state(self) -> dict[str, Any]:
        """Return the state of the loss scale under the name "loss_scale"; empty if the loss is not scaled."""
        return {} if self._loss_scale is None else {"loss_scale": self._loss_scale.state_dict()}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """`Checkpoints` calls this: load a result of `loss_scale_state`, if it has a scale and the loss is scaled."""
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.load_state_dict(state["loss_scale"])

    def _model_weights(self) -> Weights:
        return self.sharded.model_weights

    def _needs_gradients(self, members: Members) -> bool:
        """Whether the step must leave gradients in `.grad`, for example for hooks; log the reason once.

        Raises:
            NotAvailableError: the step must do so, and the mesh has pipeline stages.
        """
        reason = why_by_autograd(self.optimizer, members.parameters.items())
        if reason is not None and self._has_stages:
            raise NotAvailableError(
                f"{reason}; with an axis 'pipeline', gradients are not in .grad. Remove the hooks and set gradients "
                "to None, or use a mesh without the axis 'pipeline'."
            )
        if reason is not None and not self._has_said_why:
            self._has_said_why = True
            _LOGGER.warning(
                "%s: steps compute gradients by autograd from now on, and the optimizer takes its own step", reason
            )
        return reason is not None

    def _run(self, batch: MicroBatches) -> torch.Tensor:
        """Run a step by autograd and the optimizer's own `step`; return the loss of the batch.

        All gradients are freed at the end. If forward or backward fails, gradients from before the step stay.
        """
        weights, shares = self._weights(batch), list[torch.Tensor]()
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        kept = {item: item.grad.clone() for item in self.sharded.parameters() if item.grad is not None}
        try:
            self._multiply_gradients(scale)
            for part, weight in zip(batch.parts, weights, strict=True):
                share = share_of(self.sharded.run_for_loss(*part), weight)
                if share.requires_grad:  # not a micro-batch of weight zero
                    (share * scale).backward()
                shares.append(share.detach())
            self._multiply_gradients(1 / scale)
            loss = sum_of(shares)
            kept.clear()
            self._update(loss)
        finally:
            for parameter in self.sharded.parameters():
                parameter.grad = kept.get(parameter)
        return loss

    def _weights(self, batch: MicroBatches) -> list[float]:
        """Return the weight of each micro-batch in the loss."""
        if batch.is_whole:
            return [1.0]
        first, *others = batch.parts
        executable, call = self._find(first)
        is_padded = call.exact is not None
        rest = (self._find(part)[1] if is_padded else FlatCall.of(*part, Outputs.LOSS) for part in others)
        return self._weigher.weights_of(executable.compiled, batch, [call, *rest])

    def _find(self, part: Part) -> tuple[Executable, FlatCall]:
        """Find or compile the program of forward and backward of a micro-batch; return it and the call to run."""
        return self.sharded.find_step(*part, None, self.sharded.members(), runs=False)

    def _update(self, loss: torch.Tensor) -> None:
        """Check loss and gradients. If they pass, clip the gradients, and take the optimizer's own step."""
        norm = self._norm_of_gradients() if self.has_grad_norm else None
        if not self._check.passes(loss, norm.full_tensor() if isinstance(norm, DTensor) else norm):
            return
        if self.max_grad_norm is not None and norm is not None:
            nn.utils.clip_grads_with_norm_(self.sharded.parameters(), self.max_grad_norm, norm)
        lay_out_loaded_state(self.optimizer, self.sharded.engine.lay_out_like)
        self._step_optimizer()

    @torch.no_grad()
    def _multiply_gradients(self, factor: float) -> None:
        if self._loss_scale is not None:
            for gradient in (item.grad for item in self.sharded.parameters() if item.grad is not None):
                gradient.mul_(factor)

    def _norm_of_gradients(self) -> torch.Tensor:
        parameters = self.sharded.parameters()
        return nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])

    def _step_optimizer(self) -> None:
        try:
            with plain_parameters(self.optimizer):
                self.optimizer.step()
        except (RuntimeError, NotImplementedError) as error:
            if not any(text in str(error) for text in _NOT_SHARDED):
                raise
            raise NotAvailableError(
                f"optimizer={type(self.optimizer).__name__} cannot step sharded weights, because torch cannot shard an "
                "operator of its step. Keep the weights whole with constraints={'*.weight': P()}, or use AdamW, Adam, "
                "SGD or Muon."
            ) from error

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicroBatches:
        return parts_of(args, kwargs, self.micro_batches)
