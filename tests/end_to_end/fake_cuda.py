"""Run training steps on a CUDA device that does not exist, with fake tensors and a fake process group.

A build of torch without CUDA has no device guard for CUDA. Autograd and some functions of torch need a guard. Calls are
therefore traced for "cpu:1", a device that torch tells apart from "cpu". The programs are then moved to "cuda:0".
Operators are called by name, so `autoshard.graphs.direct_calls` reaches the same operators.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.ir.program import Program
from autoshard.ir.request import CompiledProgram, Request
from autoshard.kernels.library import NAMESPACE, implementation_of
from autoshard.runtime import distributed, generator_marks, graph_loader, seeds
from autoshard.runtime.agreement import digests, late_numbers
from autoshard.runtime.agreement.one_thread import OneThread
from autoshard.runtime.compiler import Compiler
from autoshard.runtime.engine import Engine
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep

T = TypeVar("T")

CUDA, TRACED_ON = torch.device("cuda", 0), torch.device("cpu", 1)

FUSED = partial(torch.optim.AdamW, fused=True)

_READS = ("aten.item", "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten.unique")
_MOST_ON_THE_HOST = 64
"""Most elements that a CPU tensor of a step may have; optimizer options and messages of ranks are this small."""

_ASKED_BY_SEEDS = {seeds.__file__, generator_marks.__file__}
"""Files whose large CPU tensors are allowed, since they read and advance torch's CPU generator, in 20 us a step."""


class DeviceUse(TorchDispatchMode):
    """Count the operators that run, and list those that wait for a device, move between devices or run on the CPU.

    Operators of autoshard's library run their implementation. A number that is read from a tensor is always 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: list[str] = []
        self.moves: list[str] = []
        self.large_on_cpu: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE and not str(func).startswith("autoshard.triton_"):
            with self:
                return implementation_of(func)(*args, **kwargs)
        name = str(func)
        self.operators[name.removesuffix(".default")] += 1
        if name.startswith(_READS):
            return self._read(args[0], name)
        given = _tensors((args, kwargs))
        written = [kwargs[item.name] for item in func._schema.arguments if item.is_out and item.name in kwargs]
        if written:
            found = written[0] if len(written) == 1 else tuple(written)
        else:
            found = func(*args, **kwargs) if func._schema.returns else None
        if name != "aten.copy_.default" or not (*args, False)[2]:  # a copy that nothing waits for is none
            self._look(name, given, _tensors(found))
        return found

    def _read(self, tensor: Tensor, name: str) -> float:
        if tensor.device.type != "cpu":
            self.waits.append(_described(name, tensor))
        return 1.0 if tensor.is_floating_point() else 1

    def _look(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        is_copy = name.startswith(("aten.copy_", "aten._to_copy", "aten.to."))
        numbers = [] if is_copy else [item for item in given if item.device.type == "cpu" and item.dim() == 0]
        devices = {item.device for item in (*given, *made) if not any(item is number for number in numbers)}
        if len(devices) > 1:
            self.moves.append(_described(name, *given, *made))
        large = [item for item in made if item.device.type == "cpu" and item.numel() > _MOST_ON_THE_HOST]
        if large and not _ASKED_BY_SEEDS & {frame.filename for frame in traceback.extract_stack()}:
            self.large_on_cpu.append(_described(name, *large))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _described(name: str, *tensors: Tensor) -> str:
    """Describe an operator, its arguments, and the lines of autoshard that called it."""
    frames = [line for line in traceback.extract_stack() if "/autoshard/" in line.filename]
    where = " < ".join(f"{line.filename.rpartition('/')[2]}:{line.lineno}" for line in frames[::-1][:5])
    return f"{name} on {', '.join(f'{item.device}{list(item.shape)}' for item in tensors)} at {where}"


class OneOfMany:
    """A fake `ControlGroup`, which is its own channel and vectors; all other ranks repeat this rank's messages."""

    def __init__(self, ranks: Sequence[int], timeout_s: float = 0.0) -> None:
        self.channel = self.vectors = self
        self.ranks, self.rank = tuple(ranks), 0
        self.one_thread = OneThread()

    def agree(self, facts: Callable[[], Any], what: str = "") -> None:
        """Do nothing, since all ranks agree."""

    def share(self, compute: Callable[[], T], what: str = "") -> T:
        return compute()

    def gather(self, value: T, what: str) -> list[T]:
        return [value] * len(self.ranks)

    def exchange(self, value: bytes, what: str) -> list[bytes]:
        return [value] * len(self.ranks)

    def post(self, numbers: Sequence[int], what: Callable[[], str]) -> None:
        self.numbers = tuple(numbers)

    def collect(self, what: Callable[[], str]) -> list[tuple[int, ...]]:
        return [self.numbers] * len(self.ranks)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        yield

    @contextmanager
    def showing_life(self, what: str) -> Iterator[None]:
        yield


