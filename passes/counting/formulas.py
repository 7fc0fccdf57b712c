"""Formulas of plans: costs as expressions in sizes of inputs, numbers of blocks, and sizes of mesh axes.

What `Plan.formula` calls. Nothing is done before the first formula is asked for; then the model is traced at a few more
sizes of its inputs (`fit_sizes`), and each quantity is counted on the graph with expressions in place of sizes.

Of a number of blocks, counts are linear: blocks of one kind are counted one by one, and must come to the same. The
first and the last may differ from those between (a reshard on the way in); what they differ by stays as it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch

from autoshard.errors import FormulaError, PlanMismatchError, TraceError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.staged import ALONE, PIPELINE_AXIS, CutProgram
from autoshard.tracing import BlockList, shorten
from cost_models.formulas import Point, Size, published, size_symbol
from cost_models.hardware import Cluster
from passes.counting.count_plan import Counted, PlanCounting
from passes.counting.fit_sizes import DoesNotRunError, InputDims, InputSize, input_sizes, resize
from passes.counting.symbolic_program import BlockPlace, SymbolicProgram, symbolic_program
from passes.driver.expand_plan import expand_for
from passes.lowering.lower_program import prepare_for

if TYPE_CHECKING:
    from autoshard.ir.request import Request

QUANTITIES: Mapping[str, str] = {
    "step_flops": "FLOPs of the products and attention of a step, on all ranks together, nothing computed twice",
    "rank_flops": "FLOPs of products and attention that each rank runs in a step",
    "communication_bytes": "bytes that each rank sends for one micro-batch and for the update, with ring algorithms; "
    "of one mesh axis: communication_bytes_<axis>",
    "parameters": "elements of the whole model's parameters",
    "parameter_bytes": "bytes of parameters on each rank",
    "gradient_bytes": "bytes of gradients on each rank",
    "optimizer_bytes": "bytes of optimizer state on each rank",
    "activation_bytes": "bytes that each rank's forward keeps for its backward (of one micro-batch, where a recipe has "
    "several)",
    "tokens": "elements of the first integer input of a step, on all ranks together",
}
"""Name to meaning. Where the stages of a pipeline differ, each rank's share is the mean over them."""

_OF_MODEL = ("step_flops", "parameters", "tokens")
"""Quantities of the whole model; all others are of a rank."""

_OF_STEP = ("step_flops", "rank_flops", "tokens")
"""Quantities of a step, which each micro-batch adds to."""

BY_AXIS = "communication_bytes_"


def check_name(name: str, axes: Iterable[str]) -> None:
    """Refuse a name that is no formula's.

    Raises:
        FormulaError: lists those that are.
    """
    names = [*QUANTITIES, *(f"{BY_AXIS}{axis}" for axis in axes)]
    if name not in names:
        raise FormulaError(f"There is no formula {name!r}. There are {', '.join(names)}.")


def symbol_names(inputs: Sequence[str], blocks: Sequence[str], axes: Sequence[str]) -> dict[str, str]:
    """The symbol of each mesh axis: its name, with "_axis" behind it where inputs or blocks have that name."""
    taken = {*inputs, *blocks}
    return {axis: f"{axis}_axis" if axis in taken else axis for axis in axes}


def check_fixed(fixed: Collection[str], known: Sequence[str]) -> None:
    """Refuse to hold fixed what is no symbol. Raises FormulaError."""
    if isinstance(fixed, str):
        raise FormulaError(f"fixed={fixed!r} is a text; pass the names of symbols: fixed=({fixed!r},).")
    if not isinstance(fixed, Collection):
        raise FormulaError(f"fixed={fixed!r} is a {type(fixed).__name__}; pass the names of symbols: fixed=('batch',).")
    unknown = [name for name in fixed if name not in known]
    if unknown:
        raise FormulaError(f"fixed={tuple(fixed)!r} names {unknown[0]!r}; the symbols are {', '.join(known)}.")


def block_symbols(lists: Sequence[BlockList]) -> dict[tuple[str, int], str]:
    """(path of a list, kind) to the symbol of how many blocks of the kind there are.

    "layers", with the list's path behind it where there are several lists ("layers_encoder_block"), and the number of
    the kind where a list has several ("layers_0").
    """
    found: dict[tuple[str, int], str] = {}
    for item in lists:
        path = item.path.split(".") if len(lists) > 1 else []
        kinds = list(dict.fromkeys(item.kinds))
        for kind in kinds:
            found[item.path, kind] = "_".join(["layers", *path, *([str(kind)] if len(kinds) > 1 else [])])
    return found


