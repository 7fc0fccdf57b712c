"""Run as a script, without TRITON_INTERPRET: compile the candidates of tuning and write their resources as JSON.

    python tests/kernels/compile_candidates.py sm_90 sample
    python tests/kernels/compile_candidates.py sm_80,sm_90,gfx942 all gpt,llama

compiles the candidates at the usual sizes; "sample" takes one of every sixth kernel. Names of
models add their generated kernels.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from autoshard.kernels.candidates import TUNABLE, choice_of, neighbours
from autoshard.kernels.kernel import Specimen
from tests.kernels.ahead import TYPICAL_SIZES, compile_ahead, specimens


def candidates_of(specimen: Specimen, tunable: Sequence[str]) -> Iterator[tuple[str, Specimen]]:
    """Yield each alternative to a specimen: the choice as a text, and its compilation."""
    heuristic, fixed = choice_of(specimen.constants, tunable, specimen.num_warps)
    for choice in neighbours(heuristic, fixed)[1:]:
        constants = {**specimen.constants, **dict(choice.blocks)}
        yield str(choice), dataclasses.replace(specimen, constants=constants, num_warps=choice.num_warps)


def _handwritten() -> Iterator[list[tuple[str, Specimen]]]:
    for specimen in specimens():
        if specimen.size in TYPICAL_SIZES:
            yield list(candidates_of(specimen, TUNABLE.get(specimen.name, ())))


def _generated(families: Sequence[str]) -> Iterator[list[tuple[str, Specimen]]]:
    from tests.kernels.generated.compile_generated import kernels_in, phases_of  # imports the planner

    for family in families:
        phased = phases_of(family)
        for kernel in (*kernels_in(phased.forward), *kernels_in(phased.backward)):
            yield list(candidates_of(kernel.specimen(), kernel.layout.tunable))


def _sample(found: Sequence[list[tuple[str, Specimen]]]) -> Iterator[list[tuple[str, Specimen]]]:
    """Yield one candidate of every sixth kernel, at one of its sizes: another one from kernel to kernel."""
    of_kernel = {choices[0][1].name: choices for choices in found if choices}
    for index, choices in enumerate(list(of_kernel.values())[::6]):
        yield [choices[(6 * index) % len(choices)]]


def main(architectures: str, which: str, families: str = "") -> None:
    """Write a list of {kernel, size, choice, architecture, registers, shared_bytes, spilled_bytes}."""
    rows = []
    for architecture in architectures.split(","):
        found = [*_handwritten(), *_generated(families.split(",") if families else [])]
        for choice, specimen in (
            pair for choices in (_sample(found) if which == "sample" else found) for pair in choices
        ):
            resources = dataclasses.asdict(compile_ahead(specimen, architecture))
            named = {"kernel": specimen.name, "size": specimen.size, "choice": choice, "architecture": architecture}
            rows.append(named | resources)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
