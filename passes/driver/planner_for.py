"""Make the planner of a call from its arguments."""

from __future__ import annotations

import torch

from autoshard.call import Call
from autoshard.ir.loss_scaling import scales_loss
from autoshard.ir.update import Update
from autoshard.runtime.tried_optimizer import state_bytes_per_parameter_byte
from autoshard.runtime.whole_parameters import with_whole_parameters
from passes.driver.backends import has_kernels
from passes.driver.planner import Planner


def planner_for(
    call: Call,
    update: Update | None,
    device: torch.device,
    *,
    reduce_dtype: torch.dtype | None = None,
    progress: bool | None = False,
) -> Planner:
    """Return the planner of a call. `call.precision` must be a result of `precision_of`.

    Args:
        update: the traced update of an optimizer.
        reduce_dtype: the type in which gradients are sent between ranks; None: their own type.
        progress: see `search_bar`.

    Raises:
        NotAvailableError: an optimizer that is not traced needs whole parameters, but an argument splits one. Or its
            step fails when it is tried on a small parameter.
    """
    optimizer, constraints = call.optimizer, dict(call.constraints or {})
    if update is None and isinstance(optimizer, torch.optim.Optimizer):
        constraints = with_whole_parameters(constraints, optimizer, call.model, recipe=call.recipe, fixed=call.fixed)
    return Planner(
        cluster=call.cluster,
        fixed=call.fixed,
        before=call.previous,
        loss_fn=call.loss_fn,
        precision=call.precision,
        constraints=constraints,
        memory_budget=call.memory_budget,
        state_ratio=state_bytes_per_parameter_byte(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else 0.0,
        has_update=update is not None,
        scales_loss=scales_loss(call.precision, optimizer),
        micro_batches=call.micro_batches or 1,
        strict=call.strict,
        verify=call.verify,
        time_budget_s=call.time_budget_s,
        with_kernels=has_kernels(call.backend, device),
        for_compiler=call.backend == "inductor",
        with_native=call.backend != "reference",
        cuda_graph=call.options.cuda_graph,
        recipe=call.recipe,
        reduce_dtype=reduce_dtype,
        gather_outputs=call.options.gather_outputs,
        progress=progress,
    )
