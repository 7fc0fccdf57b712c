"""Published runs beside the search, as markdown: what is found, what the difference is made of, whether it holds up.

A ratio of prices is the product of four, each of a recipe to the one before, so each says for whom the saving was there
to take:

1. *published*: the fastest published recipe of the same task (model, cluster, batch), of those that fit;
2. *offered*: the fastest recipe that the run's software offered, with an eighth of the memory left free;
3. *memory*: the same, with none left free;
4. *features*: the plan, with all that the search knows.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from tests.benchmarks.recipe_runs import LOWER, Compared, by_task, lower

GIB = 2**30
KINDS = ("published", "offered", "memory", "features")
_SUSPECT = 2 / 3
"""Ratios below are told step by step."""


def report(compared: Sequence[Compared]) -> str:
    """All of it."""
    parts = [
        summary(compared), by_source(compared), kinds(compared), parts_table(compared), lacking_table(compared),
        on_the_host(compared), pairs_table(compared), too_large(compared), suspects(compared), table(compared),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def summary(compared: Sequence[Compared]) -> str:
    """In a paragraph."""
    worse = [item.run for item in compared if not item.holds]
    fitting = [item for item in compared if item.fits]
    searches = by_task(compared)
    spent_s = sum(items[0].search_s for items in searches.values())
    return (
        f"{len(compared)} runs of {len(searches)} tasks; {len(fitting)} of their recipes fit by our count. Plans that "
        f"do not fit, or are priced above a recipe that fits: {', '.join(worse) or 'none'}. Searches proven: "
        f"{sum(items[0].is_proven for items in searches.values())}, in {spent_s:.0f} CPU s. Plans cost "
        f"{_median(item.ratio for item in fitting)} of recipes that fit (median); {len(lower(compared))} below {LOWER}."
    )


def _median(values: Iterable[float]) -> str:
    known = list(values)
    return f"{statistics.median(known):.3f}" if known else "nothing"


def by_source(compared: Sequence[Compared]) -> str:
    """How far below each source's recipes plans are."""
    lines = ["| source | runs | fit | median | lowest | highest | below 0.8 |", "|---|---|---|---|---|---|---|"]
    for source, items in _grouped(compared).items():
        ratios = [item.ratio for item in items if item.fits]
        ends = f"{min(ratios):.3f} | {max(ratios):.3f}" if ratios else " | "
        count = sum(ratio < LOWER for ratio in ratios)
        lines.append(f"| {source} | {len(items)} | {len(ratios)} | {_median(ratios)} | {ends} | {count} |")
    return "\n".join(["## By source: plan over recipe, of those that fit", "", *lines])


