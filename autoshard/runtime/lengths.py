"""Serve calls of many lengths by a few programs: pad inputs to one of a few lengths, and cut outputs back.

The length is the size of dim 1 of inputs, such as the number of tokens. Inputs are padded to 8, 12, 16, 24, 32, 48 and
so on. Padding must not change any result: attention must be masked or causal, and the loss must leave padded targets
out. `Prove` proves this for each program before it is compiled. A call without a proof is compiled at its own length,
with a warning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.padding import PaddingProof, SizeDifferences
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from autoshard.runtime.executable import Executable
from autoshard.runtime.per_program import PerProgram
from autoshard.runtime.signature import FlatCall

DIM = 1
"""The padded dim of inputs; dim 0 is the batch."""

_SHORTEST = 8
_COMPARED = 2
"""A proof compares calls of this many shorter lengths with the padded call: two neighbours, one of them odd."""


class Prove(Protocol):
    """Searches for a proof that padding changes no result of a call. `passes.padding.prove_padding` implements it."""

    def __call__(
        self,
        trace: Callable[[Request], Program],
        padded: Request,
        exact: Mapping[int, Request],
        length: int,
        fills: Mapping[str, float],
    ) -> PaddingProof:
        """Return the proof; it has a `reason` if padding may change a result.

        Args:
            trace: traces the program of a call.
            padded: the padded call, of length `length`.
            exact: length → the call with inputs of this length, without padding.
            length: the length to which inputs are padded.
            fills: name of a padded input ("input:0") → the value in its padding.
        """
        ...


def padded_length(length: int) -> int:
    """Return the length to which inputs of `length` are padded.

    Example:
        >>> [padded_length(length) for length in (1, 2, 9, 12, 13, 100)]
        [1, 8, 12, 12, 16, 128]
    """
    if length <= 1:  # models often run other code for one token, and an empty input is refused
        return length
    power = max(_SHORTEST, 1 << (length - 1).bit_length())
    middle = 3 * power // 4
    return middle if length <= middle and middle > _SHORTEST else power


def shorter_lengths(padded: int) -> tuple[int, ...]:
    """Return the two shortest lengths that are padded to `padded`; a proof compares their calls with the padded call.

    Example:
        >>> shorter_lengths(8), shorter_lengths(16), shorter_lengths(1)
        ((4, 5), (13, 14), ())
    """
    all_lengths = range(max(2, padded // 2), padded)
    return tuple(length for length in all_lengths if padded_length(length) == padded)[:_COMPARED]


@dataclass(slots=True)
class Lengths:
    """Pads the calls of a module, if a proof shows that padding changes no result.

    Padded calls with equal keys, for example with the same shapes after padding, are of one kind and share a proof.

    Args:
        model: the user's model.
        padding: argument of `forward` → the value in its padding. "input:2" is positional argument 2.
        find_proof: searches for a proof.
    """

    model: nn.Module
    padding: Mapping[str, float]
    find_proof: Prove
    _proofs: PerProgram[PaddingProof | None] = field(default_factory=PerProgram, init=False)
    _known: dict[Hashable, PaddingProof] = field(default_factory=dict, init=False)
    """Kind of padded calls → its last proof."""

    def pad(self, call: FlatCall) -> FlatCall:
        """Return the call with padded inputs. If no input needs padding, return the call itself.

        Raises:
            TraceError: an argument to pad is missing or not a tensor, or the arguments' lengths differ.
        """
        args, kwargs = call.assemble(call.leaves)
        lengths = {name: self._length(name, value) for name, value in self._named(args, kwargs).items()}
        if len(set(lengths.values())) != 1:
            raise TraceError(
                f"dynamic_lengths pads dim {DIM} of {', '.join(self.padding)}, which must have equal lengths, but the "
                f"lengths of this call are {lengths}. Name arguments that the call has and that share one length."
            )
        length = next(iter(lengths.values()))
        more = padded_length(length) - length
        if not more:
            return call
        kwargs = {name: self._pad(name, value, more) for name, value in kwargs.items()}
        args = tuple(self._pad(self._position(i), value, more) for i, value in enumerate(args))
        return replace(FlatCall.of(args, kwargs, call.outputs), exact=call)

    def choose(self, padded: FlatCall, kind: Callable[[FlatCall], Hashable]) -> FlatCall:
        """Return the call to run: `padded`, or the call without padding if no proof was found for calls of its kind.

        A padded call of a new kind is returned too, because its proof has not been searched yet. `kind` returns the key
        of the padded calls that share one proof.
        """
        if padded.exact is None:
            return padded
        proof = self._known.get(kind(padded))
        if proof is None:
            return padded
        return padded.exact if proof.reason else replace(padded, as_compiled=proof.as_compiled)

    def prove(self, trace: Callable[[Request], Program], call: FlatCall, request: Request) -> PaddingProof:
        """Search for a proof that padding changes no result of the padded call `call`, and return it.

        `request` asks for the call's program. `trace` traces calls of the model.
        """
        arguments = call.assemble(range(len(call.leaves)))
        places = {number: name for name, number in self._named(*arguments).items()}
        length = self._length_of(call)
        leaves = pytree.tree_leaves((request.args, dict(request.kwargs)))

        def shortened(exact: int) -> Request:
            cut = [leaf.narrow(DIM, 0, exact) if number in places else leaf for number, leaf in enumerate(leaves)]
            args, kwargs = call.assemble(cut)
            return replace(request, args=args, kwargs=kwargs)

        exact = {each: shortened(each) for each in shorter_lengths(length)}
        fills = {f"input:{number}": self.padding[name] for number, name in places.items()}
        return self.find_proof(trace, request, exact, length, fills)

    def learn(self, kind: Hashable, proof: PaddingProof) -> tuple[str, ...]:
        """Remember the proof for a kind of padded calls. Return a warning to log if the proof has failed, else ()."""
        self._known[kind] = proof
        if not proof.reason:
            return ()
        return (
            f"dynamic_lengths: calls are compiled at their own lengths, as padding may reach results: {proof.reason}. "
            "Pad an attention mask with 0, and targets with a value that the loss leaves out (-100), and take means "
            "over counted elements only; or leave dynamic_lengths out.",
        )

    def keep(self, executable: Executable, proof: PaddingProof | None) -> None:
        """Remember the proof by which a program may run padded calls. With None, it runs calls without padding only."""
        self._proofs.keep(executable, proof)

    def may_run(self, executable: Executable, call: FlatCall) -> bool:
        """Whether a program may run a call: any call without padding, or a padded call if the program has a proof."""
        return call.exact is None or self._proofs.get(executable) is not None

    def cut(self, executable: Executable, outputs: Any, call: FlatCall) -> Any:
        """Return the outputs of a call without padding. If the call was not padded, the outputs stay as they are."""
        if call.exact is None:
            return outputs
        proof, length = self._proofs.get(executable), self._length_of(call.exact)
        assert proof is not None, "a padded call runs a program with a proof"
        leaves, tree = pytree.tree_flatten(outputs)
        for number, differences in proof.cuts.items():
            if differences and number < len(leaves):
                leaves[number] = _cut(leaves[number], differences, length)
        return pytree.tree_unflatten(leaves, tree)

    def _length_of(self, call: FlatCall) -> int:
        return next(iter(self._named(*call.assemble(call.leaves)).values())).shape[DIM]

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {self._position(index): value for index, value in enumerate(args)} | dict(kwargs)
        return {name: given[name] for name in self.padding if given.get(name) is not None}

    def _position(self, index: int) -> str:
        """Return the name of positional argument number `index`: its name in `forward`, or a text such as "input:2".

        The text is used if `padding` has it, or if `forward` has no name for the argument.
        """
        names = list(inspect.signature(self.model.forward).parameters)
        number = f"input:{index}"
        return number if number in self.padding or index >= len(names) else names[index]

    def _length(self, name: str, value: Any) -> int:
        if not isinstance(value, torch.Tensor) or value.dim() <= DIM:
            found = f"shape={tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise TraceError(
                f"dynamic_lengths pads dim {DIM} of {name!r}, a tensor of two dims or more; found {found}."
            )
        return value.shape[DIM]

    def _pad(self, name: str, value: Any, more: int) -> Any:
        if name not in self.padding or value is None:
            return value
        shape = [*value.shape]
        shape[DIM] = more
        return torch.cat([value, value.new_full(shape, self.padding[name])], DIM)


def _cut(value: torch.Tensor, differences: SizeDifferences, length: int) -> torch.Tensor:
    for dim, more in differences.items():
        value = value.narrow(dim, 0, length + more)
    return value
