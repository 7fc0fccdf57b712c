"""`autoshard::poisson`, `binomial` and `gamma`: random numbers of distributions whose parameters are tensors.

Each element draws numbers until the algorithm accepts one. Each attempt of each element uses Philox blocks of its own,
so attempts of one element do not change another element. Arithmetic is float64. Parameters out of range give NaN.

Poisson and binomial numbers with a mean below 10 are drawn by inversion with sequential search. The other algorithms:

* poisson: transformed rejection (PTRS). Hörmann, "The transformed rejection method for generating Poisson random
  variables" (Insurance: Mathematics and Economics 12, 1993).
* binomial: transformed rejection (BTRS). Hörmann, "The generation of binomial random variates" (J. Statistical
  Computation and Simulation 46, 1993).
* gamma: Marsaglia, Tsang, "A simple method for generating gamma variables" (ACM TOMS 26, 2000).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.library import define
from autoshard.kernels.philox import Words, random_block
from autoshard.kernels.random_numbers import standard_normal, unit

_LARGE_MEAN = 10.0
_MOST_STEPS = 160  # a mean below 10 exceeds this with a probability below 1e-100
_BOOST_BLOCK = 0xFFFFFFFF

Blocks = Callable[[int], Words]
Proposal = Callable[[int], tuple[Tensor, Tensor]]


def poisson_reference(
    rate: Tensor, seed: Tensor, site: int, offset: Sequence[int], global_shape: Sequence[int]
) -> Tensor:
    """Return a Poisson number for each mean in `rate`, in the dtype of `rate`.

    The other arguments are those of `random_reference`.
    """
    blocks = _blocks(rate, seed, site, offset, global_shape)
    mean = rate.to(torch.float64)
    small, large = (mean >= 0) & (mean < _LARGE_MEAN), (mean >= _LARGE_MEAN) & mean.isfinite()
    few = _invert(_uniforms(blocks(0))[0], torch.exp(-mean), lambda k: mean / k, small)
    return _choose((small, few), (large, _transformed_poisson(mean, blocks, large))).to(rate.dtype)


def _transformed_poisson(mean: Tensor, blocks: Blocks, wanted: Tensor) -> Tensor:
    """Return Poisson numbers with the means `mean`, drawn by PTRS (Hörmann), where `wanted` is True, and NaN elsewhere.

    `blocks` maps an attempt's number to random words. Variables have the paper's names.
    """
    b = 0.931 + 2.53 * mean.sqrt()
    a = -0.059 + 0.02483 * b
    inverse_alpha, v_r = 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2.0)

    def propose(attempt: int) -> tuple[Tensor, Tensor]:
        u, v, us = _hat(blocks(attempt))
        k = torch.floor((2.0 * a / us + b) * u + mean + 0.43)
        inside = (k >= 0) & ~((us < 0.013) & (v > us))
        height = torch.log(v * inverse_alpha / (a / (us * us) + b))
        return k, ((us >= 0.07) & (v <= v_r)) | (inside & (height <= k * mean.log() - mean - torch.lgamma(k + 1.0)))

    return _until_accepted(propose, wanted)


def binomial_reference(
    count: Tensor, p: Tensor, seed: Tensor, site: int, offset: Sequence[int], global_shape: Sequence[int]
) -> Tensor:
    """Return the number of successes in `count` trials of probability `p`, for each element, in the dtype of `count`.

    `count` and `p` are shards of global arrays of one shape. The other arguments are those of `random_reference`.
    """
    blocks = _blocks(count, seed, site, offset, global_shape)
    n, p = count.to(torch.float64), p.to(torch.float64)
    q = torch.minimum(p, 1.0 - p)
    valid = (n >= 0) & (q >= 0) & n.isfinite()
    small, large = valid & (n * q < _LARGE_MEAN), valid & (n * q >= _LARGE_MEAN)
    none = torch.exp(n * torch.log1p(-q))
    few = _invert(_uniforms(blocks(0))[0], none, lambda k: (n - k + 1.0) / k * (q / (1.0 - q)), small)
    drawn = _choose((small, few), (large, _transformed_binomial(n, q, blocks, large)))
    return torch.where(p > 0.5, n - drawn, drawn).to(count.dtype)


def _transformed_binomial(n: Tensor, q: Tensor, blocks: Blocks, wanted: Tensor) -> Tensor:
    """Return binomial numbers of `n` trials, drawn by BTRS (Hörmann), where `wanted` is True, and NaN elsewhere.

    `q` has the probabilities of success. `blocks` maps an attempt's number to random words. Variables have the paper's
    names.
    """
    spread = torch.sqrt(n * q * (1.0 - q))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * q
    alpha, v_r, ratio = (2.83 + 5.1 / b) * spread, 0.92 - 4.2 / b, q / (1.0 - q)
    m = torch.floor((n + 1.0) * q)
    top = torch.lgamma(m + 1.0) + torch.lgamma(n - m + 1.0)

    def propose(attempt: int) -> tuple[Tensor, Tensor]:
        u, v, us = _hat(blocks(attempt))
        k = torch.floor((2.0 * a / us + b) * u + n * q + 0.5)
        inside = (k >= 0) & (k <= n)
        height = torch.log(v * alpha / (a / (us * us) + b))
        level = top - torch.lgamma(k + 1.0) - torch.lgamma(n - k + 1.0) + (k - m) * ratio.log()
        return k, inside & (((us >= 0.07) & (v <= v_r)) | (height <= level))

    return _until_accepted(propose, wanted)


def gamma_reference(
    shape: Tensor, seed: Tensor, site: int, offset: Sequence[int], global_shape: Sequence[int]
) -> Tensor:
    """Return a gamma number of rate 1 for each element of `shape`, in the dtype of `shape`.

    `shape` has the shape parameters of the distribution, not the sizes of a tensor. A shape parameter of 0 gives 0. The
    other arguments are those of `random_reference`.
    """
    blocks = _blocks(shape, seed, site, offset, global_shape)
    alpha = shape.to(torch.float64)
    boost = torch.where(alpha < 1.0, (1.0 - _uniforms(blocks(_BOOST_BLOCK))[0]) ** (1.0 / alpha), 1.0)
    d = torch.where(alpha < 1.0, alpha + 1.0, alpha) - 1.0 / 3.0
    c = 1.0 / torch.sqrt(9.0 * d)

    def propose(attempt: int) -> tuple[Tensor, Tensor]:
        x = standard_normal(blocks(2 * attempt))
        u = 1.0 - _uniforms(blocks(2 * attempt + 1))[0]
        v = (1.0 + c * x) ** 3
        return boost * d * v, (v > 0) & (u.log() < 0.5 * x * x + d - d * v + d * v.log())

    valid = (alpha > 0) & alpha.isfinite()
    drawn = _until_accepted(propose, valid).clamp_min(torch.finfo(shape.dtype).tiny)
    return _choose((valid, drawn), (alpha == 0, torch.zeros_like(alpha))).to(shape.dtype)


def _blocks(like: Tensor, seed: Tensor, site: int, offset: Sequence[int], global_shape: Sequence[int]) -> Blocks:
    return lambda block: random_block(like.shape, offset, global_shape, seed, site, block)


def _uniforms(words: Words) -> tuple[Tensor, Tensor]:
    return unit(words[0], words[1]), unit(words[2], words[3])


def _hat(words: Words) -> tuple[Tensor, Tensor, Tensor]:
    """Return the uniform numbers of transformed rejection: U in [-1/2, 1/2), V in [0, 1), and 1/2 - |U|."""
    u, v = _uniforms(words)
    return u - 0.5, v, 0.5 - (u - 0.5).abs()


def _until_accepted(propose: Proposal, wanted: Tensor) -> Tensor:
    """Return the first accepted proposal of each element where `wanted` is True, and NaN elsewhere.

    `propose` maps an attempt's number to two tensors: a proposal for each element, and whether it is accepted.
    """
    result, waiting = torch.full(wanted.shape, torch.nan, dtype=torch.float64, device=wanted.device), wanted
    for attempt in itertools.count():
        if not bool(waiting.any()):
            return result
        value, accepted = propose(attempt)
        result = torch.where(waiting & accepted, value, result)
        waiting = waiting & ~accepted
    raise AssertionError("counting has no end")


def _invert(u: Tensor, none: Tensor, growth: Callable[[int], Tensor], wanted: Tensor) -> Tensor:
    """Return, for each element, the least k whose cumulative probability exceeds `u` in [0, 1).

    `none` is the probability of 0, and `growth(k)` is the probability of k divided by the probability of k - 1. Results
    of elements that are not `wanted` are meaningless.
    """
    k, probability, reached = torch.zeros_like(u), none, none
    for step in range(1, _MOST_STEPS):
        waiting = wanted & (u >= reached)
        if not bool(waiting.any()):
            break
        probability = probability * growth(step)
        k = torch.where(waiting & (probability > 0), float(step), k)
        reached = reached + probability
    return k


def _choose(*cases: tuple[Tensor, Tensor]) -> Tensor:
    """Return, for each element, the value of the case that holds there, or NaN if no case holds.

    A case is a bool tensor, True where the case holds, and a tensor of values.
    """
    result = torch.full_like(cases[0][1], torch.nan)
    for holds, value in cases:
        result = torch.where(holds, value, result)
    return result


def _like_first(parameter: Tensor, *_: Any) -> Tensor:
    return parameter.new_empty(parameter.shape)


def _define(name: str, parameters: Iterable[str], reference: Callable[..., Tensor]) -> torch._ops.OpOverload:
    tensors = ", ".join(f"Tensor {parameter}" for parameter in (*parameters, "seed"))
    schema = f"({tensors}, SymInt site, SymInt[] offset, SymInt[] global_shape) -> Tensor"
    return define(name, schema, lambda *arguments: reference(*arguments).contiguous(), _like_first)


poisson = _define("poisson", ("rate",), poisson_reference)
binomial = _define("binomial", ("count", "p"), binomial_reference)
gamma = _define("gamma", ("shape",), gamma_reference)
