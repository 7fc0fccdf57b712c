"""Record calls of operators while PyTorch runs, to try rules on the calls."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import AutoshardError
from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule, has_rule
from tests.rules.run_strategy import check_strategy, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """A call with its original arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """A text that is equal for calls that rules cannot tell apart."""
        return repr(pytree.tree_map_only(Tensor, _describe, (str(self.op), self.args, self.kwargs)))


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}"


_OF_MEMORY = {
    aten.as_strided.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operators whose results depend on memory layout."""


def has_sound_rule(op: Any) -> bool:
    """Whether an operator has a rule, and results that do not depend on memory layout."""
    return has_rule(op) and op not in _OF_MEMORY


def is_functional(op: Any) -> bool:
    """Whether an operator writes to no operand."""
    return not op._schema.is_mutable


class Recorder(TorchDispatchMode):
    """Record the calls of chosen operators below autograd."""

    def __init__(self, keep: Callable[[Any], bool] = has_sound_rule) -> None:
        super().__init__()
        self._keep = keep
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._keep(func):
            copies = pytree.tree_map_only(Tensor, _copy, (tuple(args), dict(kwargs)))
            call = Call(func, *copies)
            self.calls.setdefault(call.key, call)
        return func(*args, **kwargs)


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, if its elements do not overlap."""
    if tensor.layout != torch.strided:
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format)


def record(function: Callable[[], Any], keep: Callable[[Any], bool] = has_sound_rule) -> Recorder:
    """Record the calls of `function`, and of its backward if results need gradients."""
    recorder = Recorder(keep)
    with recorder:
        results = [leaf for leaf in pytree.tree_leaves(function()) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.randn_like(result) for result in results])
    return recorder


MESHES = (Mesh({"a": 2}), Mesh({"a": 4}), Mesh({"a": 2, "b": 2}), Mesh({"a": 3}), Mesh({"a": 2, "b": 3}))
"""Meshes whose sizes divide our own samples; axes of three cut most samples unevenly."""

MESH_PAIRS = st.sampled_from([(MESHES[0], mesh) for mesh in MESHES[1:]])
"""The smallest mesh, which splits every possible dim, and a mesh drawn for each call."""

DATABASE_MESHES = (Mesh({"a": 5}), Mesh({"a": 2}))
"""Meshes for PyTorch's samples; fives divide their shapes, and twos cut them unevenly."""


@dataclass
class Tally:
    """Counts of tried calls, with the failures.

    Args:
        calls: number of tried calls with a rule.
        strategies: number of their strategies on all meshes.
        left_out: number of strategies beyond the limit.
        failures: calls with results unlike one device's.
        samples: for each name, the number of PyTorch's samples that called an operator with a sound rule.
        refused: for each name, the number of samples that PyTorch itself could not run.
    """

    calls: int = 0
    strategies: int = 0
    left_out: int = 0
    failures: list[str] = field(default_factory=list)
    samples: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def add_sample(self, name: str, calls: Mapping[str, Call] | None) -> None:
        """Count a sample of PyTorch by its name."""
        if calls is None:
            self.refused[name] += 1
        elif calls:
            self.samples[name] += 1

    def check(self, call: Call, meshes: Iterable[Mesh], most: int | None = None) -> None:
        """Check every strategy of a call on every mesh; of more than `most` on a mesh, only `most` drawn strategies.

        Raises:
            AssertionError: results differ from one device's.
        """
        results = results_of(call.op, call.args, call.kwargs)
        rule = bound_rule(call.op, call.args, call.kwargs, results)
        if rule is None:
            return
        self.calls += 1
        for mesh in meshes:
            found = enumerate_strategies(rule, mesh)
            tried = found if most is None or len(found) <= most else random.Random(self.calls).sample(found, most)
            self.left_out += len(found) - len(tried)
            for strategy in tried:
                self.strategies += 1
                check_strategy(call.op, call.args, call.kwargs, rule, strategy, mesh, expected=results)


def check_call(op: Any, *args: Any, meshes: Iterable[Mesh] = MESHES, **kwargs: Any) -> int:
    """Check that every strategy of a call has one device's results, and return the number of strategies."""
    tally = Tally()
    tally.check(Call(op, args, kwargs), meshes)
    return tally.strategies


