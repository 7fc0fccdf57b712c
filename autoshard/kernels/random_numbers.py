"""`autoshard::random`: an array of random numbers that depend on an element's global index, equal on every mesh.

Each element has its own four words of Philox (`philox.py`). They give two numbers u, v in [0, 1) with 53 bits. Each
distribution is computed from u and v in float64, and rounded to the dtype of the result at the end.

    uniform      low + (high - low) u, with u cut to the bits of the dtype, so that it is never 1
    normal       mean + std sqrt(-2 ln(1 - u)) cos(2 pi v)      Box, Muller 1958
    log_normal   exp of a normal number
    truncated_normal  mean + std sqrt(2) erfinv(p), with p uniform between the erfs of low and high
    exponential  -ln(1 - u) / rate, never 0
    cauchy       median + sigma tan(pi (u - 1/2))
    geometric    1 + floor(ln(1 - u) / ln(1 - p)), the number of trials up to the first success
    bernoulli    1 if u < p
    integer      low + (63 bits mod (high - low))

A new distribution is one more entry of `DISTRIBUTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.library import define
from autoshard.kernels.philox import Words, random_block

Number = bool | int | float

_BITS = 53
_UNIT = 2.0**-_BITS
_LEAST = 2.0 ** -(_BITS + 1)
_MOST_INTEGERS = 2**63
_UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def random_reference(
    seed: Tensor,
    distribution: str,
    parameters: Sequence[Number],
    site: int,
    shape: Sequence[int],
    offset: Sequence[int],
    global_shape: Sequence[int],
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return the random numbers of one shard of a global array.

    Args:
        seed: int64 scalar tensor. The result is on its device.
        distribution: a name in `DISTRIBUTIONS`.
        parameters: the distribution's parameters, in the order of the module's table.
        site: the number of this random operator in the program.
        offset: global index of the shard's first element, one entry per dim.
        global_shape: the shape of the whole array.

    Returns:
        Tensor of `shape`, contiguous.

    Raises:
        KernelError: the distribution is unknown, or its parameters are out of range.

    Example:
        >>> whole = random_reference(torch.tensor(7), "normal", (0, 1), 3, (4,), (0,), (4,), dtype=torch.float32)
        >>> part = random_reference(torch.tensor(7), "normal", (0, 1), 3, (2,), (2,), (4,), dtype=torch.float32)
        >>> torch.equal(whole[2:], part)
        True
    """
    _check(distribution, parameters)
    words = random_block(shape, offset, global_shape, seed, site)
    return DISTRIBUTIONS[distribution].draw(words, *parameters, dtype=dtype).contiguous()


def bits_53(high: Tensor, low: Tensor) -> Tensor:
    """Return int64 numbers in [0, 2^53), each made of a word of `high` and a word of `low`, both of 32 bits."""
    return (high << 21) | (low >> 11)


def unit(high: Tensor, low: Tensor) -> Tensor:
    """Return float64 numbers in [0, 1) with 53 bits, each made of a 32 bit word of `high` and of `low`."""
    return bits_53(high, low).to(torch.float64) * _UNIT


def standard_exponential(words: Words) -> Tensor:
    """Return exponential float64 numbers of rate 1, from the first two words. They are never 0 or infinite."""
    return -torch.log1p(-unit(words[0], words[1]).clamp_min(_LEAST))


def standard_normal(words: Words) -> Tensor:
    """Return normal float64 numbers of mean 0 and variance 1, from all four words."""
    return torch.sqrt(2.0 * standard_exponential(words)) * torch.cos(2.0 * math.pi * unit(words[2], words[3]))


def _uniform(words: Words, low: Number, high: Number, *, dtype: torch.dtype) -> Tensor:
    cut = _BITS - _UNIFORM_BITS.get(dtype, _BITS)
    u = (bits_53(words[0], words[1]) >> cut).to(torch.float64) * 2.0 ** (cut - _BITS)
    drawn = (u * (high - low) + low).to(dtype)
    return torch.where(drawn < high, drawn, low).to(dtype)  # rounding may have reached `high`


def _normal(words: Words, mean: Number, std: Number, *, dtype: torch.dtype) -> Tensor:
    return (standard_normal(words) * std + mean).to(dtype)


