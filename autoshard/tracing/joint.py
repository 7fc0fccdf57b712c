"""The first way of tracing: AOTAutograd's export makes a joint graph of forward and backward.

Fake tensors replace parameters, buffers and inputs, and the model's own Python runs on them. No memory is used and
nothing is computed, whatever the model's device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import stateless
from torch.utils import checkpoint as torch_checkpoint

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind
from autoshard.tracing.assigned_data import WriteAssignedData
from autoshard.tracing.attributes import keep_scalars, keeping_attributes
from autoshard.tracing.bounded import bound_sizes
from autoshard.tracing.caches import emptying_caches
from autoshard.tracing.calling import Result, TracedCall, flatten_result
from autoshard.tracing.checks import keeping_checks
from autoshard.tracing.concrete import ConcreteReads, Value, answer_reads
from autoshard.tracing.dense import differentiating_to_dense
from autoshard.tracing.experts import keep_experts_whole
from autoshard.tracing.higher_order import calling_plainly
from autoshard.tracing.namespaces import keeping_namespaces
from autoshard.tracing.nested import refusing_nested_tensors
from autoshard.tracing.precision import Casts, cast_parameters, check_unchanged, place_casts, widen_scalar
from autoshard.tracing.provenance import ProvenanceMode
from autoshard.tracing.python_use import Accesses
from autoshard.tracing.random_numbers import number_random_operators, refusing_seeds
from autoshard.tracing.reach import own_gradients, reached_inputs
from autoshard.tracing.recurrent import computing_packed_sequences
from autoshard.tracing.replaced import replaced
from autoshard.tracing.semantic import keep_operators_whole
from autoshard.tracing.symbolic_counts import SymbolicCounts, UnboundedSizeError, new_environment

ModelCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class JointGraph:
    """AOTAutograd's graph of forward and backward, and the meaning of its inputs and results.

    Args:
        graph_module: the graph. Its plain outputs are the model's outputs in the order of `result.indices`, then the
            tensors whose values Python code read (guarded tensors).
        slots: kind and name of each flat input.
        result: structure and constants of the model's result.
        guarded_values: the value that Python code read from each guarded tensor.
        accesses: the attributes that the call's Python code used; None if unknown.
    """

    graph_module: fx.GraphModule
    slots: tuple[tuple[InputKind, str], ...]
    result: Result
    guarded_values: tuple[Value, ...]
    accesses: Accesses | None


class Known(StrEnum):
    """The tensors whose values Python code may read during the trace."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    STATE = "inputs, parameters and buffers"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of a trace.

    Args:
        grad: whether the model runs with gradients enabled.
        all_tangents: take a tangent for each output, not only for losses.
        call: the call of the model, and of a loss function.
        known: the tensors whose values Python code may read.
        symbolic: use symbols for numbers of rows that depend on values, and replace them by upper bounds later
            (`bounded`). Otherwise the program has the example's numbers.
        as_compiled: make `torch.compiler.is_compiling()` true for the model's code. Some models then have no branches
            on values.
        casts: casts to a narrower dtype; None: the model computes in its own dtypes.
        seed: seed of random operators. If a seed is given, the values that they draw may be read.
        device: assumed device of tensors on meta.
        keeps_gradients: take tangents for scalars that the call leaves in attributes, as for losses.
        whole_experts: make each layer of experts one operator.
        forward_only: take no tangents.
    """

    grad: bool = True
    all_tangents: bool = False
    call: ModelCall = field(kw_only=True)
    known: Known = Known.NOTHING
    symbolic: bool = False
    as_compiled: bool = False
    casts: Casts | None = None
    seed: Tensor | None = None
    device: torch.device | None = None
    keeps_gradients: bool = True
    whole_experts: bool = True
    forward_only: bool = False


class FlatModule(nn.Module):
    """The module that AOTAutograd traces: it takes flat tensors, and returns the outputs and the guarded tensors.

    It has no parameters of its own. The flat tensors are the model's parameters and buffers, the call's tensors and the
    seed. A tied parameter is one flat tensor, so it stays tied. A guarded tensor is a tensor whose value Python code
    read.
    """

    def __init__(self, model: nn.Module, call: TracedCall, options: TraceOptions, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple: not a submodule
        self._call = call
        self._options = options
        self._state = state
        self._places = _places(model, state)
        self._provenance = ProvenanceMode(model)
        self.result = Result()
        self.reads = ConcreteReads()
        self.accesses = Accesses()
        self.environment = new_environment() if options.symbolic else None
        self.counts: SymbolicCounts | None = None
        self.compared: list[Any] = []

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Run the model's call on flat tensors: parameters and buffers, inputs, seed.

        Return the outputs, then the tensors whose values Python code read.
        """
        (model,) = self._model
        traced_state = dict(zip(self._state, flat, strict=False))
        inputs = flat[len(self._state) : -1]
        args, kwargs = self._call.assemble(inputs)
        casts = self._options.casts
        with contextlib.ExitStack() as stack:
            kept = stack.enter_context(keeping_attributes(model))
            stack.enter_context(emptying_caches(model))
            stack.enter_context(keeping_namespaces(model))
            known = self._known_tensors(traced_state, inputs, flat[-1])
            self.counts = None if self.environment is None else SymbolicCounts(self.environment)
            self.reads = stack.enter_context(answer_reads(known, self.counts))
            narrow = {} if casts is None else cast_parameters(casts.names(model), traced_state, casts.dtype)
            given = traced_state | narrow
            after = {place: given[name] for place, name in self._places.items()}
            stack.enter_context(number_random_operators(flat[-1]))
            stack.enter_context(contextlib.nullcontext() if casts is None else casts.running())
            stack.enter_context(stateless._reparametrize_module(model, after))
            stack.enter_context(self._provenance.follow_modules())
            stack.enter_context(self._provenance)
            stack.enter_context(WriteAssignedData())
            stack.enter_context(self.accesses.recording())
            stack.enter_context(calling_plainly(flat))
            value = self._options.call(model, args, kwargs)
            found = kept()
        check_unchanged(narrow)
        _keep_assigned(traced_state, given, after)
        outputs = flatten_result(value, self.result)
        returned = len(outputs)
        outputs += keep_scalars(found, self.accesses, self.result)
        pairs = zip(self.result.indices, outputs, strict=True)
        self.result.detached = tuple(index for index, output in pairs if not output.requires_grad)
        self.result.reached = reached_inputs(outputs, flat)
        self.result.own_gradients = own_gradients(outputs)
        outputs = outputs if casts is None else [widen_scalar(output) for output in outputs]
        self._guard_comparisons()
        guarded = [tensor.detach().clone() for tensor in self.reads.tensors]
        return (*select_tangents(outputs, self._options, returned), *guarded)

    def _guard_comparisons(self) -> None:
        """Make each comparison of a symbolic number of rows a guarded tensor, which later calls compute and check."""
        if self.counts is None:
            return
        self.compared = self.counts.assumed()
        for tensor in self.counts.computed(self.compared):
            self.reads.add(tensor, True)

    def bounded(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return the traced graph with upper bounds in place of symbols.

        Raises:
            UnboundedSizeError: results with bounds might differ from results with the true sizes.
        """
        if self.counts is None:
            return graph_module
        if self.counts.assumed() != self.compared:
            raise UnboundedSizeError("the backward depends on a number of rows")
        return bound_sizes(graph_module)

    def _known_tensors(
        self, traced_state: Mapping[str, Tensor], inputs: Sequence[Tensor], seed: Tensor
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return (traced tensor, real tensor) for each tensor whose values Python code may read; None for no tensors.

        Tensors on meta are left out.
        """
        if self._options.known is Known.NOTHING:
            return None
        pairs = list(zip(inputs, self._call.tensors.values(), strict=True))
        pairs += [] if self._options.seed is None else [(seed, self._options.seed)]
        if self._options.known is Known.STATE:
            pairs += [(traced_state[name], real) for name, real in self._state.items()]
        return [(traced, real) for traced, real in pairs if not real.is_meta]


def _places(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a dict from the path of each attribute with a tensor of `state` to the tensor's name in `state`.

    A tied parameter has several attributes.
    """
    names = {id(tensor): name for name, tensor in state.items()}
    held = ((path, {**module._parameters, **module._buffers}) for path, module in model.named_modules())
    places = ((f"{path}.{leaf}".removeprefix("."), item) for path, own in held for leaf, item in own.items())
    return {place: names[id(item)] for place, item in places if item is not None}


def _keep_assigned(state: Mapping[str, Tensor], given: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Copy tensors that the model assigned to buffers (`self.count = self.count + 1`) into the traced buffers.

    An assignment then looks like an update in place.

    Args:
        state: name → traced tensor.
        given: name → tensor at the start of the call.
        after: name → tensor at the end of the call.
    """
    for name, tensor in given.items():
        if after[name] is not tensor:
            _check_assigned(name, state[name], after[name])
            state[name].copy_(after[name])


def _check_assigned(name: str, before: Tensor, after: Tensor) -> None:
    """Raise `TraceError` if `after`, assigned to the buffer `before`, would change its shape or kind of numbers."""
    if after.shape == before.shape and torch.can_cast(after.dtype, before.dtype):
        return
    raise TraceError(
        f"The model assigns {name!r} of shape={tuple(before.shape)}, {before.dtype}, a tensor of "
        f"shape={tuple(after.shape)}, {after.dtype}, in forward; a program keeps shapes and types. Register a tensor "
        "of the later shape and type."
    )


def select_tangents(outputs: Sequence[Tensor], options: TraceOptions, returned: int) -> list[Tensor]:
    """Return a contiguous copy of each output, detached if the output gets no tangent (a gradient from outside).

    If the call returns a loss, only losses get tangents, unless `options.all_tangents`. Otherwise all outputs do.
    Without gradients or a backward (`options`), none does.

    No copy aliases another copy. A tangent has its output's layout, so it is contiguous too. The call returns the first
    `returned` outputs, and leaves all other outputs in attributes.
    """
    losses = [_is_loss(output) and (i < returned or options.keeps_gradients) for i, output in enumerate(outputs)]
    wants_grad = options.grad and not options.forward_only
    if wants_grad and (options.all_tangents or not any(losses[:returned])):
        return [_copy(output) for output in outputs]
    return [
        _copy(output if is_loss and wants_grad else output.detach())
        for output, is_loss in zip(outputs, losses, strict=True)
    ]


def _copy(output: Tensor) -> Tensor:
    return output.clone(memory_format=torch.contiguous_format)


def _is_loss(output: Tensor) -> bool:
    return output.dim() == 0 and output.is_floating_point() and output.requires_grad


def export_joint(model: nn.Module, call: TracedCall, options: TraceOptions) -> JointGraph:
    """Return the joint graph of a call on fake tensors, from AOTAutograd's export.

    Symbolic sizes are replaced by bounds.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    flat_module = FlatModule(model, call, options, {**parameters, **buffers})
    slots = (
        *((InputKind.PARAMETER, name) for name in parameters),
        *((InputKind.BUFFER, name) for name in buffers),
        *((InputKind.INPUT, f"input:{index}") for index in call.tensors),
        (InputKind.SEED, "seed"),
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=flat_module.environment)
    with contextlib.ExitStack() as stack:
        flat = _fake_tensors([*parameters.values(), *buffers.values(), *call.tensors.values()], mode, options.device)
        for context in _contexts(options, mode):
            stack.enter_context(context)
        joint = aot_export_joint_with_descriptors(stack, flat_module, flat, _disable_torch_fn_metadata_mode=True)
    graph_module = flat_module.bounded(joint.graph_module)
    if options.casts is not None:
        place_casts(graph_module.graph)
    values = tuple(flat_module.reads.values)
    return JointGraph(graph_module, slots, flat_module.result, values, flat_module.accesses)


def _contexts(options: TraceOptions, mode: FakeTensorMode) -> Iterator[contextlib.AbstractContextManager[Any]]:
    yield torch.set_grad_enabled(options.grad)
    yield torch.compiler.set_stance("force_eager")
    yield replaced(
        {
            (torch.compiler, "_is_compiling_flag"): options.as_compiled,
            (torch.autograd, "backward"): _refuse_inner_backward,
            (torch.backends.mha, "_is_fastpath_enabled"): False,
            # `meta["tensor_meta"]` repeats `meta["val"]`, is never read, and takes 8 % of a trace
            (proxy_tensor, "_extract_tensor_metadata"): lambda value: None,
        }
    )
    yield keep_operators_whole(wide_losses=options.casts is not None)
    yield keep_experts_whole() if options.whole_experts else contextlib.nullcontext()
    yield keeping_checks()
    yield differentiating_to_dense()
    yield without_checkpoints()
    yield refusing_seeds()
    yield refusing_nested_tensors()
    yield computing_packed_sequences()
    yield fx_traceback.preserve_node_meta()
    yield _use_lazy_graph_module(True)
    yield mode


def _fake_tensors(tensors: Sequence[Tensor], mode: FakeTensorMode, device: torch.device | None) -> tuple[Tensor, ...]:
    """Return a fake tensor for each of `tensors`, and last a fake seed.

    Tensors on meta go to `device`. If it is None, they go to the device of the first tensor that is not on meta, or to
    the CPU.
    """
    if device is None:
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    with mode:
        seed = torch.empty((), dtype=torch.int64, device=device)
        return (*(_fake(tensor, tensor.device if not tensor.is_meta else device) for tensor in tensors), seed)


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def without_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Return a context in which activation checkpoints are plain calls: the planner chooses the recomputation."""

    def run_plainly(function: Callable[..., Any], *args: Any, **_: Any) -> Iterator[None]:
        yield

    class RunPlainly:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            return function(*args)

    instead = {"_checkpoint_without_reentrant_generator": run_plainly, "CheckpointFunction": RunPlainly}
    return replaced({(torch_checkpoint, name): value for name, value in instead.items()})


def _refuse_inner_backward(*_: Any, **__: Any) -> None:
    """Raise `TraceError`, because a trace does not see `.grad`, which a backward inside the model writes."""
    raise TraceError(
        "The model, or an autograd.Function of it, runs torch.autograd.backward itself (as reversible layers do), "
        "which adds to .grad outside the trace. Use torch.autograd.grad there and return the gradients."
    )
