"""The agreement of ranks on each call: the same program, in the same mode, on the same inputs.

Before the first collective of its program, each call does the following:

1. Each rank sends `LENGTH` integers: digests of the call, the program, the hyperparameters, the seed and the inputs.
   Further integers are digests of in-place changes of parameters, and of a few elements of the parameters. Each call
   reads other elements.
2. Meanwhile, the rank gathers the inputs of the program.
3. If integers differ that should be equal, ranks exchange facts (the values behind the digests), and raise one error.

Sharded tensors are compared among the ranks that hold the same piece. Digests of tensors on an accelerator are compared
one call later, so that no rank waits for its device. The integers travel over a fast exchange (`VectorExchange`). For a
few calls after a call that compiled, they use the `ControlChannel`, which waits for ranks that work for long.
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
from autoshard.runtime.agreement.control_group import ControlGroup, Facts, PieceFact
from autoshard.runtime.agreement.digests import combine, digest_of_samples, digest_of_text, hex_of
from autoshard.runtime.agreement.late_numbers import BEFORE, LateNumbers
from autoshard.runtime.agreement.parameter_watch import SAMPLE, ParameterWatch
from autoshard.runtime.agreement.pieces import WHOLE, copies_of, facts_of, named_tensors, piece_of
from autoshard.runtime.agreement.vector_exchange import LENGTH, Row, VectorExchange
from autoshard.runtime.executable import Executable
from autoshard.runtime.seeds import SeedSequence

_LOGGER = logging.getLogger(__name__)


class Check(Enum):
    """When ranks compare calls: at each call, at the first call of each program, or never.

    Ranks compare the facts for a compilation in any case.
    """

    ALWAYS = "always"
    FIRST = "first"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class AgreedCall:
    """A call, in the form that ranks compare.

    Args:
        key: a value that is equal for calls that may share a program.
        describe: returns a description of the call, for messages.
        hyperparameters: the optimizer's hyperparameters as text.
        tensors: the inputs by name; empty if no program is run now.
    """

    key: Hashable
    describe: Callable[[], str]
    hyperparameters: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Posted:
    """The values that this rank sent about a call.

    Args:
        call: the call.
        state: whether the call compiles, runs a program or evaluates guards, as text.
        seed: the position in the sequence of seeds, as text.
        values: digests of samples of tensors, by name.
        numbers: the `LENGTH` integers that the rank sent: the turn, and digests of the fields above and of in-place
            changes.
    """

    call: AgreedCall
    state: str
    seed: str
    values: Mapping[PieceFact, int]
    numbers: tuple[int, ...]


class StepAgreement:
    """Compares the calls of a module among its ranks, in all pipeline stages; does nothing if `control` is None.

    Attributes:
        one_thread: the context of a call, which lets one thread at a time call the module.
        describe_hyperparameters: returns the optimizer's hyperparameters as text; `TrainStep` sets this function.
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
        """Return an agreement among the same ranks, for the copy of a module. The copy has no optimizer."""
        result = StepAgreement(self._control, self._check)
        result._seen, result._watch = set(self._seen), copy.deepcopy(self._watch, memo)
        return result

    def __reduce__(self) -> tuple[type[StepAgreement], tuple[ControlGroup | None, Check]]:
        """Pickle the ranks and the option `Check`, without the record of calls."""
        return StepAgreement, (self._control, self._check)

    def enter(self, key: Hashable, tensors: Mapping[str, torch.Tensor], describe: Callable[[], str]) -> None:
        """Begin a call: record its key, its inputs by name, and a function that describes it in messages."""
        if self._check is not Check.OFF:
            self.settle()  # finish a call that failed
            self._call = AgreedCall(key, describe, self.describe_hyperparameters(), tensors)
            self._has_met = False

    def meet_for_guards(self, seeds: SeedSequence) -> None:
        """Compare the call among ranks before this rank evaluates guards, unless this was done for the same call.

        Guards may gather the tensors that they read, so all ranks must evaluate them for the same call.
        """
        if self._check is Check.ALWAYS and not self._has_met and self._call is not None:
            self._has_met = True
            self._post(replace(self._call, tensors={}), "asks guards", seeds.describe())
            self.settle()

    def post(self, executable: Executable | None, seeds: SeedSequence) -> None:
        """Send the other ranks the digests of the present call and its program, as often as the option `Check` says.

        `executable` is None if the program must be compiled first.
        """
        if self._check is Check.OFF or self._call is None:
            return
        if executable is None:
            self._post(self._call, _COMPILES, seeds.describe())
            return
        if self._check is Check.ALWAYS or self._is_new(self._call, executable):
            seed = seeds.describe() if executable.draws_seed else "none is drawn"
            self._post(self._call, f"runs program {executable.digest}", seed)

    def _is_new(self, call: AgreedCall, executable: Executable) -> bool:
        """Record that this call runs this program, and return whether it is the first such call."""
        known = _identify(call, executable)
        is_new = known not in self._seen
        self._seen.add(known)
        return is_new

    def _post(self, call: AgreedCall, state: str, seed: str) -> None:
        self._turn += 1
        self._posted = self._measure(call, state, seed)
        if (vectors := self._vectors) is not None:
            vectors.post(self._posted.numbers, partial(_action, call))

    def settle(self) -> None:
        """Wait for the digests of all ranks for the present call, if this rank has sent its own, and compare them.

        Raises:
            RankMismatchError: ranks disagree; raised on every rank.
            LostRankError: a rank does not send its digests in time.
        """
        posted, self._posted = self._posted, None
        if posted is None:
            return
        rows = self._collect(posted)
        are_alike = _are_alike(rows)
        self._choose_way(is_patient=not are_alike or posted.state == _COMPILES)
        if not are_alike and not self._differ_by_rounding(rows, posted):
            self._ranks.agree(lambda: self._facts(posted), _action(posted.call))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the context, this rank compiles. Other ranks wait for it without time limit, and fail if it fails."""
        if self._control is None:
            yield
            return
        with self._control.working("compiles"):
            yield

    def add(self, executable: Executable, model: nn.Module) -> None:
        """Record the program compiled for the present call, and watch the model's tensors from now on.

        Compiling may have sharded the tensors, so the watch is a new `ParameterWatch`.
        """
        if self._check is not Check.OFF and self._call is not None:
            self._seen.add(_identify(self._call, executable))
            self._watch = ParameterWatch(named_tensors(model), len(self._ranks.channel.ranks))

    @property
    def _ranks(self) -> ControlGroup:
        assert self._control is not None, "one process alone compares nothing"
        return self._control

    @property
    def _vectors(self) -> VectorExchange | None:
        """The fast exchange; None if ranks cannot connect, or if a rank may work for long at this call."""
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
        if (vectors := self._vectors) is not None:
            return vectors.collect(partial(_action, posted.call))
        said = self._ranks.channel.exchange(array("q", posted.numbers).tobytes(), _action(posted.call))
        return [tuple(array("q", item)) for item in said]

    def _choose_way(self, *, is_patient: bool) -> None:
        """Choose how the next calls send their digests: with `is_patient`, `_PATIENCE` calls use the control channel.

        All ranks must pass the same value.
        """
        self._patience = _PATIENCE if is_patient else max(0, self._patience - 1)
        _ = self._vectors

    def _differ_by_rounding(self, rows: Sequence[Row], posted: _Posted) -> bool:
        """Whether ranks differ only in values of parameters and buffers, by no more than rounding.

        Then values are not compared any more, because ranks may round equal computations differently.
        """
        if not _are_alike([row[:_BEFORE_SAMPLE] for row in rows]):
            return False
        everyone = self._ranks.gather(self._watch.elements(posted.numbers[0]), _action(posted.call))
        if not all(_is_near(one, other) for one, other in combinations(everyone, 2)):
            return False
        _LOGGER.warning("ranks hold parameters that differ in their last digits: their values are no longer compared")
        self._watch.stop_sampling()
        return True

    def _facts(self, posted: _Posted) -> Facts:
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
"""The number of calls, after a call that compiled, that use the control channel, because ranks may work for long."""

_MOST_BYTES = 16 << 10
"""About the most bytes, of all inputs together, that are sampled at a call."""

_COMMON = 5
"""The number of a rank's first integers that must be equal on all ranks."""