def _log_normal(words: Words, mean: Number, std: Number, *, dtype: torch.dtype) -> Tensor:
    return torch.exp(standard_normal(words) * std + mean).to(dtype)


def _truncated_normal(
    words: Words, mean: Number, std: Number, low: Number, high: Number, *, dtype: torch.dtype
) -> Tensor:
    first, last = (math.erf((end - mean) / std / math.sqrt(2.0)) for end in (low, high))
    drawn = torch.erfinv(unit(words[0], words[1]) * (last - first) + first)
    return (drawn * (std * math.sqrt(2.0)) + mean).clamp(low, high).to(dtype)


def _exponential(words: Words, rate: Number, *, dtype: torch.dtype) -> Tensor:
    return (standard_exponential(words) / rate).to(dtype)


def _cauchy(words: Words, median: Number, sigma: Number, *, dtype: torch.dtype) -> Tensor:
    return (median + sigma * torch.tan(math.pi * (unit(words[0], words[1]) - 0.5))).to(dtype)


def _geometric(words: Words, p: Number, *, dtype: torch.dtype) -> Tensor:
    return (1.0 + torch.floor(standard_exponential(words) / -math.log1p(-p))).to(dtype)


def _bernoulli(words: Words, p: Number, *, dtype: torch.dtype) -> Tensor:
    return (unit(words[0], words[1]) < p).to(dtype)


def _integer(words: Words, low: Number, high: Number, *, dtype: torch.dtype) -> Tensor:
    drawn = ((words[0] << 32) | words[1]) & (_MOST_INTEGERS - 1)
    span = int(high) - int(low)
    return ((drawn if span == _MOST_INTEGERS else drawn % span) + int(low)).to(dtype)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of random numbers.

    Args:
        draw: takes the four random words of each element, the distribution's parameters, and the keyword `dtype`.
            Returns the numbers.
        accepts: takes the parameters, and returns whether they are in range.
        range: the condition that `accepts` checks, as text for messages, such as "std >= 0".
    """

    draw: Callable[..., Tensor]
    accepts: Callable[..., bool]
    range: str


DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        "uniform": Distribution(_uniform, lambda low, high: low <= high, "low <= high"),
        "normal": Distribution(_normal, lambda mean, std: std >= 0, "std >= 0"),
        "log_normal": Distribution(_log_normal, lambda mean, std: std > 0, "std > 0"),
        "truncated_normal": Distribution(
            _truncated_normal, lambda mean, std, low, high: std > 0 and low < high, "std > 0 and low < high"
        ),
        "exponential": Distribution(_exponential, lambda rate: rate > 0, "rate > 0"),
        "cauchy": Distribution(_cauchy, lambda median, sigma: sigma > 0, "sigma > 0"),
        "geometric": Distribution(_geometric, lambda p: 0 < p < 1, "0 < p < 1"),
        "bernoulli": Distribution(_bernoulli, lambda p: 0 <= p <= 1, "0 <= p <= 1"),
        "integer": Distribution(
            _integer, lambda low, high: 0 < int(high) - int(low) <= _MOST_INTEGERS, "low < high <= low + 2^63"
        ),
    }
)


def _check(distribution: str, parameters: Sequence[Number]) -> None:
    if distribution not in DISTRIBUTIONS:
        raise KernelError(f"distribution={distribution!r} is unknown. Known: {', '.join(DISTRIBUTIONS)}.")
    found = DISTRIBUTIONS[distribution]
    if not found.accepts(*parameters):
        raise KernelError(f"{distribution} numbers need {found.range}; got {', '.join(map(str, parameters))}.")


def _fake(
    seed: Tensor, distribution: str, parameters: Sequence[Number], site: int, shape: Sequence[int],
    offset: Sequence[int], global_shape: Sequence[int], *, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    _check(distribution, parameters)
    return seed.new_empty(shape, dtype=dtype)


random = define(
    "random",
    "(Tensor seed, str distribution, Scalar[] parameters, SymInt site, SymInt[] shape, SymInt[] offset, "
    "SymInt[] global_shape, *, ScalarType dtype) -> Tensor",
    random_reference,
    _fake,
)
