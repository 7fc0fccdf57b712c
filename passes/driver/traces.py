"""Trace calls to programs. Candidates on several meshes plan the same micro-batch, so its call is traced once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields

from autoshard import tracing
from autoshard.call import Call, LossFunction
from autoshard.ir.outputs import Outputs
from autoshard.ir.precision import PRECISIONS
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from autoshard.tracing.calling import check_fits, count_targets

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Traces:
    """A store of traced programs. A program is found again for a call whose arguments are the same objects."""

    found: dict[Hashable, tuple[Request, Program | None]] = field(default_factory=dict, repr=False)

    def once(self, request: Request, margin: int | None, trace: Callable[[], Program | None]) -> Program | None:
        """Return the traced program of a call: the stored program, or else the result of `trace`, which is stored.

        `margin` is that of `leave_out_blocks`, or None for a program with all blocks.
        """
        key = (margin, *(id(getattr(request, each.name)) for each in fields(request)))
        if key not in self.found:
            self.found[key] = request, trace()  # the request keeps its fields alive, so no other object gets their ids
        return self.found[key][1]


def trace_call(request: Request, loss_fn: LossFunction | None, precision: str | None) -> Program:
    """Return the traced program of a call. Without `loss_fn`, the model returns its loss.

    `precision` names the dtype of computation if the model's parameters have a wider dtype.
    """
    start = time.perf_counter()
    program = tracing.trace(
        request.model,
        request.args,
        dict(request.kwargs),
        loss_fn=loss_fn,
        grad=request.grad,
        all_tangents=request.all_tangents,
        update=request.update,
        seed=request.seed,
        compute_dtype=None if precision is None else PRECISIONS[precision],
        device=request.device,
        values=request.values,
        derivatives=request.derivatives,
        loss_only=request.outputs is Outputs.LOSS,
        targets_optional=request.outputs is not Outputs.LOSS,
        forward_only=request.forward_only,
        as_compiled=request.as_compiled,
    )
    _LOGGER.debug("tracing took %.3f s", time.perf_counter() - start)
    return program


def check_example(call: Call) -> None:
    """Raise `TraceError` if the example call of a call with `loss_fn` lacks targets, or does not fit the model."""
    if call.example_inputs is not None and call.loss_fn is not None:
        args, kwargs = call.inputs
        check_fits(call.model, args, kwargs, count_targets(call.model, call.loss_fn, len(args)))
