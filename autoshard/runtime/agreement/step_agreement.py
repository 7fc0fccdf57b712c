"""The agreement of ranks on each call: they run the same program, in the same mode, on the same inputs.

Ranks that went on with other inputs or hyperparameters would compute, without a word, what no device computes. At each
call, before the first collective of its program:

1. Each rank sends `LENGTH` numbers: digests of the call, the program, the hyperparameters and the seed, of the sum of
   the inputs and a bounded sample of them, of which parameters were changed in place since the last call, and of a few
   elements of a few of the parameters and buffers, others each time.
2. While these are under way, the rank gathers what the program takes.
3. Where numbers differ that should not, all ranks tell each other the facts behind them, and raise one error.

Inputs and parameters that are cut are compared among the ranks that hold the same piece. Digests of tensors on an
accelerator are compared one call later, so that nobody waits for the device. The calls after one that was compiled are
compared over the channel on which ranks show life: the first run of a program may compile kernels.
"""

from __future__ import annotations

import copy
import logging
import re
from array import array
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.runtime.agreement.control_group import ControlGroup, Facts, HeldFact
from autoshard.runtime.agreement.digests import combine, digest_of_samples, digest_of_text, hex_of
from autoshard.runtime.agreement.held import WHOLE, copies_of, facts_of, named_tensors, piece_of
from autoshard.runtime.agreement.late_numbers import BEFORE, LateNumbers
from autoshard.runtime.agreement.parameter_watch import SAMPLE, ParameterWatch
from autoshard.runtime.agreement.vector_exchange import LENGTH, Row, VectorExchange
from autoshard.runtime.executable import Executable
from autoshard.runtime.seeds import SeedSequence

_LOGGER = logging.getLogger(__name__)


class Check(Enum):
    """When ranks compare their calls. Whichever it is, they agree when they compile.

    Args:
        ALWAYS: at each call.
        FIRST: at the first call of each program.
        OFF: not at all.
    """

    ALWAYS = "always"
    FIRST = "first"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class AgreedCall:
    """A call, as ranks compare it.

    Args:
        key: what calls that may share a program have in common.
        describe: text of the call, for messages.
        hyperparameters: text of those of the optimizer.
        tensors: the inputs by name; empty where nothing is to run.
    """

    key: Hashable
    describe: Callable[[], str]
    hyperparameters: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Posted:
    """What a rank said about a call.

    Args:
        call: the call.
        state: what is to become of it.
        seed: where the sequence of seeds stands.
        values: digests of samples of tensors.
        numbers: all of it in `LENGTH` numbers.
    """

    call: AgreedCall
    state: str
    seed: str
    values: Mapping[HeldFact, int]
    numbers: tuple[int, ...]


