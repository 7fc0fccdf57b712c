"""The arguments of `compile`, `plan` and `prove`, checked once and passed to the driver as one `Call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.arguments import (
    ExampleInputs,
    check_agreement,
    check_backend,
    check_flags,
    check_limits,
    check_loss,
    check_model,
    check_on_nonfinite,
    check_options,
    check_programs,
    check_recipe,
    check_scaling,
    checked_outputs,
    split_inputs,
)
from autoshard.ir.loss_scaling import LossScaling
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.runtime import Runtime
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.four_bit import take_over_4bit_layers
from autoshard.runtime.sharded_module import MAX_PROGRAMS, ShardedModule
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster

LossFunction = Callable[..., torch.Tensor]


def as_int(value: Any) -> Any:
    """Return a whole number of NumPy as an int of Python, which files of plans can hold; any other value as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the calls of a compiled model.

    Args:
        reduce_dtype: "bf16" sends gradients of float32 parameters between ranks in 16 bits and adds them in float32;
            see docs/reference/precision.md. None sends each gradient in its own type.
        dynamic_lengths: from the name of an argument to its padding value: {"input_ids": 0, "attention_mask": 0,
            "labels": -100}. Dim 1 of these arguments is padded to one of a few lengths, by at most half its size, and
            results are cut back. Calls of many lengths then share few programs. Before a program is compiled, autoshard
            proves that padding reaches no result. If the proof fails, each length is compiled without padding, with a
            warning.
        max_programs: number of programs to keep, each for calls of one kind. The least recently used program is
            dropped first.
        check: "always" compares each call between processes, "first" the first call of each program, "off" no call. A
            comparison covers program, mode, hyperparameters, inputs and parameters; see docs/reference/running.md.
        timeout_s: seconds to wait for a process that neither calls nor compiles; then all other processes raise
            `LostRankError`.
        outputs: "all" returns all outputs of the model; "loss" returns the first floating scalar among them. With
            "loss", nothing is computed or kept for the other outputs. A `TrainStep` always returns the loss alone.
        gather_outputs: return whole outputs, except outputs in `constraints`. By default, with processes, an output
            that is not a scalar is a DTensor, placed by the plan; see docs/reference/running.md.
        cuda_graph: with a traced optimizer and processes on GPUs: from the third step on, launch forward and backward
            of a micro-batch as one CUDA graph. A graph helps if the host launches kernels more slowly than the device
            computes; see docs/reference/running.md.
        on_nonfinite: with an optimizer: "raise" raises `NonFiniteError` on all ranks, before the update, if the loss or
            the gradient norm is not finite on any rank. "skip" leaves out the update and counts `step.skipped_steps`.
            None checks nothing; see docs/how_to/watch_a_run.md.
        name_ranges: name each operator by module, and each collective by axis, in every `torch.profiler` trace and as
            NVTX ranges on GPUs. It costs a few microseconds a call; see docs/how_to/profile_a_step.md.
        grad_norm: with an optimizer: compute `step.last_grad_norm` even without `max_grad_norm`.
        loss_scaling: with an optimizer and `precision="f16"`: settings of the scale of the loss. None: the defaults of
            `torch.amp.GradScaler`; see docs/reference/precision.md.

    Raises:
        NotAvailableError: an option has an invalid value.
    """

    reduce_dtype: str | None = None
    dynamic_lengths: Mapping[str, float] | None = None
    max_programs: int = MAX_PROGRAMS
    check: str = "always"
    timeout_s: float = TIMEOUT_S
    outputs: str = "all"
    gather_outputs: bool = False
    cuda_graph: bool = False
    on_nonfinite: str | None = None
    name_ranges: bool = False
    grad_norm: bool = False
    loss_scaling: LossScaling | None = None

    @property
    def returns_norm(self) -> bool:
        """Whether a step computes the norm of its gradients even without clipping."""
        return self.grad_norm or self.on_nonfinite is not None

    def __post_init__(self) -> None:
        check_flags(gather_outputs=self.gather_outputs, cuda_graph=self.cuda_graph, grad_norm=self.grad_norm)
        check_flags(name_ranges=self.name_ranges)
        check_on_nonfinite(self.on_nonfinite)
        check_scaling(self.loss_scaling)
        checked_outputs(self.outputs, gather_outputs=self.gather_outputs)
        check_agreement(check=self.check, timeout_s=self.timeout_s)
        check_programs(dynamic_lengths=self.dynamic_lengths, max_programs=self.max_programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The checked arguments of `compile`, `plan` or `prove`.

    A field that is not listed below has the value of the argument with its name. Making a `Call` turns each 4-bit layer
    of bitsandbytes in `model` into a layer of autoshard, in place.

    Args:
        fixed: the plan to run or prove; None: search for a plan.
        constraints: specs by name of a value; with `global_batch`, also values by name of a field of `Recipe`.
        cluster: the hardware for which times on a mesh are predicted; None for this machine.
        runtime: the framework that runs the plan; None for autoshard.
    """

    model: nn.Module
    target: DeviceMesh | Mesh | Cluster
    example_inputs: ExampleInputs | None = None
    optimizer: str | torch.optim.Optimizer | None = None
    max_grad_norm: float | None = None
    loss_fn: LossFunction | None = None
    fixed: Plan | None = None
    constraints: Mapping[str, Any] | None = None
    memory_budget: int | None = None
    precision: str | None = None
    micro_batches: int | None = None
    strict: bool = False
    backend: str = "auto"
    verify: bool = True
    time_budget_s: float = 60.0
    cluster: Cluster | None = None
    global_batch: int | None = None
    recipe: Recipe | None = None
    previous: Plan | None = None
    runtime: Runtime | None = None
    progress: bool | None = None
    options: Options = Options()

    def __post_init__(self) -> None:
        check_model(self.model, (ShardedModule, TrainStep))
        check_backend(self.backend)
        check_loss(self.loss_fn)
        check_flags(strict=self.strict, verify=self.verify)
        check_options(self.options, Options)
        check_recipe(self.recipe)
        check_limits(time_budget_s=self.time_budget_s, global_batch=self.global_batch)
        if self.example_inputs is not None:
            split_inputs(self.example_inputs)
        take_over_4bit_layers(self.model)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the example call, which must be given."""
        assert self.example_inputs is not None, "there is an example call"
        return split_inputs(self.example_inputs)

    @property
    def outputs(self) -> Outputs:
        """The choice of outputs that a call returns: `Outputs.LOSS` with an optimizer, otherwise `handed_out`."""
        if self.optimizer is not None:
            return Outputs.LOSS
        return self.handed_out

    @property
    def handed_out(self) -> Outputs:
        """The choice of outputs in `options`: all as planned, all gathered, or the loss alone."""
        return checked_outputs(self.options.outputs, gather_outputs=self.options.gather_outputs)

    @property
    def grad(self) -> bool:
        """Whether some parameter of the model requires a gradient."""
        return any(parameter.requires_grad for parameter in self.model.parameters())