class _Event:
    """A `torch.Event` that has already happened."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self) -> None:
        """Do nothing; the event has already happened."""

    def synchronize(self) -> None:
        """Return at once; the event has already happened."""


@dataclass(frozen=True, slots=True)
class _TracedElsewhere:
    """A `Compiler` that traces an outline of the model on another device, and moves the program to CUDA."""

    inner: Any
    outline: nn.Module

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        compiled = self.inner(self._elsewhere(request), engine)
        for graph_module in (compiled.phased.forward, compiled.phased.backward, compiled.phased.update):
            if graph_module is not None:
                _move_to_cuda(graph_module)
        return compiled

    def trace(self, request: Request) -> Program:
        return self.inner.trace(self._elsewhere(request))

    def guards_hold(self, program: Program, inputs: Sequence[Tensor], state: Mapping[str, Tensor]) -> bool:
        raise AssertionError("guards read values, which fake tensors have not")

    def _elsewhere(self, request: Request) -> Request:
        args, kwargs, seed = pytree.tree_map(_outline, (request.args, dict(request.kwargs), request.seed))
        return replace(request, model=self.outline, args=args, kwargs=kwargs, seed=seed, device=TRACED_ON)


def _outline(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


def _move_to_cuda(graph_module: torch.fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = pytree.tree_map(
                lambda leaf: CUDA if leaf == TRACED_ON else leaf, (node.args, node.kwargs)
            )
    graph_module.recompile()


@dataclass(frozen=True, slots=True)
class FakeWorld:
    """Rank 0 of a fake process group, whose devices are CUDA."""

    fakes: FakeTensorMode
    mesh: Any

    def step(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = FUSED,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> TrainStep:
        """Return the training step of a model, whose parameters become fake tensors on CUDA."""
        outline = copy.deepcopy(model).to(dtype).to("meta")
        known: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, item in module._parameters.items():
                if item is not None:
                    fake = nn.Parameter(self.on_cuda(item, dtype), item.requires_grad)
                    module._parameters[name] = known.setdefault(id(item), fake)
            for name, item in module._buffers.items():
                if item is not None:
                    module._buffers[name] = self.on_cuda(item, dtype if item.is_floating_point() else None)
        step = autoshard.compile(model, self.mesh, optimizer=optimizer(model.parameters()), **options)
        assert isinstance(step, TrainStep), "compile was given an optimizer"
        compiler: Compiler = _TracedElsewhere(step.sharded.compiler, outline)
        step.sharded.compiler = compiler
        return step

    def on_cuda(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor on CUDA with the shape and type of the given tensor."""
        meta = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        return FakeTensor(self.fakes, meta, CUDA)

    def use_of(self, step: TrainStep, batch: Mapping[str, Any]) -> DeviceUse:
        """Run four steps and return the device use of the last, in which state exists and digests are compared."""
        batch = {name: self.on_cuda(item) for name, item in batch.items()}
        step.compile_for(**batch)
        with self.fakes:
            for _ in range(4):
                with DeviceUse() as use:
                    step(**batch)
        return use


@contextmanager
def fake_world(sizes: Mapping[str, int]) -> Iterator[FakeWorld]:
    """Yield a `FakeWorld` whose mesh has the given axis sizes; this process is rank 0."""
    ranks = 1
    for size in sizes.values():
        ranks *= size
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "ControlGroup", OneOfMany)
            patch.setattr(graph_loader, "call_directly", lambda graph_module: None)
            patch.setattr(late_numbers.torch, "Event", _Event)
            patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
            patch.setattr(ShardedModule, "_next_seed", _within(fakes, ShardedModule._next_seed))
            yield FakeWorld(fakes, init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    finally:
        dist.destroy_process_group()
        digests.table_on.cache_clear()
        generator_marks.blocks_behind.cache_clear()  # fake numbers do not move a generator


def _within(fakes: FakeTensorMode, method: Callable[..., T]) -> Callable[..., T]:
    def run(*args: Any) -> T:
        with fakes:
            return method(*args)

    return run
