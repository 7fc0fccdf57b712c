"""Replaces random operators of PyTorch by the counter-based generator `autoshard::random` while a model is traced.

    torch.randn(4, 8), x.normal_(), F.gumbel_softmax, drop-path, ...   ->   autoshard.random(seed, "normal", ...)

A dispatch mode sees each operator below autograd, so derivatives stay PyTorch's own; those of drawn numbers are zero.
Each random operator has a number in the program (its *site*) and a seed that is an input of the program. Other random
operators combine numbers of `autoshard::random` by ordinary operators. A permutation sorts random keys. Categories
without replacement are those with the largest p / exponential (Efraimidis, Spirakis 2006). Categories with replacement
are those at which the cumulated p exceeds a uniform number.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.errors import TraceError
from autoshard.tracing.provenance import user_line
from autoshard.tracing.replaced import replaced
from autoshard.tracing.spans import drawing_spans

_aten, _ours = torch.ops.aten, torch.ops.autoshard
_RANDOM = torch.Tag.nondeterministic_seeded
_IMMATERIAL = ("layout", "pin_memory", "out")


@dataclass(slots=True)
class RandomSites:
    """A program's seed, and the number of the program's next random operator."""

    seed: Tensor
    next_site: int = 0

    def take(self) -> int:
        """Return the number of the next random operator, and increase `next_site` by one."""
        self.next_site += 1
        return self.next_site - 1


SITES: contextvars.ContextVar[RandomSites] = contextvars.ContextVar("autoshard_random_sites")


@contextlib.contextmanager
def number_random_operators(seed: Tensor) -> Iterator[None]:
    """Within the context, torch's random operators draw by the counter-based generator, and are numbered from 0.

    `seed` is the input of the program that seeds the generator.
    """
    token = SITES.set(RandomSites(seed))
    try:
        with _CounterBased(), drawing_spans(seed.device):
            yield
    finally:
        SITES.reset(token)


def refusing_seeds() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `TraceError` is raised if the model seeds PyTorch's generator.

    A model that seeds the generator draws equal numbers in every call, and its program would draw different numbers.
    """

    def refuse(*_: Any) -> None:
        where = user_line(sys._getframe(1))
        raise TraceError(
            f"The model seeds PyTorch's generator in forward{f' at {where}' if where else ''}. Seed it outside (torch."
            "manual_seed before the call); where every call is to use the same numbers, make them a buffer."
        )

    places = [(module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed")]
    return replaced(dict.fromkeys(places, refuse))


def is_random(node: fx.Node) -> bool:
    """Whether a node calls an operator that draws random numbers. Attention without dropout does not draw."""
    target: Any = node.target
    if _RANDOM not in target.tags:
        return False
    return _by_name(target, node.args, node.kwargs).get("dropout_p") != 0.0


class _CounterBased(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draw = _DRAWS.get(func._schema.name.removeprefix("aten::").rstrip("_")) if _RANDOM in func.tags else None
        if draw is None:
            return func(*args, **kwargs)
        given = _by_name(func, args, kwargs)
        refuse_generator(func, given.pop("generator", None))
        drawn = draw(**given)
        written = given["self"] if func._schema.name.endswith("_") else kwargs.get("out")
        return drawn if written is None else written.copy_(drawn)


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that affect its numbers, by name.

    Defaults are included, except a default dtype.
    """
    found: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _IMMATERIAL:
            continue
        if position < len(args):
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value() and argument.name != "dtype":
            found[argument.name] = argument.default_value
    return found


def refuse_generator(func: Any, generator: Any) -> None:
    """Raise `TraceError` if `generator`, an argument of a call of `func`, is not torch's default generator."""
    default: Any = torch.default_generator
    if generator is None or generator._cdata == default._cdata:
        return
    where = user_line(sys._getframe(1))
    raise TraceError(
        f"The model calls {func}{f' at {where}' if where else ''} with generator={generator!r}, whose state is no part "
        f"of a program. Leave generator= out: the numbers then follow torch.manual_seed and do not depend on the mesh. "
        f"Or draw them outside the model and pass them in as an input."
    )


def _draw(
    distribution: str, parameters: Sequence[Any], size: Sequence[int], dtype: torch.dtype, device: Any = None
) -> Tensor:
    sites = SITES.get()
    shape = list(size)
    drawn = _ours.random(
        sites.seed, distribution, list(parameters), sites.take(), shape, [0] * len(shape), shape, dtype=dtype
    )
    return drawn if device is None or torch.device(device) == drawn.device else drawn.to(device)


def draw_numbers(
    distribution: str, parameters: Sequence[Any], size: Sequence[int], dtype: torch.dtype, device: Any
) -> Tensor:
    """Draw numbers of a shape by the counter-based generator, within `number_random_operators`.

    `distribution` is a name such as "normal", and `parameters` are its parameters, such as mean and deviation. A
    complex number consists of two drawn numbers.
    """
    if not dtype.is_complex:
        return _draw(distribution, parameters, size, dtype, device)
    return torch.view_as_complex(_draw(distribution, parameters, (*size, 2), dtype.to_real(), device))


def _rand(size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return draw_numbers("uniform", (0.0, 1.0), size, dtype or torch.get_default_dtype(), device or "cpu")


def _randn(
    size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    part = std / math.sqrt(2.0) if dtype.is_complex else std
    return draw_numbers("normal", (mean, part), size, dtype, device or "cpu")


def _randint(
    high: int, size: Sequence[int], low: int = 0, dtype: torch.dtype | None = None, device: Any = None
) -> Tensor:
    return _draw("integer", (low, high), size, dtype or torch.int64, device or "cpu")


def _randperm(n: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    keys = _draw("integer", (0, 2**63), (n,), torch.int64, device or "cpu")
    return _aten.sort.stable(keys, stable=True)[1].to(dtype or torch.int64)


def _rand_like(self: Tensor, **options: Any) -> Tensor:
    return _like(self, lambda **same: _rand(self.shape, **same), **options)


def _randn_like(self: Tensor, **options: Any) -> Tensor:
    return _like(self, lambda **same: _randn(self.shape, **same), **options)


def _randint_like(self: Tensor, high: int | Tensor, low: int = 0, **options: Any) -> Tensor:
    if not isinstance(high, Tensor):
        return _like(self, lambda **same: _randint(high, self.shape, low, **same), **options)
    return _like(self, lambda **same: _below(high, self.shape, **same), **options)


def _below(high: Tensor, size: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    return (_draw("integer", (0, 2**63), size, torch.int64, device) % high).to(dtype)


def _like(
    self: Tensor, draw: Callable[..., Tensor], dtype: torch.dtype | None = None, device: Any = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    """Return the numbers of `draw`, laid out with the strides that `torch.empty_like(self)` has."""
    drawn = draw(dtype=dtype or self.dtype, device=device or self.device)
    empty = torch.empty_like(drawn, memory_format=torch.contiguous_format)
    laid = torch.empty_like(self, memory_format=memory_format or torch.preserve_format)
    if laid.stride() == empty.stride():
        return drawn
    return torch.empty_strided(laid.shape, laid.stride(), dtype=drawn.dtype, device=drawn.device).copy_(drawn)


def _filled(distribution: str) -> Callable[..., Tensor]:
    """Return the replacement of an operator such as `uniform_`.

    The replacement takes a tensor, and the distribution's parameters.
    """

    def draw(self: Tensor, **parameters: Any) -> Tensor:
        return draw_numbers(distribution, list(parameters.values()), self.shape, self.dtype, self.device)

    return draw


def _random(self: Tensor, to: int | None = None, **bounds: int | None) -> Tensor:
    """Draw integers from `from` to `to` - 1, in the shape of `self`. Without `to`, the last is `_largest` of the dtype.

    `from` is a Python keyword, so it is in `bounds`.
    """
    low = bounds.get("from") or 0
    if to is None:
        to = 2 if self.dtype == torch.bool else _largest(self.dtype) + 1
    return _draw("integer", (low, to), self.shape, self.dtype, self.device)


def _largest(dtype: torch.dtype) -> int:
    """Return the largest n for which a dtype represents all integers up to n."""
    return round(2.0 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _normal(
    self: Tensor | None = None, mean: Any = 0.0, std: Any = 1.0, size: Sequence[int] = (),
    dtype: torch.dtype | None = None, device: Any = None,
) -> Tensor:  # fmt: skip
    """Draw normal numbers in the shape of `self`, in shape `size`, or in the shape of the tensors `mean` and `std`."""
    if self is not None:
        return _randn(self.shape, self.dtype, self.device, mean, std)
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not given:
        return _randn(size, dtype, device, mean, std)
    shape = torch.broadcast_shapes(*(value.shape for value in given))
    return _randn(shape, given[0].dtype, given[0].device) * std + mean


def _bernoulli(self: Tensor, p: float | Tensor | None = None) -> Tensor:
    if isinstance(p, (int, float)):
        return _draw("bernoulli", (p,), self.shape, self.dtype, self.device)
    probability = self if p is None else p
    kind = torch.float64 if probability.dtype == torch.float64 else torch.float32
    return (_draw("uniform", (0.0, 1.0), self.shape, kind, self.device) < probability).to(self.dtype)


def _multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    kind = torch.float64 if self.dtype == torch.float64 else torch.float32
    if replacement and num_samples > 1:
        cumulated = self.to(torch.float64).cumsum(-1)
        place = _draw("uniform", (0.0, 1.0), (*self.shape[:-1], num_samples), torch.float64, self.device)
        return torch.searchsorted(cumulated, place * cumulated[..., -1:], right=True)
    keys = self.to(kind) / _draw("exponential", (1.0,), self.shape, kind, self.device)
    return keys.argmax(-1, keepdim=True) if num_samples == 1 else keys.topk(num_samples, -1)[1]


def _native_dropout(input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    if train is False:  # None stands for training
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    kept = _draw("bernoulli", (1.0 - p,), input.shape, torch.bool, input.device)
    return input * kept * (0.0 if p >= 1.0 else 1.0 / (1.0 - p)), kept


def _rrelu_with_noise(
    self: Tensor, noise: Tensor, lower: float = 1.0 / 8.0, upper: float = 1.0 / 3.0, training: bool = False
) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2.0)
    slopes = _draw("uniform", (lower, upper), self.shape, self.dtype, self.device)
    noise.copy_(torch.where(self <= 0, slopes, 1.0))
    return self * noise


def _of_parameters(operator: Any) -> Callable[..., Tensor]:
    """Return the replacement of a random operator whose parameters are tensors. It draws by `operator`."""

    def draw(**parameters: Tensor) -> Tensor:
        sites = SITES.get()
        given = [value.contiguous() for value in torch.broadcast_tensors(*parameters.values())]
        shape = list(given[0].shape)
        return operator(*given, sites.seed, sites.take(), [0] * len(shape), shape)

    return draw


_gamma = _of_parameters(_ours.gamma)


def _dirichlet(self: Tensor) -> Tensor:
    drawn = _gamma(self=self)
    return drawn / drawn.sum(-1, keepdim=True)


_DRAWS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "rand": _rand, "rand_like": _rand_like, "randn": _randn, "randn_like": _randn_like,
        "randint": _randint, "randint_like": _randint_like, "randperm": _randperm, "random": _random,
        "uniform": _filled("uniform"), "exponential": _filled("exponential"),
        "log_normal": _filled("log_normal"), "cauchy": _filled("cauchy"),
        "geometric": _filled("geometric"), "normal": _normal, "normal_functional": _normal,
        "bernoulli": _bernoulli, "multinomial": _multinomial, "native_dropout": _native_dropout,
        "rrelu_with_noise": _rrelu_with_noise, "poisson": _of_parameters(_ours.poisson),
        "binomial": _of_parameters(_ours.binomial), "_standard_gamma": _gamma, "_sample_dirichlet": _dirichlet,
    }
)  # fmt: skip
"""Name of a PyTorch operator, without the underscore of an in-place variant → the function that replaces it."""

RANDOM_OPERATORS = frozenset(_DRAWS)
"""Names of PyTorch's operators that draw by the counter-based generator."""
