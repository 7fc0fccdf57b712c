"""Raises `TraceError` if a model's results depend on numbers from Python's `random` or NumPy, drawn in `forward`.

The numbers may come from a global generator, or from a generator of the model's own (`own_generators`). A trace would
freeze these numbers. If a trace has changed a generator's state, the call is traced three times more. The generators
then draw only their smallest number, only their largest number, or only a number between. If all traces give one
program, the numbers do not matter (a layer drop of probability 0). Otherwise the error is raised.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.program import Program
from autoshard.tracing.own_generators import OwnGenerators
from autoshard.tracing.provenance import user_line
from autoshard.tracing.replaced import replaced

_TRIED = ((0.0, 0), (1.0 - 2.0**-24, 2**32 - 1), (0.5, 0x7FFF0001))
"""Pairs of a number in [0, 1), and 32 bits, that the generators draw instead of their own.

NumPy makes integers of the last bits. For some ranges of integers, it rejects bits that are all 1, but it accepts the
bits of the last pair.
"""

_WORDS, _FORCED = 624, 512
"""Words of a Mersenne Twister's state, and how many of them are forced. The rest ends loops that reject numbers."""


def host_generators() -> Sequence[Any]:
    """Return the states of the global generators of Python and NumPy, to compare them with later states."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)]


def refuse_host_numbers(
    model: nn.Module, before: Sequence[Any], own: OwnGenerators, program: Program, trace_again: Callable[[], Program]
) -> None:
    """Raise `TraceError` if `forward` drew random numbers outside torch, and the program depends on these numbers.

    Call it right after a trace. It traces again with other numbers, and compares the programs. The message names the
    generator and the line that draws.

    Args:
        model: the traced model.
        before: the result of `host_generators` before the trace.
        own: the generators of the model's own. It noted their draws during the trace (`OwnGenerators.watching`).
        program: the traced program.
        trace_again: traces the same call, and returns its program.
    """
    names = ("Python's random", "numpy.random")
    moved = [name for name, old, new in zip(names, before, host_generators(), strict=True) if old != new]
    moved += ["a generator of its own"] if own.have_drawn else []
    if not moved:
        return
    lines: list[str] = []
    for number, bits in _TRIED:
        words = [*[_untempered(bits)] * _FORCED, *range(1, _WORDS - _FORCED + 1)]
        with _giving(number, lines), _drawing(bits), _choosing(number), own.drawing(words, lines):
            other = trace_again()
        if other.digest() != program.digest():
            where = f" ({lines[0]})" if lines else ""
            raise TraceError(
                f"{type(model).__name__} computes with numbers that it draws from {' and '.join(moved)} in "
                f"forward{where}: every step would compute with the numbers of the first step. Draw with torch "
                "(torch.rand), or outside the model and pass them as a tensor, or switch it off (layerdrop=0.0, say)."
            )


def _giving(number: float, lines: list[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which Python's and NumPy's generators return `number`, in [0, 1), as each uniform draw.

    The user's lines that draw are added to `lines`.
    """

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            lines.append(user_line(sys._getframe(1)))
            return function(*args, **kwargs)

        return draw

    def filled(size: Any = None) -> Any:
        return number if size is None else np.full(size, number)

    instead: dict[tuple[Any, str], Callable[..., Any]] = {
        (random, "random"): lambda: number,
        (random, "uniform"): lambda a, b: a + (b - a) * number,
        (np.random, "random"): filled,
        (np.random, "random_sample"): filled,
        (np.random, "rand"): lambda *size: filled(size or None),
        (np.random, "uniform"): lambda low=0.0, high=1.0, size=None: low + (high - low) * filled(size),
    }
    for place in _OTHERS:
        instead[place] = getattr(*place)
    return replaced({place: noting(function) for place, function in instead.items()})


_OTHERS = (
    *((random, name) for name in ("randint", "randrange", "choice", "choices", "sample", "shuffle", "gauss")),
    *((np.random, name) for name in ("randint", "choice", "permutation", "shuffle", "randn", "normal", "binomial")),
)
"""Further functions whose calls `_giving` notes. They draw from the generators' states."""


@contextlib.contextmanager
def _drawing(bits: int) -> Iterator[None]:
    """Within the context, the next 512 draws of 32 bits from Python's and from NumPy's generator are `bits`.

    So all functions of the generators draw numbers made of them, by whatever name a model calls the functions. At
    exit, the generators get their states back.
    """
    python, numpy = random.getstate(), cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    forced = [_untempered(bits)] * _FORCED
    random.setstate((python[0], (*forced, *python[1][_FORCED:_WORDS], 0), None))
    np.random.set_state((numpy[0], np.array([*forced, *numpy[1][_FORCED:]], dtype=np.uint32), 0, 0, 0.0))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _choosing(number: float) -> contextlib.AbstractContextManager[None]:
    """Return a context in which Python's generator draws `int(number * n)` as each integer in [0, n)."""
    return replaced({(random._inst, "_randbelow"): lambda n: int(number * n)})  # type: ignore[attr-defined]


def _untempered(bits: int) -> int:
    """Return the word of a Mersenne Twister's state from which it draws `bits` (Matsumoto, Nishimura 1998, table 2)."""
    bits ^= bits >> 18
    bits ^= bits << 15 & 0xEFC60000
    word = bits
    for _ in range(4):
        word = bits ^ (word << 7 & 0x9D2C5680)
    bits = word
    for _ in range(2):
        word = bits ^ word >> 11
    return word
