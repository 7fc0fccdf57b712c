"""Find nodes at the same place of repeated blocks, so that the search decides once for all of them.

A block is a module whose path ends in a number (`layers.3`) and which has at least two matrix products. Nodes of two
blocks are alike if they stand at the same place of the same module and phase. The module has to issue the same sequence
of calls in both blocks. Folding only ties choices together; the price of a choice stays the same. So a bad fold may
miss a better plan, and never gives a wrong plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from autoshard.ir.program import InputKind, InputSlot, Program
from autoshard.ir.update import parameter_of
from passes.strategies.enumerate_strategies import SearchSpace, Site

_MATRIX_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "attention")


def fold_blocks(space: SearchSpace) -> dict[str, str]:
    """Map each site to its representative, the first site of its class."""
    blocks = numbered_blocks(space.sites.values())
    modules: dict[tuple[str, str], list[Site]] = defaultdict(list)
    paths = module_paths(space.program)
    for name, site in space.sites.items():
        modules[paths.get(name, ""), site.phase].append(site)
    representative: dict[tuple[object, ...], str] = {}
    result: dict[str, str] = {}
    for (module, phase), sites in modules.items():
        folded = _fold_path(module, blocks)
        signature = tuple(_signature(site) for site in sites)
        for position, site in enumerate(sites):
            if folded == module:
                result[site.name] = site.name
            else:
                key = (folded, phase, signature, position)
                result[site.name] = representative.setdefault(key, site.name)
    return result


def numbered_blocks(sites: Iterable[Site]) -> frozenset[str]:
    """Return the paths of numbered modules that have at least two matrix products in the forward."""
    products: dict[str, int] = defaultdict(int)
    for site in sites:
        if site.node is not None and site.phase == "forward" and _is_matrix_product(site.node.target):
            parts = site.node.meta.get("module", "").split(".")
            for end in range(1, len(parts) + 1):
                if parts[end - 1].isdigit():
                    products[".".join(parts[:end])] += 1
    return frozenset(path for path, count in products.items() if count >= 2)


def _is_matrix_product(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._opname in _MATRIX_PRODUCTS


def module_paths(program: Program) -> dict[str, str]:
    """Map each node to the path of its module; a parameter is its own module."""
    slots = {slot.node: _name(slot) for slot in program.inputs}
    return {node.name: slots.get(node.name) or node.meta.get("module", "") for node in program.graph.nodes}


def _name(slot: InputSlot) -> str:
    """Return a slot's name as a path. The path of optimizer state begins with the path of its parameter."""
    if slot.kind != InputKind.STATE:
        return slot.name
    return f"{parameter_of(slot.name)}.{slot.name.partition(':')[0]}"


def _fold_path(module: str, blocks: frozenset[str]) -> str:
    parts = module.split(".")
    return ".".join(
        "*" if part.isdigit() and ".".join(parts[: end + 1]) in blocks else part for end, part in enumerate(parts)
    )


def _signature(site: Site) -> tuple[object, ...]:
    """Return the call, values and strategies of a site; two sites share a choice only if all three are equal."""
    return (site.call, site.results, id(site.strategies))