def total(counts: Iterable[Counted], symbols: Mapping[tuple[str, int], str], fixed: Collection[str] = ()) -> Size:
    """The sum of counts, linear in the number of blocks of each kind but for those that are held fixed.

    Raises:
        FormulaError: blocks of one kind come to different counts.
    """
    parts: defaultdict[BlockPlace | None, list[Any]] = defaultdict(list)
    for place, size in counts:
        parts[place].append(size)
    result: Any = sympy.Add(*parts.pop(None, ()))
    kinds: defaultdict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
    for place, sizes in parts.items():
        assert place is not None
        kinds[place.path, place.kind][place.position] = sympy.expand(sympy.Add(*sizes))
    for key, blocks in kinds.items():
        result += _blocks_total(symbols[key], [blocks[position] for position in sorted(blocks)], fixed)
    return sympy.expand(result)


def _blocks_total(symbol: str, blocks: Sequence[Any], fixed: Collection[str]) -> Size:
    """Blocks that are like those between the first and the last count by their number."""
    if symbol in fixed:
        return sympy.Add(*blocks)
    between = blocks[1:-1] or blocks
    if any(item != between[0] for item in between):
        raise FormulaError(
            f"The plan does not treat all blocks alike, so costs are not linear in {symbol}. Constrain them to one "
            f"layout (constraints={{'*.weight': ...}}), plan for at least three blocks of a kind, or hold their number "
            f"fixed: formula(..., fixed=({symbol!r},))."
        )
    edges = sympy.Add(*(item - between[0] for item in blocks))
    return edges + size_symbol(symbol) * between[0]


