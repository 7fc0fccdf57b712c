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
    """Settings of a compiled model, `autoshard.compile(..., options=Options(...))`. Pass each field by keyword.

    Args:
        reduce_dtype: "bf16": ranks send gradients of float32 parameters in bfloat16, and add them in float32. None
            (default): ranks send each gradient in its own type; see docs/reference/precision.md.
        dynamic_lengths: padding value of each argument whose dim 1 varies in size: {"input_ids": 0, "labels": -100}.
            Dim 1 is padded to 8, 12, 16, 24, 32, 48 and so on, and results are cut back, so few programs serve all
            lengths. If autoshard cannot prove that padding changes no result, each length gets its own program, with a
            warning. None (default): no padding.
        max_programs: number of compiled programs to keep, one for each kind of call (shapes, types, mode, need for
            gradients). The least recently used program is dropped, and compiled again when needed. Default: 32.
        check: calls that ranks compare under `torchrun`: "always" (default), "first" (only the first call of each
            program), or "off" (only compilations). A comparison covers program, mode, hyperparameters, inputs and
            parameters. If ranks differ, all raise `RankMismatchError`; see docs/reference/running.md.
        timeout_s: under `torchrun`: seconds to wait for a rank that neither calls the model nor compiles. All other
            ranks then raise `LostRankError`. Default: 60.
        outputs: "all" (default): calls return all outputs of the model. "loss": calls return only the loss, the first
            floating-point scalar of the outputs, and compute nothing else. A `TrainStep` always returns only the loss.
        gather_outputs: True: each rank returns whole tensors, except outputs in `constraints`. False (default): under
            `torchrun`, an output that is not a scalar is a DTensor, sharded by the plan. No effect on a loss alone.
        cuda_graph: True: from the third step on, launch forward and backward of a micro-batch as one CUDA graph. This
            helps if kernels are shorter than their launches. Needs `optimizer=` SGD, Adam, AdamW or Muon, and GPUs
            under `torchrun` without a pipeline. Default: False.
        on_nonfinite: response of a `TrainStep` to a loss or gradient norm that is not finite on some rank. "raise": all
            ranks raise `NonFiniteError` before the update. "skip": all ranks skip the update, and count
            `step.skipped_steps`. None (default): no check. Under `precision="f16"`, an overflow of gradients always
            skips the update. "raise" then raises only for the loss, or at a loss scale of 1 or less.
        name_ranges: True: name each operator by module, and each collective by axis, in every `torch.profiler` trace
            and as NVTX ranges on GPUs. A call then takes a few microseconds longer. Default: False.
        grad_norm: True, with `optimizer=`: compute `step.last_grad_norm` even without `max_grad_norm`. Default: False.
        loss_scaling: with `optimizer=` and `precision="f16"`: settings of the loss scale, an `autoshard.LossScaling`.
            None (default): `LossScaling()`.

    Raises:
        NotAvailableError: an option has an invalid value. `compile` raises it for `reduce_dtype` and `cuda_graph`.
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
        """Whether steps compute the gradient norm even without `max_grad_norm`: with `grad_norm` or `on_nonfinite`."""
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