class StepAgreement:
    """What a module's ranks compare at its calls; nothing where one process runs alone.

    Args:
        control: the ranks of the whole run, those of every stage of a pipeline; None where this process runs alone.
        check: when they compare.

    `describe_hyperparameters` gives the text of those of the optimizer, where there is one. A call runs
    within `one_thread`.
    """

    def __init__(self, control: ControlGroup | None, check: Check = Check.ALWAYS) -> None:
        self._control = control if control is not None and len(control.channel.ranks) > 1 else None
        self._check = Check.OFF if self._control is None else check
        self.one_thread = nullcontext() if control is None else control.one_thread
        self.describe_hyperparameters: Callable[[], str] = str
        self._call: AgreedCall | None = None
        self._has_met = False
        self._posted: _Posted | None = None
        self._turn = 0
        self._patience = _PATIENCE
        self._seen: set[int] = set()
        self._late = LateNumbers()
        self._watch = ParameterWatch([], 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepAgreement:
        """Of the same ranks, for the copy of a module; that has no optimizer."""
        result = StepAgreement(self._control, self._check)
        result._seen, result._watch = set(self._seen), copy.deepcopy(self._watch, memo)
        return result

    def __reduce__(self) -> tuple[type[StepAgreement], tuple[ControlGroup | None, Check]]:
        """How to pickle it: nothing is known of calls."""
        return StepAgreement, (self._control, self._check)

    def enter(self, key: Hashable, tensors: Mapping[str, torch.Tensor], describe: Callable[[], str]) -> None:
        """A call begins.

        Args:
            key: what calls that may share a program have in common.
            tensors: the inputs by name; empty where nothing is to run.
            describe: text of the call, for messages.
        """
        if self._check is not Check.OFF:
            self.settle()  # of a call that failed
            self._call = AgreedCall(key, describe, self.describe_hyperparameters(), tensors)
            self._has_met = False

    def meet_for_guards(self, seeds: SeedSequence) -> None:
        """Agree now on the call, once: guards are to be asked, which may gather what they read."""
        if self._check is Check.ALWAYS and not self._has_met and self._call is not None:
            self._has_met = True
            self._post(replace(self._call, tensors={}), "asks guards", seeds.describe())
            self.settle()

    def post(self, executable: Executable | None, seeds: SeedSequence) -> None:
        """Tell the other ranks which program is to run, None for one that must be compiled."""
        if self._check is Check.OFF or self._call is None:
            return
        if executable is None:
            self._post(self._call, _COMPILES, seeds.describe())
            return
        if self._check is Check.ALWAYS or self._is_new(self._call, executable):
            seed = seeds.describe() if executable.draws_seed else "none is drawn"
            self._post(self._call, f"runs program {executable.digest}", seed)

    def _is_new(self, call: AgreedCall, executable: Executable) -> bool:
        """Whether a program was not compared before; now it is."""
        known = _identify(call, executable)
        is_new = known not in self._seen
        self._seen.add(known)
        return is_new

    def _post(self, call: AgreedCall, state: str, seed: str) -> None:
        self._turn += 1
        self._posted = self._measure(call, state, seed)
        if (vectors := self._vectors) is not None:
            vectors.post(self._posted.numbers, partial(_what, call))

    def settle(self) -> None:
        """Wait for what all ranks posted about the present call, if anything.

        Raises:
            RankMismatchError: on every rank, if they disagree.
            LostRankError: on every rank that is left, if one does not come in time.
        """
        posted, self._posted = self._posted, None
        if posted is None:
            return
        rows = self._collect(posted)
        are_alike = _are_alike(rows)
        self._choose_way(is_patient=not are_alike or posted.state == _COMPILES)
        if not are_alike and not self._differ_by_rounding(rows, posted):
            self._ranks.agree(lambda: self._facts(posted), _what(posted.call))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, other ranks see that this one is at work, and hear of its error."""
        if self._control is None:
            yield
            return
        with self._control.working("compiles"):
            yield

    def add(self, executable: Executable, model: nn.Module) -> None:
        """Know the program that was compiled for the present call, and the model's tensors as they lie now."""
        if self._check is not Check.OFF and self._call is not None:
            self._seen.add(_identify(self._call, executable))
            self._watch = ParameterWatch(named_tensors(model), len(self._ranks.channel.ranks))

    @property
    def _ranks(self) -> ControlGroup:
        assert self._control is not None, "one process alone compares nothing"
        return self._control

    @property
    def _vectors(self) -> VectorExchange | None:
        """The fast way, where there is one and no rank may be at work for long."""
        return None if self._patience or self._check is not Check.ALWAYS else self._ranks.vectors

    def _measure(self, call: AgreedCall, state: str, seed: str) -> _Posted:
        digests = _digests_of(call, len(self._ranks.channel.ranks), self._turn)
        values = self._late.read(digests | self._watch.sample(self._turn))
        inputs = {name: value for name, value in values.items() if SAMPLE not in name.name}
        numbers = (
            self._turn,
            _digest_of_key(call.key),
            digest_of_text(f"{state}; {call.hyperparameters}; {seed}"),
            self._watch.changes(),
            combine([value for name, value in inputs.items() if name.place == WHOLE]),
            *_at_their_place({name: value for name, value in inputs.items() if name.place != WHOLE}),
            *_at_their_place({name: value for name, value in values.items() if name not in inputs}),
        )
        return _Posted(call, state, seed, values, numbers)

    def _collect(self, posted: _Posted) -> list[Row]:
        """The numbers of all ranks."""
        if (vectors := self._vectors) is not None:
            return vectors.collect(partial(_what, posted.call))
        said = self._ranks.channel.exchange(array("q", posted.numbers).tobytes(), _what(posted.call))
        return [tuple(array("q", item)) for item in said]

    def _choose_way(self, *, is_patient: bool) -> None:
        """Be patient with the next calls, or go the fast way: it is made while all ranks are here, who choose alike."""
        self._patience = _PATIENCE if is_patient else max(0, self._patience - 1)
        _ = self._vectors

    def _differ_by_rounding(self, rows: Sequence[Row], posted: _Posted) -> bool:
        """Whether only values of parameters differ, and by little: what ranks compute alike may round apart."""
        if not _are_alike([row[:_BEFORE_SAMPLE] for row in rows]):
            return False
        everyone = self._ranks.gather(self._watch.elements(posted.numbers[0]), _what(posted.call))
        if not all(_is_near(one, other) for one, other in combinations(everyone, 2)):
            return False
        _LOGGER.warning("ranks hold values of parameters that differ in their last digits: they are compared no more")
        self._watch.stop_sampling()
        return True

    def _facts(self, posted: _Posted) -> Facts:
        """What the numbers stand for, in words."""
        return {
            "call": f"{posted.call.describe()} ({posted.state})",
            "hyperparameters": posted.call.hyperparameters,
            "torch.initial_seed()": posted.seed,
            **{name: hex_of(value) for name, value in posted.values.items() if name.name.endswith(BEFORE)},
            **facts_of(posted.call.tensors.items()),
            **self._watch.facts(),
        }


_COMPILES = "must be compiled"

_PATIENCE = 2
"""Calls after one that was compiled whose ranks may be at work for long."""

_MOST_BYTES = 16 << 10
"""Bytes of all inputs together whose order is compared at a call."""

_COMMON = 5
"""The first numbers are the same on all ranks."""

_BEFORE_SAMPLE = LENGTH - 2
"""The last two numbers are of a sample of parameters."""

_NEAR = 1e-3


def facts_to_compile(model: nn.Module, signature: str, mesh: Mesh, placed: Collection[str]) -> Facts:
    """What ranks must have in common before they compile: the call, and every element of what the model holds.

    Parameters that were `placed` for an earlier program were compared then.
    """
    known = {f"parameter {name!r}" for name in placed}
    return {
        "mesh": str(mesh),
        "torch version": torch.__version__,
        "torch.initial_seed()": str(torch.initial_seed()),
        "call": signature,
        **facts_of(((name, item) for name, item in named_tensors(model) if name not in known)),
    }


def _is_near(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> bool:
    """Whether elements of equal places differ by less than a thousandth of the largest."""
    return all(
        max(abs(x - y) for x, y in zip(one[place], other[place], strict=True)) <= _NEAR * max(map(abs, one[place]))
        for place in one.keys() & other.keys()
    )


def _are_alike(rows: Sequence[Row]) -> bool:
    """Whether ranks that gave these numbers agree."""
    if len({row[:_COMMON] for row in rows}) > 1:
        return False
    for first in range(_COMMON, len(rows[0]), 2):
        pairs = {row[first : first + 2] for row in rows}
        if len(pairs) > len({place for place, _ in pairs}):
            return False
    return True


def _digests_of(call: AgreedCall, ranks: int, turn: int) -> dict[HeldFact, int | torch.Tensor]:
    """The digest of the inputs at each place: their sum, and a sample, another at each turn where they are large."""
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    for tensor in call.tensors.values():
        if copies_of(tensor, ranks) > 1:
            piece = piece_of(tensor)
            place = str(piece.place) if piece.place else WHOLE
            found.setdefault((piece.local.device.type, place), []).append(piece.local)
    most = max(8, _MOST_BYTES // max(1, len(call.tensors)))
    return {
        HeldFact(f"inputs on {device}", place): digest_of_samples(pieces, most, turn)
        for (device, place), pieces in found.items()
    }


def _at_their_place(values: Mapping[HeldFact, int]) -> tuple[int, int]:
    """One place that stands for those of several values, and one digest of the values."""
    return _digest_of_places(frozenset(name.place for name in values)), combine(list(values.values()))


@lru_cache(256)
def _digest_of_places(places: frozenset[str]) -> int:
    return digest_of_text(str(sorted(places)))


def _what(call: AgreedCall) -> str:
    return f"run the call {call.describe()}"


def _identify(call: AgreedCall, executable: Executable) -> int:
    return digest_of_text(f"{_digest_of_key(call.key)} {executable.digest}")


@lru_cache(256)
def _digest_of_key(key: Hashable) -> int:
    """The same in every process: addresses in texts of objects are left out."""
    return digest_of_text(re.sub(r" at 0x[0-9a-f]+", "", repr(key)))
