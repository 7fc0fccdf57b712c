"""Count the FLOPs and bytes of a plan's step as expressions in sizes, from its lowered program at a few sizes.

1. Trace the program at a few sizes of the inputs, and fit each dim of its values (`fit_sizes`).
2. Lower the plan at its own sizes. Lower it again with each input size and each mesh axis changed alone, and with all
   of them changed. Reshards always take the steps that they take at the plan's own sizes.
3. Read the parts of a quantity off these lowered programs (`lowered_parts`). A part depends on dims on a rank, which
   are numbers in each program. Find an expression for each dim that agrees with all programs. It is the dim of the
   value's spec, if the part has a spec, or else a global dim that is divided by mesh axes.
4. Count the parts with these expressions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, combinations
from typing import Any

import sympy

from autoshard.errors import FormulaError, PlanMismatchError
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, may_be_tokens
from autoshard.ir.reshard import ReshardStep, StepCost
from autoshard.ir.spec import PartitionSpec
from cost_models.formulas import Point, Size, ceil_div, size_symbol, value_at
from passes.lowering.lower import Lower
from passes.lowering.split_phases import SplitPhases
from passes.questions.fit_sizes import DoesNotRunError
from passes.questions.fitted_program import FittedProgram, Shape, line_of
from passes.questions.lowered_parts import CountedPart, Read, contracts, flops_of, sent_at_cuts
from passes.questions.totals import Counted
from passes.recomputation.recompute import original_of
from passes.strategies.enumerate_strategies import operands_of, resolve

_At = Mapping[sympy.Symbol, int]
"""The value of each symbol in one of the lowered programs."""


@dataclass
class PlanCounts:
    """The counts of one plan without stages, or of one stage. The methods yield pairs (block or None, count).

    Args:
        fitted: the prepared program that the plan is for, with fitted shapes.
        axes: mesh axis → its size, a symbol or a number.
        step_cost: function from a reshard step to its price on the plan's own mesh, by which the steps of reshards are
            chosen.
    """

    fitted: FittedProgram
    plan: Plan
    axes: Mapping[str, Size]
    step_cost: StepCost
    _programs: list[tuple[_At, PhasedProgram]] = field(default_factory=list)
    _lowered: dict[object, PhasedProgram] = field(default_factory=dict)
    _steps: dict[Any, tuple[ReshardStep, ...]] = field(default_factory=dict)
    _dims: dict[object, Size | None] = field(default_factory=dict)
    _shares: dict[Shape, list[Size]] = field(default_factory=dict)
    _evaluated: dict[Size, Sequence[int]] = field(default_factory=dict)

    def blocks(self) -> Iterator[Counted]:
        """Yield a count of zero for each block, because a sum over blocks must see blocks without other counts."""
        for place in dict.fromkeys(self.fitted.places.values()):
            yield place, 0

    def step_flops(self) -> Iterator[Counted]:
        """Yield the FLOPs of each matrix product and attention call, on global shapes.

        Recomputed calls are not counted again.
        """
        for node in self.fitted.program.graph.nodes:
            if node.op == "call_function" and original_of(node) is None and contracts(node):
                dims = [dim for shape in self._shapes(node.name) for dim in shape]
                yield self.fitted.places.get(node.name), flops_of(node, dims)

    def parameters(self) -> Iterator[Counted]:
        """Yield the number of elements of each parameter on global shapes."""
        for slot in self.fitted.program.inputs_of(InputKind.PARAMETER):
            yield self.fitted.places.get(slot.node), math.prod(self.fitted.shapes[slot.node][0])

    def tokens(self) -> Iterator[Counted]:
        """Yield the number of elements of the first integer input, or nothing if there is no integer input."""
        nodes = self.fitted.program.nodes_by_name()
        for slot in self.fitted.program.inputs_of(InputKind.INPUT):
            value = nodes[slot.node].meta["val"]
            if may_be_tokens(value.shape, value.dtype):
                yield None, math.prod(self.fitted.shapes[slot.node][0])
                return

    def crossing_bytes(self, sends: Mapping[str, int]) -> Iterator[Counted]:
        """Yield the bytes that the stage sends to other stages, one count for each value.

        `sends` has the number of times that a value is sent, by the value's name.
        """
        for _, size in self.local(lambda phased, axes: sent_at_cuts(phased, sends)):
            yield None, size  # at a cut, however many blocks there are

    def local(self, read: Read) -> Iterator[Counted]:
        """Yield the counts of a quantity of one rank, from the parts that `read` finds in the lowered programs.

        Raises:
            FormulaError: a part exists at some sizes only, or one of its dims is no global dim divided by mesh axes.
        """
        found = [(at, _by_site(read(phased, self.axes))) for at, phased in self._lowered_at_all_sizes()]
        (base, first), *others = found
        for site, parts in first.items():
            labels = [part.label for part in parts]
            alike = [n for n, (_, each) in enumerate(found) if [part.label for part in each.get(site, ())] == labels]
            missed = {str(s) for at, _ in others for s in base if at[s] != base[s]}
            missed -= {str(s) for n in alike for s in base if found[n][0][s] != base[s]}
            if missed:
                raise FormulaError(
                    f"{labels[0]} ({self._line(site)}) is not the same at all sizes, so it is no formula; hold them "
                    f"fixed: formula(..., fixed={tuple(sorted(missed))!r})."
                )
            for index, part in enumerate(parts):
                seen = {n: found[n][1][site][index].dims for n in alike}
                yield self.fitted.places.get(site), part.count(self._dims_of(site, seen, part))

    # Lowered programs.

    def _lowered_at_all_sizes(self) -> list[tuple[_At, PhasedProgram]]:
        """Return the lowered programs of step 2 of the module's docstring, each with the values of all symbols.

        The first program has the plan's own sizes. But axes of size one are larger in all programs, because one rank
        has no collectives.

        Raises:
            FormulaError: the plan runs no other size of an input.
        """
        if not self._programs:
            sizes, mesh = self.fitted.sizes, self.plan.mesh
            own = tuple(size.value for size in sizes)
            self._lower(own, mesh)  # first, because later reshards take the same steps
            free = [axis for axis in mesh.axis_names if isinstance(self.axes[axis], sympy.Symbol)]
            alone = [axis for axis in free if mesh.axis_size(axis) == 1]
            if alone:  # collectives have nodes where there are two ranks
                _, mesh = self._first((own, each) for each in _resized(mesh, alone)) or (own, mesh)
            changed = []
            for place, size in enumerate(sizes):
                values = (size.trials[1], *(factor * size.value for factor in (2, 3, 4)))
                found = self._first(((*own[:place], value, *own[place + 1 :]), mesh) for value in values)
                if found is None:
                    raise FormulaError(
                        f"The plan runs no other size {size.name} of the inputs on {mesh}, so there is no formula in "
                        f"it; hold it fixed: formula(..., fixed=({size.name!r},))."
                    )
                changed.append(found)
            every = tuple(point[place] for place, (point, _) in enumerate(changed))
            large = [tuple(factor * value for value in own) for factor in (2, 4)]  # more ranks need more of each input
            of_axes = [
                self._first((point, each) for point in (own, every, *large) for each in _resized(mesh, [axis]))
                for axis in free
            ]
            of_all = self._first((point, each) for point in (every, *large) for each in _resized(mesh, free))
            for point, each in filter(None, ((own, mesh), *changed, *of_axes, of_all)):
                at: Any = {size_symbol(size.name): value for size, value in zip(sizes, point, strict=True)}
                at |= {self.axes[axis]: each.axis_size(axis) for axis in free}
                self._programs.append((at, self._lower(point, each)))
        return self._programs

    def _first(self, tried: Iterator[tuple[Point, Mesh]]) -> tuple[Point, Mesh] | None:
        for point, mesh in tried:
            try:
                self._lower(point, mesh)
            except (PlanMismatchError, DoesNotRunError):
                continue
            return point, mesh
        return None

    def _lower(self, point: Point, mesh: Mesh) -> PhasedProgram:
        if (point, mesh) not in self._lowered:
            program = self.fitted.at(point)
            moved = replace(self.plan, mesh=mesh, program_digest=program.digest())
            self._lowered[point, mesh] = SplitPhases()(Lower(moved, self.step_cost, self._steps)(program))
        return self._lowered[point, mesh]

    # Local sizes.

    def _dims_of(self, site: str, seen: Mapping[int, tuple[int, ...]], part: CountedPart) -> Sequence[Size]:
        """Return an expression for each dim of a part.

        `seen` has the dims of the part in lowered programs, by the index of the program. If the part has a spec that
        agrees with `seen`, the result is the shape of the site's value on a rank. Otherwise each dim is matched alone
        (`_dim`).
        """
        if part.spec is not None:
            shape = self._local(self.fitted.shapes[site][0], part.spec)
            if all([self._values(dim)[n] for dim in shape] == list(dims) for n, dims in seen.items()):
                return shape
        columns = zip(*seen.values(), strict=True)
        return [self._dim(site, dict(zip(seen, column, strict=True)), part.label) for column in columns]

    def _local(self, shape: Shape, spec: PartitionSpec) -> Shape:
        return tuple(self._share(dim, [self.axes[axis] for axis in spec.axes_of(n)]) for n, dim in enumerate(shape))

    def _share(self, dim: Size, axes: Sequence[Size]) -> Size:
        pieces = math.prod(axes)
        return dim if pieces == 1 else ceil_div(dim, pieces)

    def _values(self, size: Size) -> Sequence[int]:
        if size not in self._evaluated:
            self._evaluated[size] = [int(value_at(size, at)) for at, _ in self._programs]
        return self._evaluated[size]

    def _dim(self, site: str, sizes: Mapping[int, int], label: str) -> Size:
        """Return an expression for one dim of a part.

        The expression is a global dim, divided by sizes of mesh axes. If possible, it is a dim of the site's own
        values. `sizes` has the dim in lowered programs, by the index of the program.

        Raises:
            FormulaError: no global dim and no share of one has these sizes.
        """
        own = tuple(dict.fromkeys(dim for shape in self._shapes(site) for dim in shape))
        key = (own, tuple(sizes.items()))
        if key not in self._dims:
            all_dims = dict.fromkeys(dim for shapes in self.fitted.shapes.values() for shape in shapes for dim in shape)
            number = next(iter(sizes.values()))
            shares = chain(self._shares_of(own), [sympy.Integer(number)], self._shares_of(tuple(all_dims)))
            fitting = (share for share in shares if all(self._values(share)[n] == size for n, size in sizes.items()))
            self._dims[key] = next(fitting, None)
        found = self._dims[key]
        if found is None:
            names = tuple(sorted(str(symbol) for symbol in self._programs[0][0]))
            raise FormulaError(
                f"{label} ({self._line(site)}) has a size that is no share of one of the model's, so it is no formula "
                f"in all sizes. Hold some fixed: formula(..., fixed={names!r})."
            )
        return found

    def _shares_of(self, dims: tuple[Size, ...]) -> list[Size]:
        """Return each dim divided by the sizes of each subset of mesh axes, and then the sizes of the axes."""
        if dims not in self._shares:
            axes = list(self.axes.values())
            subsets = [each for count in range(len(axes) + 1) for each in combinations(axes, count)]
            self._shares[dims] = list(
                dict.fromkeys([*(self._share(dim, each) for dim in dims for each in subsets), *axes])
            )
        return self._shares[dims]

    def _shapes(self, site: str) -> list[tuple[Size, ...]]:
        """Return the global shapes of a node's operands, then of its results."""
        tails = map(resolve, operands_of(self.fitted.program.nodes_by_name()[site]))
        return [*(self.fitted.shapes[tail.name][index] for tail, index in tails), *self.fitted.shapes[site]]

    def _line(self, site: str) -> str:
        return line_of(self.fitted.program.nodes_by_name()[site])


def _by_site(parts: Iterator[tuple[str, CountedPart]]) -> dict[str, list[CountedPart]]:
    found = defaultdict[str, list[CountedPart]](list)
    for site, part in parts:
        found[site].append(part)
    return found


def _resized(mesh: Mesh, axes: Sequence[str]) -> Iterator[Mesh]:
    """Yield the mesh with the sizes of `axes` times 2, 3, 4 and 1/2, if the sizes are then integers."""
    for factor in (Fraction(2), Fraction(3), Fraction(4), Fraction(1, 2)):
        sizes = {axis: size * (factor if axis in axes else 1) for axis, size in mesh.axes}
        if all(size.denominator == 1 and (axis not in axes or size > 1) for axis, size in sizes.items()):
            yield Mesh({axis: int(size) for axis, size in sizes.items()})
