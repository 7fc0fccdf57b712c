"""Find costs of a plan as formulas: expressions in sizes of inputs, numbers of blocks, and sizes of mesh axes.

A formula is the sum of counts (`totals`). Each count is the FLOPs or bytes of one operation, in a block or in the rest
of the model. Nothing is computed before the first formula is requested.

Blocks of one kind must have equal counts. Only the first and the last block may differ from the blocks in between, e.g.
by a reshard of the first block's input. Their difference is a constant in the formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import sympy
import torch

from autoshard.errors import FormulaError, TraceError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from autoshard.ir.staged import ONLY_AXIS, PIPELINE_AXIS, CutProgram
from autoshard.tracing import BlockList, shorten, without
from cost_models.formulas import Point, Size, published, size_symbol
from cost_models.hardware import Cluster
from passes.lowering.lower_program import prepare_for
from passes.questions.fit_sizes import InputDims, InputSize, cannot_resize, check_dims, input_sizes, resize
from passes.questions.fitted_program import FittedProgram, fit_program
from passes.questions.lowered_parts import WITH_STATE, reader_of
from passes.questions.plan_counts import PlanCounts
from passes.questions.totals import COMMUNICATION, Counted, block_symbols, total
from passes.strategies.price import StepPrice

QUANTITIES = (
    *("step_flops", "rank_flops", COMMUNICATION, "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes"),
    *("activation_bytes", "tokens"),
)
"""Names of formulas, explained in docs/reference/formulas.md."""

_OF_MODEL = ("step_flops", "parameters", "tokens")
"""Quantities of the whole model. The other quantities are per rank, averaged over stages."""

_OF_STEP = ("step_flops", "rank_flops", "tokens")
"""Quantities of a whole step, summed over micro-batches."""


class Counts(Protocol):
    """Counts the FLOPs, bytes or elements of a plan, as expressions in symbols."""

    def sizes(self, dims: InputDims | None) -> tuple[InputSize, ...]:
        """Return the input sizes that may be symbols; without `dims`, "batch" and "sequence" (`input_sizes`)."""
        ...

    def lists(self) -> Sequence[BlockList]:
        """Return the model's lists of blocks, in which equal blocks are of one kind."""
        ...

    def axes(self, plan: Plan) -> Mapping[str, int]:
        """Return the mesh axes that have symbols in formulas: name → size in the plan."""
        ...

    def of(self, plan: Plan, name: str, sizes: tuple[InputSize, ...], axes: Mapping[str, Size]) -> Iterable[Counted]:
        """Yield the counts of a quantity, one for each operation or value, with the block in which it lies.

        Args:
            name: the quantity, one of `QUANTITIES`, or "communication_bytes_data" for one axis.
            sizes: the input sizes that are symbols; the other sizes are those of the example inputs.
            axes: mesh axis → its size, a symbol or a number.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlanFormulas:
    """Finds the formulas of a plan. Formulas need the plan's model, so a pickled plan has none."""

    counts: Counts

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_formulas, ()

    def formula(
        self, plan: Plan, name: str, *, dims: InputDims | None, fixed: Collection[str], even: bool
    ) -> sympy.Expr:
        """Return the formula of a quantity of a plan, for `Plan.formula`.

        Args:
            name: the quantity, one of `QUANTITIES`, or "communication_bytes_data" for one axis.
            dims: for each symbol, the dim of the inputs whose size it stands for; None for "batch" and "sequence".
            fixed: names of symbols to replace by the plan's own sizes.
            even: whether to take all splits as even, so that the formula has no ceilings.

        Raises:
            FormulaError: `name` or `fixed` has an unknown name, or `dims` has a wrong type. Also if two symbols have
                the same name, or the quantity is no polynomial in a size.
        """
        check_dims(dims)
        of_axes = self.counts.axes(plan)
        _check_name(name, [*of_axes, *([PIPELINE_AXIS] if plan.stages else ())])
        sizes, blocks = self.counts.sizes(dims), block_symbols(self.counts.lists())
        taken = [*(size.name for size in sizes), *blocks.values()]
        symbols = {axis: f"{axis}_axis" if axis in taken else axis for axis in of_axes}
        known = [*taken, *symbols.values()]
        if len(set(known)) < len(known):
            raise FormulaError(f"Two sizes have one name: {', '.join(known)}. Name the inputs' otherwise with dims=.")
        _check_fixed(fixed, known)
        free = tuple(size for size in sizes if size.name not in fixed)
        axes: dict[str, Size] = {
            axis: size if symbols[axis] in fixed else size_symbol(symbols[axis]) for axis, size in of_axes.items()
        }
        return published(total(self.counts.of(plan, name, free, axes), blocks, fixed), even=even)


def _no_formulas() -> None:
    """Return None: a pickled plan gets this in place of its formulas."""


def _check_name(name: str, axes: Iterable[str]) -> None:
    names = [*QUANTITIES, *(f"{COMMUNICATION}_{axis}" for axis in axes)]
    if name not in names:
        raise FormulaError(f"There is no formula {name!r}. There are {', '.join(names)}.")


def _check_fixed(fixed: Collection[str], known: Sequence[str]) -> None:
    if isinstance(fixed, str):
        raise FormulaError(f"fixed={fixed!r} is a text; pass the names of symbols: fixed=({fixed!r},).")
    if not isinstance(fixed, Collection):
        raise FormulaError(f"fixed={fixed!r} is a {type(fixed).__name__}; pass the names of symbols: fixed=('batch',).")
    unknown = [name for name in fixed if name not in known]
    if unknown:
        raise FormulaError(f"fixed={tuple(fixed)!r} names {unknown[0]!r}; the symbols are {', '.join(known)}.")