def check_splits(op: Any, *args: Any, meshes: Sequence[Mesh] = MESHES, **kwargs: Any) -> None:
    """Check a call like `check_call`, and check that some strategy splits the call."""
    assert check_call(op, *args, meshes=meshes, **kwargs) > len(meshes), f"{op} can only be replicated"


def check_recorded(function: Callable[[], Any], *, meshes: Iterable[Mesh] = MESHES) -> set[str]:
    """Check every strategy of each call in `function` and its backward, and return the names of the operators."""
    tally = Tally()
    calls = record(function).calls.values()
    for call in calls:
        tally.check(call, meshes)
    return {str(call.op) for call in calls}


def database_calls(
    names: Collection[str] | None, limit: int | None, keep: Callable[[Any], bool] = has_sound_rule
) -> Iterator[tuple[str, Call]]:
    """Yield each distinct call in PyTorch's samples, with the sampled name; `limit` is for each operator."""
    seen: set[str] = set()
    for name, calls in _sampled(names, limit, keep):
        yield from ((name, call) for call in _unseen(calls or {}, seen))


def _sampled(
    names: Collection[str] | None, limit: int | None, keep: Callable[[Any], bool] = has_sound_rule
) -> Iterator[tuple[str, dict[str, Call] | None]]:
    """Return each sample's name with its calls by key, or with None if PyTorch cannot run the sample."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if info.name.startswith("jiterator") or (names is not None and info.name not in names):
            continue
        for function in _samples(info, limit):
            yield info.name, _recorded(function, keep)


def _unseen(calls: Mapping[str, Call], seen: set[str]) -> Iterator[Call]:
    """Yield calls whose keys are not among `seen` yet, and put the keys there."""
    for key, call in calls.items():
        if key not in seen:
            seen.add(key)
            yield call


@contextmanager
def even_samples() -> Iterator[None]:
    """Within the context, PyTorch's samples have sizes 6 and 4 in place of 5 and 3, so that two ranks divide them."""
    import torch.testing._internal.common_methods_invocations  # noqa: F401  (imports all that draw samples)

    sizes = {"S": 6, "XS": 4}
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.testing._internal")]
    old = [(module, name, getattr(module, name)) for module in modules for name in sizes if hasattr(module, name)]
    try:
        for module, name, _ in old:
            setattr(module, name, sizes[name])
        yield
    finally:
        for module, name, size in old:
            setattr(module, name, size)


def _samples(info: Any, limit: int | None) -> Iterator[Callable[[], Any]]:
    """Return the samples of an operator, without samples that cannot be drawn in the given sizes."""
    dtype = next((dtype for dtype in _DTYPES if dtype in info.dtypes), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    differentiable = info.supports_autograd and dtype.is_floating_point
    samples = islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), limit)
    while True:
        try:
            sample = next(samples)
        except (StopIteration, IndexError):
            return
        yield partial(info.op, sample.input, *sample.args, **sample.kwargs)


_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)


def _recorded(function: Callable[[], Any], keep: Callable[[Any], bool]) -> dict[str, Call] | None:
    """Return a sample's calls; None if PyTorch cannot run the sample, such as without a library or a GPU."""
    try:
        return record(function, keep).calls
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return None


def check_database(
    names: Collection[str] | None,
    *,
    limit: int | None = 3,
    meshes: Sequence[Mesh] = DATABASE_MESHES,
    most: int | None = None,
) -> Tally:
    """Check the strategies of the calls in PyTorch's samples of `names`, or of all operators, and tally failures."""
    tally = Tally()
    seen: set[str] = set()
    for name, calls in _sampled(names, limit):
        tally.add_sample(name, calls)
        for call in _unseen(calls or {}, seen):
            try:
                tally.check(call, meshes, most)
            except (AssertionError, AutoshardError, RuntimeError) as error:
                tally.failures.append(f"{name}: {call.key}\n{error}")
    return tally


def tensor(*shape: int, integers: int | None = None) -> Tensor:
    """A float64 tensor of small integers, so that sums are exact; with `integers`, an int64 tensor below this limit."""
    if integers is not None:
        return torch.randint(0, integers, shape)
    return torch.randint(-4, 5, shape).double()
