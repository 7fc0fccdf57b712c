"""`trace` turns a model and example inputs into a `Program`, by the first of three ways of tracing that works.

1. The plain call, run on fake tensors through AOTAutograd's export (`joint`).
2. The same call, with known values for some tensors, if the model reads values (`concrete`). First the inputs have
   values, then parameters too. Then the model runs as compiled code, where some models have no such branches. Sizes
   that depend on values are bounded (`bounded`), or fixed to the example's where a bound may be wrong (`counted`).
3. Dynamo's graph of the call, if its Python cannot run on fake tensors (`dynamo`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.derivative import Derivative
from autoshard.ir.program import Program
from autoshard.ir.text import first_line
from autoshard.ir.under_trace import under_trace
from autoshard.ir.update import Update
from autoshard.tracing.assemble import assemble_program
from autoshard.tracing.attributes import kept_note
from autoshard.tracing.calling import (
    ModelCall,
    TracedCall,
    check_apart,
    check_fits,
    check_layouts,
    count_targets,
    has_targets,
    take_apart,
    warn_of_dropped,
)
from autoshard.tracing.derivative import GradientCall, innermost_arguments, refuse_casts
from autoshard.tracing.dynamo import capture_with_dynamo
from autoshard.tracing.hooks import hooks_note, refuse_idle_hooks, watching_hooks
from autoshard.tracing.host_numbers import host_generators, refuse_host_numbers
from autoshard.tracing.joint import JointGraph, Known, TraceOptions, export_joint
from autoshard.tracing.own_generators import OwnGenerators
from autoshard.tracing.precision import Casts
from autoshard.tracing.provenance import line_of_error, module_of_error
from autoshard.tracing.python_state import counting_note, python_state, refuse_counting
from autoshard.tracing.python_use import all_reads
from autoshard.tracing.replaced import replaced
from autoshard.tracing.symbolic_counts import UnboundedSizeError, ValueUnavailableError
from autoshard.tracing.update import append_update

_LOGGER = logging.getLogger(__name__)

LendValues = Callable[[nn.Module], contextlib.AbstractContextManager[None]]
"""Function that takes a model, and returns a context in which the model's parameters have their values."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    grad: bool = True,
    all_tangents: bool = False,
    update: Update | None = None,
    compute_dtype: torch.dtype | None = None,
    seed: torch.Tensor | None = None,
    device: torch.device | None = None,
    values: LendValues = lambda model: contextlib.nullcontext(),
    derivatives: Sequence[Derivative] = (),
    loss_only: bool = False,
    targets_optional: bool = False,
    forward_only: bool = False,
    as_compiled: bool = False,
    whole_experts: bool = True,
) -> Program:
    """Trace a call of a model, and its backward, into a program with global shapes.

    Nothing is computed and no memory is used for parameters and activations, unless the model reads values from its
    tensors. Then the call runs once on the example inputs.

    Args:
        model: any module; its parameters may be on the meta device.
        args: positional example inputs (real or meta tensors, nested as pytrees, and constants).
        kwargs: keyword example inputs.
        loss_fn: applied to the model's outputs and the last positional inputs as `loss_fn(outputs, *targets)`, with as
            many targets as it has required parameters after the first. The program returns its result.
        grad: whether to trace the backward; a model without parameters that require grad has none.
        all_tangents: take a tangent for every differentiable output. By default only losses (floating 0-dim outputs
            that require grad) get tangents if the model has any, and all other outputs are detached.
        update: the optimizer's update. The program is then that of the whole training step.
        compute_dtype: type of computation for wider parameters and inputs, as in `tracing.precision`.
        seed: seed of random operators, for models that read values which depend on random numbers.
        device: assumed device of tensors on meta; default: the device of the first tensor that is not on meta.
        values: function that takes the model, and returns a context in which parameters on meta have their values. It
            is called only if the model reads values of its parameters, or if only Dynamo can trace the model.
        derivatives: derivatives to return instead of the model's outputs, the innermost first. `args` then belong to
            the outermost derivative, as in `autoshard.ir.derivative`.
        loss_only: the program returns only the first floating scalar of the model's outputs, without the nodes that
            only other outputs need.
        targets_optional: for a call without targets, the program returns the model's outputs, without `loss_fn`.
        forward_only: the program has no backward, but the model runs as if gradients were wanted.
        as_compiled: `torch.compiler.is_compiling()` is true for the model's code. By default it is true only if the
            model cannot be traced otherwise.
        whole_experts: layers of experts of transformers' models are one operator each (`tracing.experts`). Otherwise
            their own implementation is traced.

    Returns:
        The program, in the form of `autoshard.ir.program`.

    Raises:
        TraceError: the call cannot be captured, with the reason of each way of tracing; or the model computes with a
            number that each call changes.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    call = take_apart(args, kwargs)
    casts = None if compute_dtype is None else Casts.of(model, compute_dtype)
    own_args, own_kwargs = innermost_arguments(args, kwargs, len(derivatives))
    if targets_optional and loss_fn is not None and not has_targets(model, loss_fn, own_args, own_kwargs):
        loss_fn = None
    targets = 0 if loss_fn is None else count_targets(model, loss_fn, len(own_args))
    check_layouts(model)
    check_apart(model)
    check_fits(model, own_args, own_kwargs, targets)
    model_call = ModelCall(loss_fn, targets, None if casts is None else casts.cast_inputs, loss_only)
    if derivatives:
        refuse_casts(casts)
        model_call = GradientCall.of(model_call, derivatives)
    options = TraceOptions(grad=grad, all_tangents=all_tangents, call=model_call, casts=casts, seed=seed, device=device)
    options = replace(options, keeps_gradients=update is None, whole_experts=whole_experts, forward_only=forward_only)
    options = replace(options, as_compiled=as_compiled)
    before, generators, own = python_state(model), host_generators(), OwnGenerators(model, (loss_fn,))
    with watching_hooks(model) as hooks, own.watching():
        joint = _capture(model, call, options, values)
    warn_of_dropped(joint.result)
    program = assemble_program(joint, model, call)

    def trace_again(without: Collection[Any] = ()) -> Program:
        with watching_hooks(model, without):
            return assemble_program(_capture(model, call, options, values), model, call)

    refuse_host_numbers(model, generators, own, program, trace_again)
    counting = refuse_counting(model, before, program, trace_again)
    refuse_idle_hooks(model, hooks, program, trace_again)
    use = all_reads(model) if joint.accesses is None else joint.accesses.use(model, counting)
    notes = [*counting_note(model, counting), *kept_note(model, joint.result), *hooks_note(hooks)]
    program = replace(program, python=replace(use, notes=tuple(notes)))
    return program if update is None else append_update(program, update)


def _capture(model: nn.Module, call: TracedCall, options: TraceOptions, values: LendValues) -> JointGraph:
    failures: list[tuple[_WayOfTracing, Exception]] = []
    for way in _WAYS:
        if failures and _kinds(failures[-1][1]).isdisjoint(way.after.split()):
            continue
        try:
            with _unreported(), under_trace(), values(model) if way.needs_values else contextlib.nullcontext():
                return way.capture(model, call, options)
        except (TraceError, NotAvailableError):
            raise
        except Exception as error:  # whatever the user's model raises under a trace
            _LOGGER.debug("tracing %s failed", way.name, exc_info=error)
            failures.append((way, error))
    raise _refusal(model, failures) from failures[0][1]


def _unreported() -> contextlib.AbstractContextManager[None]:
    """Return a context that silences torch's page-long reports of a call that fails on fake tensors.

    Our error names the call.
    """
    return replaced({(logger, "disabled"): True for logger in _REPORTING})


_REPORTING = tuple(map(logging.getLogger, ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")))


@dataclass(frozen=True, slots=True)
class _WayOfTracing:
    """One way of tracing.

    Args:
        name: the way's name, for messages.
        after: kinds of errors of the previous way (`_kinds`) after which this way may work.
        changes: options of the trace that differ from the user's, by name; None for Dynamo's graph of the call.
    """

    name: str
    after: str
    changes: Mapping[str, Any] | None

    @property
    def needs_values(self) -> bool:
        """Whether parameters on the meta device must get values before `capture`, which may read them."""
        return self.changes is None or self.changes.get("known") is Known.STATE

    def capture(self, model: nn.Module, call: TracedCall, options: TraceOptions) -> JointGraph:
        """Return the joint graph of a call. With symbolic sizes, raise `UnboundedSizeError` unless a value is read."""
        if self.changes is None:
            return capture_with_dynamo(model, call, options)
        options = replace(options, **self.changes)
        try:
            return export_joint(model, call, options)
        except (TraceError, UnboundedSizeError):
            raise
        except Exception as error:
            if not options.symbolic or _reads_values(error):
                raise
            raise UnboundedSizeError(f"{type(error).__name__}: {first_line(error)}") from error


def _reads_values(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, reports a read of a tensor whose values the trace does not know."""
    seen: BaseException | None = None if isinstance(error, UnboundedSizeError) else error
    while seen is not None:
        if isinstance(seen, _READ_ERRORS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_READ_ERRORS = (
    *(DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode),
    ValueUnavailableError,
)


def _kinds(error: BaseException) -> set[str]:
    """Return the kinds of an error, each a word of `_WayOfTracing.after`.

    "size": a shape depends on values. "read": Python reads a value. "unbounded": a size has no safe upper bound.
    "other": none of these.
    """
    kinds = {
        "size": isinstance(error, DynamicOutputShapeException),
        "read": _reads_values(error),
        "unbounded": isinstance(error, UnboundedSizeError),
    }
    return {kind for kind, is_so in kinds.items() if is_so} or {"other"}


_WAYS = (
    _WayOfTracing("the plain call under fake tensors", "other", {}),
    _WayOfTracing("with bounds for sizes that depend on values", "size", {"symbolic": True}),
    _WayOfTracing("with the values of the inputs, and bounds", "read", {"symbolic": True, "known": Known.INPUTS}),
    _WayOfTracing("with all values, and bounds", "read", {"symbolic": True, "known": Known.STATE}),
    _WayOfTracing("with the values of the inputs", "unbounded", {"known": Known.INPUTS}),
    _WayOfTracing("with the values of inputs, parameters and buffers", "read unbounded", {"known": Known.STATE}),
    _WayOfTracing("as compiled code", "read", {"known": Known.INPUTS, "as_compiled": True}),
    _WayOfTracing("by way of Dynamo", "other", None),
)


def _refusal(model: nn.Module, failures: list[tuple[_WayOfTracing, Exception]]) -> TraceError:
    first = failures[0][1]
    lines = [f"  {way.name}: {type(error).__name__}: {first_line(error)}" for way, error in failures]
    where = next((line for _, error in failures if (line := line_of_error(error))), "")
    if _reads_values(first):
        cause = (
            f"{where or 'the model'} reads a value from a tensor, or makes a tensor whose shape depends on values, "
            f"that the trace does not have. Give real example inputs (and parameters) instead of meta tensors, or "
            f"use an operator in place of the Python branch (torch.where)."
        )
    elif "mutating a non-functional tensor" in str(first):
        cause = (
            f"{where or 'the model'} changes a tensor in place that is neither an input nor a buffer of the model. "
            "Register the tensor as a buffer of the model; if a loss function holds the tensor, make the loss a "
            "submodule, and call it in forward."
        )
    else:
        place = module_of_error(first, model)
        source = (
            f"{where or 'the model'}{'' if place is None else f', module {place[0]!r} ({type(place[1]).__name__}),'}"
        )
        said = first_line(first).rstrip(".!")
        cause = f"{source} raised {type(first).__name__}: {said}. {_way_out(place, where)}"
    refusal = TraceError(f"Cannot trace {type(model).__qualname__}: {cause}")
    refusal.add_note("Ways of tracing, and how each ended:\n" + "\n".join(lines))
    return refusal


def _way_out(place: tuple[str, nn.Module] | None, where: str) -> str:
    """Return advice for an error in the module `place` (name, module) and on the user's line `where`, for a message."""
    if place is not None and isinstance(place[1], _NORMS) and place[1].training:
        return "In training it needs several values of each channel: pass a larger batch, or call .eval()."
    first = "Call the model with these inputs on one device first."
    return f"{first} If it runs there, {where} cannot be traced; write that line in another way." if where else first


_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