_BEFORE_SAMPLE = LENGTH - 2
"""The number of a rank's integers before the last two, which are about sampled parameters and buffers."""

_NEAR = 1e-3


def facts_to_compile(model: nn.Module, signature: str, mesh: Mesh, placed: Collection[str]) -> Facts:
    """Return the facts that must be equal on all ranks before they compile: the call, and every element of the model.

    `signature` is the call as text. `placed` has the names of parameters that an earlier program sharded. They were
    compared then, and are left out.
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
    """Whether the elements of two ranks differ by at most a thousandth of the largest element, in each tensor group."""
    return all(
        max(abs(x - y) for x, y in zip(one[place], other[place], strict=True)) <= _NEAR * max(map(abs, one[place]))
        for place in one.keys() & other.keys()
    )


def _are_alike(rows: Sequence[Row]) -> bool:
    """Whether the ranks that sent these rows of integers agree.

    The first `_COMMON` integers must be equal. Then come pairs: a digest of the places of pieces, and a digest of their
    values. Ranks whose first integer of a pair is equal must have the same second integer.
    """
    if len({row[:_COMMON] for row in rows}) > 1:
        return False
    for first in range(_COMMON, len(rows[0]), 2):
        pairs = {row[first : first + 2] for row in rows}
        if len(pairs) > len({place for place, _ in pairs}):
            return False
    return True


def _digests_of(call: AgreedCall, ranks: int, turn: int) -> dict[PieceFact, torch.Tensor]:
    """Return digests of the inputs of which other ranks hold the same piece, one for each device type and place.

    The key's name has the device type. A digest covers small inputs whole. For a large input, it covers the sum of its
    words and a sample of its words, other words at each `turn`.
    """
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    for tensor in call.tensors.values():
        if copies_of(tensor, ranks) > 1:
            piece = piece_of(tensor)
            place = str(piece.shard_coordinates) if piece.shard_coordinates else WHOLE
            found.setdefault((piece.local.device.type, place), []).append(piece.local)
    most = max(8, _MOST_BYTES // max(1, len(call.tensors)))
    return {
        PieceFact(f"inputs on {device}", place): digest_of_samples(pieces, most, turn)
        for (device, place), pieces in found.items()
    }


def _at_their_place(values: Mapping[PieceFact, int]) -> tuple[int, int]:
    """Return a digest of the set of places among the keys, and a digest of the values."""
    return _digest_of_places(frozenset(name.place for name in values)), combine(list(values.values()))


@lru_cache(256)
def _digest_of_places(places: frozenset[str]) -> int:
    return digest_of_text(str(sorted(places)))


def _action(call: AgreedCall) -> str:
    return f"run the call {call.describe()}"


def _identify(call: AgreedCall, executable: Executable) -> int:
    return digest_of_text(f"{_digest_of_key(call.key)} {executable.digest}")


@lru_cache(256)
def _digest_of_key(key: Hashable) -> int:
    """Return a digest of a key's text. Memory addresses are left out, so the digest is the same in every process."""
    return digest_of_text(re.sub(r" at 0x[0-9a-f]+", "", repr(key)))