def _grouped(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    groups: dict[str, list[Compared]] = defaultdict(list)
    for item in compared:
        groups[item.source].append(item)
    return dict(sorted(groups.items()))


def factors(item: Compared, siblings: Sequence[Compared]) -> dict[str, float]:
    """The saving of each of `KINDS`, as factors whose product is the ratio."""
    assert item.reason is not None, item.run
    assert item.found is not None, item.run
    start = item.published.seconds
    best = min((other.published.seconds for other in siblings if other.fits), default=start)
    chain = [start, best, item.reason.roomy_s, item.reason.offered_s, item.found.seconds]
    found, now = {}, start
    for name, after in zip(KINDS, chain[1:], strict=True):
        after = now if after is None else min(now, after)
        found[name], now = after / now, after
    return found


def kinds(compared: Sequence[Compared]) -> str:
    """Whose the savings of the lower ones are."""
    tasks = by_task(compared)
    known = {item.run: factors(item, tasks[item.task]) for item in lower(compared)}
    lines = [f"| source | below {LOWER} | {' | '.join(KINDS)} | most of it |", "|---|" + "---|" * (len(KINDS) + 2)]
    for source, items in _grouped(lower(compared)).items():
        means = [math.exp(statistics.fmean(math.log(known[item.run][kind]) for item in items)) for kind in KINDS]
        most = Counter(min(known[item.run], key=known[item.run].__getitem__) for item in items)
        said = ", ".join(f"{kind} {count}" for kind, count in most.most_common())
        lines.append(f"| {source} | {len(items)} | {' | '.join(f'{mean:.3f}' for mean in means)} | {said} |")
    return "\n".join([f"## Below {LOWER}: for whom the saving was there to take (mean factors)", "", *lines])


def parts_table(compared: Sequence[Compared]) -> str:
    """The worth of each part of the difference, mean over the lower ones of a source."""
    worth: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in lower(compared):
        for name, factor in step_factors(item):
            worth[item.source][name].append(factor)
    names = [name for name, _ in Counter(n for each in worth.values() for n in each for _ in each[n]).most_common()]
    lines = ["| part changed | " + " | ".join(sorted(worth)) + " |", "|---|" + "---|" * len(worth)]
    for name in names:
        cells = (_mean_cell(worth[source].get(name, [])) for source in sorted(worth))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(
        [f"## Below {LOWER}: what each part is worth on the way (mean factor, and in how many runs)", "", *lines]
    )


def _mean_cell(factors: Sequence[float]) -> str:
    return f"{math.exp(statistics.fmean(map(math.log, factors))):.3f} ({len(factors)})" if factors else ""


def step_factors(item: Compared) -> list[tuple[str, float]]:
    """The steps of a run's way, with what each takes off or adds."""
    assert item.reason is not None, item.run
    found, now = [], item.published.seconds
    for step in item.reason.steps:
        found.append((step.name, step.taken.seconds / now))
        now = step.taken.seconds
    return found


def lacking_table(compared: Sequence[Compared]) -> str:
    """Features of the lower plans that their software did not offer."""
    by_feature: dict[str, Counter[str]] = defaultdict(Counter)
    for item in lower(compared):
        assert item.reason is not None
        for feature in item.reason.lacking or ("nothing",):
            by_feature[feature][item.source] += 1
    lines = ["| the plan has, the run's software had not | runs | sources |", "|---|---|---|"]
    for feature, sources in sorted(by_feature.items(), key=lambda pair: -pair[1].total()):
        lines.append(f"| {feature} | {sources.total()} | {', '.join(sorted(sources))} |")
    return "\n".join(lines)


def on_the_host(compared: Sequence[Compared]) -> str:
    """Plans that lay activations on the host, beside the fastest that do not (where such fit)."""
    lines = [
        "| source | runs | plan over recipe | without the host | below 0.8, with and without |",
        "|---|---|---|---|---|",
    ]
    for source, items in _grouped([item for item in compared if item.on_device_s is not None]).items():
        ratios = [(item.ratio, (item.on_device_s or math.inf) / item.published.seconds) for item in items]
        low = [sum(ratio < LOWER for ratio in column) for column in zip(*ratios, strict=True)]
        medians = [f"{statistics.median(column):.3f}" for column in zip(*ratios, strict=True)]
        lines.append(f"| {source} | {len(items)} | {medians[0]} | {medians[1]} | {low[0]}, {low[1]} |")
    return "\n".join(["## Plans with activations on the host (medians)", "", *lines])


def pairs_table(compared: Sequence[Compared]) -> str:
    """Whether prices that far apart are true: published recipes of one task that were measured, and fit."""
    lines = ["| one priced at ... of the other | pairs | measured below 0.8 | below 1 | measured over priced, median |",
             "|---|---|---|---|---|"]  # fmt: skip
    found = list(measured_pairs(compared))
    for low, high in ((0.0, _SUSPECT), (_SUSPECT, LOWER), (LOWER, 0.9)):
        pairs = [(priced, measured) for priced, measured in found if low <= priced < high]
        if pairs:
            below = [f"{statistics.fmean(measured < bound for _, measured in pairs):.0%}" for bound in (LOWER, 1.0)]
            middle = statistics.median(measured / priced for priced, measured in pairs)
            lines.append(f"| {low:.2f} to {high:.2f} | {len(pairs)} | {' | '.join(below)} | {middle:.3f} |")
    return "\n".join(["## Published recipes of one task that are priced far apart, as they were measured", "", *lines])


def measured_pairs(compared: Sequence[Compared]) -> Iterable[tuple[float, float]]:
    """Two recipes of one task: the ratio of their prices, below 1, and that of their measured steps."""
    for items in by_task(compared).values():
        known = sorted((item.published.seconds, item.measured_s) for item in items if item.measured_s and item.fits)
        for (fast, fast_measured), (slow, slow_measured) in combinations(known, 2):
            if fast < slow:
                yield fast / slow, fast_measured / slow_measured


def too_large(compared: Sequence[Compared]) -> str:
    """Published recipes that ran, and do not fit by our count."""
    lines = ["| run | counted, GiB | device, GiB | over | class | counted |", "|---|---|---|---|---|---|"]
    for item in compared:
        if not item.fits:
            size, device = item.published.memory_bytes, item.device_bytes
            cells = [item.run, f"{size / GIB:.1f}", f"{device / GIB:.1f}", f"{size / device - 1:.1%}", _class(item)]
            lines.append(f"| {' | '.join([*cells, _memory_words(item.published.memory)])} |")
    return "\n".join(["## Published recipes that do not fit by our count", "", *lines])


def _class(item: Compared) -> str:
    """The workspace, if the recipe fits without; else the largest class of memory."""
    memory = item.published.memory
    small = item.published.memory_bytes - memory.get("workspace", 0) <= item.device_bytes
    return "workspace" if small else max(memory, key=memory.__getitem__)


def _memory_words(memory: Mapping[str, int]) -> str:
    parts = sorted(memory.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size >= GIB / 10)


def suspects(compared: Sequence[Compared]) -> str:
    """The lowest ones, part by part."""
    lines = [
        "| run | ratio | published | plan | way: price after each part, of the recipe's; GiB |",
        "|---|---|---|---|---|",
    ]
    for item in lower(compared):
        if item.ratio < _SUSPECT and item.reason is not None and item.found is not None:
            way = "; ".join(
                f"{step.name} {step.taken.seconds / item.published.seconds:.3f}, {step.taken.memory_bytes / GIB:.0f}"
                for step in item.reason.steps
            )
            lines.append(f"| {item.run} | {item.ratio:.3f} | {item.published.words} | {item.found.words} | {way} |")
    return "\n".join(["## Priced at less than two thirds", "", *lines])


def table(compared: Sequence[Compared]) -> str:
    """One line for each run, those with the lowest ratio first; plans once for each task."""
    head = "| run | recipe s | GiB | plan s | GiB | of | ratio | gap | plan |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    shown: set[str] = set()
    for item in sorted(compared, key=lambda item: (item.ratio, item.run)):
        found, published = item.found, item.published
        plan = ("nothing found",) * 2 if found is None else (f"{found.seconds:.4g}", f"{found.memory_bytes / GIB:.1f}")
        words = "" if found is None else f"as {item.task}" if item.task in shown else f"{item.task}: {found.words}"
        shown.add(item.task)
        size = f"{published.memory_bytes / GIB:.1f}" + ("" if item.fits else " (does not fit)")
        lines.append(f"| {item.run} | {published.seconds:.4g} | {size} | {' | '.join(plan)} | "
                     f"{item.device_bytes / GIB:.0f} | {item.ratio:.3f} | {item.gap:.1%} | {words} |")  # fmt: skip
    return "\n".join(["## Every run", "", *lines])
