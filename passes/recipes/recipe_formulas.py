"""Formulas of priced recipes: the sections of the folded program, with sizes fitted, counted by `count_recipe`.

The model is folded at a few lengths of its inputs. Sections are linear in the batch already; of each kind of block
there is one, and how many there are is a symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from autoshard.errors import FormulaError, TraceError
from autoshard.ir.execution import Execution
from autoshard.ir.plan import Plan
from cost_models.formulas import Point, Size, published, size_symbol
from passes.counting.fit_sizes import InputDims, InputSize, Observation, fit_numbers, input_sizes, resize
from passes.counting.formulas import block_symbols, cannot_resize, check_fixed, check_name, no_formulas, symbol_names
from passes.recipes.count_recipe import RecipeCounting, count_section
from passes.sections.count_sections import Phase, Section, Sized
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import PricedModel, RecipeKind

AXES = ("data", "context", "tensor", "expert", "pipeline")
BATCH, MICRO_BATCH = "batch", "micro_batch"


@dataclass
class RecipeFormulas:
    """The formulas of what `autoshard.price` gives; keeps what is needed to fold the model again.

    Args:
        fold: example inputs (arguments by position, and by name) to the folded model.
        args, kwargs: the example inputs.
        recipe: the recipe.
    """

    fold: Callable[[tuple[Any, ...], Mapping[str, Any]], PricedModel]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    recipe: Execution
    _fitted: dict[tuple[InputSize, ...], tuple[dict[str, Section], Size]] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Plans are sent between processes without their model."""
        return no_formulas, ()

    def formula(
        self, plan: Plan, name: str, *, dims: InputDims | None, fixed: Collection[str], even: bool
    ) -> sympy.Expr:
        """See `Plan.formula`."""
        axes = {axis: getattr(self.recipe, axis) for axis in AXES}
        split = [axis for axis, ranks in axes.items() if ranks > 1]
        check_name(name, split)
        sizes = tuple(size for size in self._sizes(dims) if size.name != BATCH)
        priced = self.fold(self.args, self.kwargs)
        blocks = block_symbols(priced.folded.lists)
        named = symbol_names([BATCH, MICRO_BATCH, *(size.name for size in sizes)], list(blocks.values()), split)
        known = [BATCH, MICRO_BATCH, *(size.name for size in sizes), *blocks.values(), *named.values()]
        if len(set(known)) < len(known):
            raise FormulaError(f"Two sizes have one name: {', '.join(known)}. Name the inputs' otherwise with dims=.")
        check_fixed(fixed, known)
        free = tuple(size for size in sizes if size.name not in fixed)

        def size_of(symbol: str, value: int) -> Size:
            return value if symbol in fixed else size_symbol(symbol)

        ranks = {axis: size_of(named[axis], value) if axis in named else value for axis, value in axes.items()}
        micro_batch = size_of(MICRO_BATCH, self.recipe.micro_batch)
        sections, tokens = self._sections(free)
        counts = {f"{path}:{kind}": size_of(s, self._count(priced, path, kind)) for (path, kind), s in blocks.items()}
        counting = RecipeCounting(
            recipe=self.recipe,
            sections={name: count_section(section, micro_batch, ranks) for name, section in sections.items()},
            blocks={BEFORE: 1, **counts, AFTER: 1},
            batch=size_of(BATCH, self.recipe.batch),
            micro_batch=micro_batch,
            axes=ranks,
            tokens_each=tokens,
        )
        return published(counting.of(name), even=even)

    def _count(self, priced: PricedModel, path: str, kind: int) -> int:
        return priced.folded.blocks.count(f"{path}:{kind}")

    def _sizes(self, dims: InputDims | None) -> tuple[InputSize, ...]:
        if dims is not None and dims.get(BATCH, 0) != 0:
            raise FormulaError(f"dims={dict(dims)!r}: a recipe's batch is the first dim of every input, 0.")
        return input_sizes(self.args, self.kwargs, dims)

    def _sections(self, sizes: tuple[InputSize, ...]) -> tuple[dict[str, Section], Size]:
        """The sections, and the tokens of a sequence, with sizes fitted."""
        if sizes not in self._fitted:
            found: dict[Point, PricedModel] = {}

            def observe(point: Point) -> Observation:
                try:
                    found[point] = self.fold(*resize(self.args, self.kwargs, sizes, point))
                except TraceError as error:
                    raise cannot_resize(sizes, point, error) from error
                return _observe(found[point].sections(kind), found[point].tokens)

            kind = RecipeKind.of(self.recipe)
            numbers = iter(fit_numbers(sizes, observe))
            base = found[tuple(size.value for size in sizes)]
            sections = {name: _filled(section, numbers) for name, section in base.sections(kind).items()}
            self._fitted[sizes] = sections, next(numbers)
        return self._fitted[sizes]


def _observe(sections: Mapping[str, Section], tokens: int) -> Observation:
    labels, numbers, owners = [], [], []
    for name, section in sections.items():
        labels += [f"{k.operator} ({k.name})" for phase in _phases(section) for k in phase.kernels]
        labels += [f"{s.kind.value} over {s.axis}" for phase in _phases(section) for s in phase.sent]
        for item, owner in _sized(section):
            labels.append(f"{item.dtype} of {owner} in {name}")
            numbers += [*item.first, *item.step]
            owners += [f"{owner} ({name})"] * (2 * len(item.first))
    return Observation(tuple(labels), (*numbers, tokens), (*owners, "the tokens"))


def _phases(section: Section) -> tuple[Phase, Phase]:
    return section.forward, section.backward


def _sized(section: Section) -> Iterator[tuple[Sized, str]]:
    """Every tensor of a section, in the order in which `_filled` replaces them, and what has it."""
    for phase in _phases(section):
        for kernel in phase.kernels:
            yield from ((item, kernel.name) for item in (*kernel.inputs, *kernel.outputs))
        yield from ((item.value, f"what is sent over {item.axis}") for item in phase.sent)
    yield from ((item.value, "what is saved") for item in section.saved)
    yield from ((item, "what enters") for item in section.entering)
    yield from ((item, name) for name, item in section.parameters.items())
    yield from ((item, "what passes") for items in section.workspaces for item in items)


def _filled(section: Section, numbers: Iterator[Size]) -> Section:
    """The section with other sizes; they are taken in the order of `_sized`."""

    def fill(item: Sized) -> Sized:
        first: Any = tuple(next(numbers) for _ in item.first)
        step: Any = tuple(next(numbers) for _ in item.step)
        return replace(item, first=first, step=step)

    def fill_phase(phase: Phase) -> Phase:
        kernels = tuple(
            replace(kernel, inputs=tuple(map(fill, kernel.inputs)), outputs=tuple(map(fill, kernel.outputs)))
            for kernel in phase.kernels
        )
        return Phase(kernels, tuple(replace(item, value=fill(item.value)) for item in phase.sent))

    forward, backward = fill_phase(section.forward), fill_phase(section.backward)
    saved = tuple(replace(item, value=fill(item.value)) for item in section.saved)
    entering = tuple(map(fill, section.entering))
    parameters = {name: fill(item) for name, item in section.parameters.items()}
    workspaces = tuple(tuple(map(fill, items)) for items in section.workspaces)
    return Section(forward, backward, saved, entering, parameters, section.expert_parameters, workspaces)