@dataclass
class CountsOfPlan:
    """The `Counts` of plans from `autoshard.plan`.

    Args:
        request: the model and example inputs of the plan, for one micro-batch.
        cluster_for: returns the hardware of a mesh.
        state_bytes_per_parameter_byte: bytes of optimizer state for each byte of a parameter, for programs without the
            state.
        cut: cuts a traced program into the stages of a plan; None if plans have no stages.
    """

    trace: Callable[[Request], Program]
    request: Request
    cluster_for: Callable[[Mesh], Cluster]
    state_bytes_per_parameter_byte: float
    cut: Callable[[Program, Plan], CutProgram] | None = None
    _fitted: dict[object, FittedProgram] = field(default_factory=dict, repr=False)
    _counts: dict[object, PlanCounts] = field(default_factory=dict, repr=False)
    _cuts: dict[object, CutProgram] = field(default_factory=dict, repr=False)

    def sizes(self, dims: InputDims | None) -> tuple[InputSize, ...]:
        return input_sizes(self.request.args, self.request.kwargs, dims)

    def lists(self) -> Sequence[BlockList]:
        return shorten(self.request.model, kept=None).lists

    def axes(self, plan: Plan) -> Mapping[str, int]:
        return {axis: size for axis, size in plan.mesh.axes if axis != PIPELINE_AXIS}

    def of(self, plan: Plan, name: str, sizes: tuple[InputSize, ...], axes: Mapping[str, Size]) -> Iterator[Counted]:
        ranks = 1 if name in _OF_MODEL or not plan.stages else plan.mesh.axis_size(PIPELINE_AXIS)
        share = sympy.Rational(plan.micro_batches if name in _OF_STEP else 1, ranks)
        for place, size in self._of_stages(plan, name, sizes, axes):
            yield place, share * size

    def _of_stages(
        self, plan: Plan, name: str, sizes: tuple[InputSize, ...], axes: Mapping[str, Size]
    ) -> Iterator[Counted]:
        """Yield the counts of all stages for one micro-batch. A plan without stages counts as one stage."""
        for number, stage in enumerate(plan.stages or (plan,)):
            counts = self._counts_of(plan, number, sizes, {ONLY_AXIS: 1, **axes})
            found = list(self._of_stage(stage, counts, name))
            yield from found
            yield from counts.blocks()
            if plan.stages and name in (COMMUNICATION, f"{COMMUNICATION}_{PIPELINE_AXIS}"):
                yield from counts.crossing_bytes(self._sends(plan, number))
            if found and name == "tokens":  # only the stage that reads the model's first input counts tokens
                return

    def _of_stage(self, stage: Plan, counts: PlanCounts, name: str) -> Iterable[Counted]:
        match name:
            case "step_flops":
                return counts.step_flops()
            case "parameters":
                return counts.parameters()
            case "tokens":
                return counts.tokens()
            case "optimizer_bytes" if not stage.updates:
                ratio = sympy.nsimplify(self.state_bytes_per_parameter_byte, rational=True)
                return ((place, ratio * size) for place, size in counts.local(reader_of(WITH_STATE)))
        return counts.local(reader_of(name))

    def _counts_of(self, plan: Plan, number: int, sizes: tuple[InputSize, ...], axes: Mapping[str, Size]) -> PlanCounts:
        """Return the counts of stage `number`.

        Raises:
            FormulaError: the model has changed since it was planned.
        """
        stage = (plan.stages or (plan,))[number]
        key = (number, sizes, stage.recompute.nodes, stage.offload.nodes)
        if key not in self._fitted:
            fitted = fit_program(sizes, lambda point: self._program(plan, number, sizes, point), self.lists())
            digest = fitted.program.digest()
            if digest != stage.program_digest:
                raise FormulaError(
                    f"The model has changed since it was planned: the plan is for program {stage.program_digest}, the "
                    f"model now gives {digest}. Plan again."
                )
            self._fitted[key] = fitted
        own = {axis: axes[axis] for axis in stage.mesh.axis_names}
        counted = (*key, tuple(own.items()))
        known = self._counts.get(counted)
        if known is None or known.plan is not stage:
            step_cost = StepPrice(self.cluster_for(stage.mesh), stage.mesh)
            known = self._counts[counted] = PlanCounts(self._fitted[key], stage, own, step_cost)
        return known

    def _sends(self, plan: Plan, number: int) -> Mapping[str, int]:
        """Return how often stage `number` sends a value to other ranks in one micro-batch, by the value's name."""
        assert plan.order is not None, "a plan with stages has an order"
        ranks, found = plan.order.stage_ranks, Counter[str]()
        for crossing in self._cut(plan, self.request, (plan.cuts,)).crossings:
            if crossing.maker == number and ranks[crossing.maker] != ranks[crossing.reader]:
                found[crossing.name] += 1
        return found

    def _program(self, plan: Plan, number: int, sizes: Sequence[InputSize], point: Point) -> Program:
        args, kwargs = resize(self.request.args, self.request.kwargs, sizes, point)
        request = replace(self.request, args=args, kwargs=kwargs)
        try:
            with torch.enable_grad():
                if plan.stages:
                    cut = self._cut(plan, request, (plan.cuts, tuple(sizes), tuple(point)))
                    return prepare_for(cut.stages[number], plan.stages[number])
                short = replace(request, model=without(request.model, plan.repeats))
                return prepare_for(replace(self.trace(short), repeats=plan.repeats), plan)
        except TraceError as error:
            raise cannot_resize(sizes, point, error) from error

    def _cut(self, plan: Plan, request: Request, key: object) -> CutProgram:
        assert self.cut is not None, "plans with stages are cut"
        if key not in self._cuts:
            self._cuts[key] = self.cut(self.trace(replace(request, update=None)), plan)
        return self._cuts[key]