@dataclass
class PlanFormulas:
    """The formulas of plans that `autoshard.plan` gives; keeps the model and the example inputs that they need.

    Args:
        trace: a request to its program.
        request: of the plan, for one micro-batch.
        cluster_for: a mesh to the hardware that it is priced for.
        state_bytes_per_parameter_byte: of the optimizer.
        cut: a traced program and a plan with stages to the programs of these.
    """

    trace: Callable[[Request], Program]
    request: Request
    cluster_for: Callable[[Mesh], Cluster]
    state_bytes_per_parameter_byte: float
    cut: Callable[[Program, Plan], CutProgram] | None = None
    _programs: dict[Any, SymbolicProgram] = field(default_factory=dict, repr=False)
    _cuts: dict[Any, CutProgram] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Plans are sent between processes without their model."""
        return no_formulas, ()

    def formula(
        self, plan: Plan, name: str, *, dims: InputDims | None, fixed: Collection[str], even: bool
    ) -> sympy.Expr:
        """See `Plan.formula`."""
        check_name(name, plan.mesh.axis_names)
        plan = self._whole(plan)
        sizes = input_sizes(self.request.args, self.request.kwargs, dims)
        blocks = block_symbols(self._lists)
        split_over = tuple(axis for axis in plan.mesh.axis_names if axis != PIPELINE_AXIS)
        axes = symbol_names([size.name for size in sizes], list(blocks.values()), split_over)
        known = [*(size.name for size in sizes), *blocks.values(), *axes.values()]
        if len(set(known)) < len(known):
            raise FormulaError(f"Two sizes have one name: {', '.join(known)}. Name the inputs' otherwise with dims=.")
        check_fixed(fixed, known)
        free = tuple(size for size in sizes if size.name not in fixed)
        of_axes: dict[str, Size] = {
            axis: plan.mesh.axis_size(axis) if symbol in fixed else size_symbol(symbol) for axis, symbol in axes.items()
        }
        of_axes.setdefault(ALONE, 1)  # of a stage that has no other axis
        counts = list(self._counts_of_stages(plan, name, free, of_axes))
        ranks = 1 if name in _OF_MODEL or not plan.stages else plan.mesh.axis_size(PIPELINE_AXIS)
        times = plan.micro_batches if name in _OF_STEP else 1
        return published(total(counts, blocks, fixed) * sympy.Rational(times, ranks), even=even)

    def _counts_of_stages(
        self, plan: Plan, name: str, sizes: tuple[InputSize, ...], axes: Mapping[str, Size]
    ) -> Iterator[Counted]:
        """The counts of each stage; a plan without stages is one of one stage."""
        for number, stage in enumerate(plan.stages or (plan,)):
            program = self._program(plan, number, sizes)
            counting = PlanCounting(program, stage, axes, self.cluster_for(stage.mesh))
            found = list(self._counts(stage, counting, name))
            yield from found
            if name in ("communication_bytes", f"{BY_AXIS}{PIPELINE_AXIS}") and plan.stages:
                yield from counting.crossing_bytes(self._sends(plan, number))
            if found and name == "tokens":  # of the stage that reads the model's first input
                return

    def _sends(self, plan: Plan, number: int) -> Mapping[str, int]:
        """Name of each value that a stage gives to stages of other ranks, to how often it is sent for a micro-batch."""
        assert plan.order is not None, "a plan with stages has an order"
        ranks, found = plan.order.stage_ranks, Counter[str]()
        for crossing in self._cut(plan, self.request, (plan.cuts,)).crossings:
            if crossing.maker == number and ranks[crossing.maker] != ranks[crossing.reader]:
                found[crossing.name] += 1
        return found

    def _cut(self, plan: Plan, request: Request, key: object) -> CutProgram:
        """The stages of a call, which is traced once for all of them."""
        assert self.cut is not None, "plans with stages are cut"
        if key not in self._cuts:
            self._cuts[key] = self.cut(self.trace(replace(request, update=None)), plan)
        return self._cuts[key]

    def _whole(self, plan: Plan) -> Plan:
        """The plan with all blocks, which are counted one by one."""
        if not plan.repeats:
            return plan
        try:
            return expand_for(plan, self.trace(self.request), self.request, self.trace)
        except PlanMismatchError as error:
            raise FormulaError(f"Formulas count the blocks of the whole model one by one. {error}") from error

    def _counts(self, plan: Plan, counting: PlanCounting, name: str) -> Iterator[Counted]:
        if name == "optimizer_bytes":
            if plan.updates:
                return counting.state_bytes()
            ratio = sympy.nsimplify(self.state_bytes_per_parameter_byte, rational=True)
            return ((place, ratio * size) for place, size in counting.parameter_bytes())
        if name.startswith("communication_bytes"):
            axis = name.removeprefix(BY_AXIS) if name.startswith(BY_AXIS) else None
            return ((place, size) for over, place, size in counting.sent() if axis in (None, over))
        return getattr(counting, name)()

    @property
    def _lists(self) -> tuple[BlockList, ...]:
        return shorten(self.request.model, kept=None).lists

    def _program(self, plan: Plan, number: int, sizes: tuple[InputSize, ...]) -> SymbolicProgram:
        """The program of a stage of a plan."""
        stage = (plan.stages or (plan,))[number]
        key = (number, sizes, stage.recompute.nodes, stage.offload.nodes)
        if key not in self._programs:
            found = symbolic_program(sizes, lambda point: self._trace(plan, number, sizes, point), self._lists)
            digest = found.program.digest()
            if digest != stage.program_digest:
                raise FormulaError(
                    f"The model has changed since it was planned: the plan is for program {stage.program_digest}, the "
                    f"model now gives {digest}. Plan again."
                )
            self._programs[key] = found
        return self._programs[key]

    def _trace(self, plan: Plan, number: int, sizes: Sequence[InputSize], point: Point) -> Program:
        """The program of a stage, at other sizes of the inputs."""
        args, kwargs = resize(self.request.args, self.request.kwargs, sizes, point)
        request = replace(self.request, args=args, kwargs=kwargs)
        try:
            with torch.enable_grad():
                if not plan.stages:
                    return prepare_for(self.trace(request), plan)
                cut = self._cut(plan, request, (plan.cuts, tuple(sizes), tuple(point)))
                return prepare_for(cut.stages[number], plan.stages[number])
        except TraceError as error:
            raise cannot_resize(sizes, point, error) from error


def cannot_resize(sizes: Sequence[InputSize], point: Point, error: TraceError) -> FormulaError:
    """What to raise where the model does not run at other sizes."""
    shown = ", ".join(f"{size.name}={now}" for size, now in zip(sizes, point, strict=True))
    names = tuple(size.name for size in sizes)
    return DoesNotRunError(
        f"The model does not run with {shown}, so there is no formula in these sizes: {error} Say which dims of the "
        f"inputs may change (formula(..., dims={{'batch': 0}})), or hold some fixed: formula(..., fixed={names!r})."
    )


def no_formulas() -> None:
    """What a plan's formulas become in another process."""
