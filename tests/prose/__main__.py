"""`python -m tests.prose [FOLDER or FILE ...]`: print each sentence that breaks a limit of STYLE.

Without arguments, the places of `ENFORCED` are checked, as in `make lint`. `--figures` prints the measures of all our
folders and of installed packages. `--pronouns` prints each pronoun without a noun too.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.prose.measures import (
    MAX_COLONS,
    MAX_PRONOUN_SHARE,
    MAX_WHAT_PER_1000,
    MAX_WORDS,
    Counts,
    count,
    count_sentence,
    pronouns,
)
from tests.prose.texts import Sentence, sentences

ROOT = Path(__file__).parents[2]
ENFORCED = (
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "autoshard",
    "autoshard_command.py",
    "cost_models",
    "docs",
    "examples",
    "passes",
    "tests",
)
"""All files and folders of the tree with code or pages."""
ANCHORS = ("torch", "transformers", "networkx", "hypothesis", "attr", "equinox", "xdsl", "pytato", "torchtitan")
"""Packages to compare with, if installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or print; return 1 where a limit is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.prose", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files and folders; default: the enforced ones")
    parser.add_argument("--figures", action="store_true", help="print the measures of our folders and of others")
    parser.add_argument("--pronouns", action="store_true", help="print each pronoun without a noun")
    options = parser.parse_args(arguments)
    if options.figures:
        print_figures()
        return 0
    places = [Path(path).resolve() for path in options.paths] or [ROOT / path for path in ENFORCED]
    broken = [line for place in places for line in findings(place, options.pronouns)]
    _say("\n".join(broken) or f"prose: {len(places)} places hold the limits")
    return int(bool(broken))


def findings(place: Path, show_pronouns: bool = False) -> Iterator[str]:
    """Return a line for each sentence of a file or folder that breaks a limit, and for each share above its own."""
    total = Counts()
    for sentence in _sentences(place):
        counts = count_sentence(sentence.text)
        total += counts
        for problem in _problems(sentence, counts):
            yield f"{_short(sentence.path)}:{sentence.line}: {problem}: {sentence.text}"
        if show_pronouns and counts.pronouns:
            yield f"{_short(sentence.path)}:{sentence.line}: {', '.join(pronouns(sentence.text))}: {sentence.text}"
    if total.what_per_1000 > MAX_WHAT_PER_1000:
        yield f"{_short(place)}: 'what' {total.what} times in {total.words} words; at most {MAX_WHAT_PER_1000} in 1,000"
    if total.pronoun_share > MAX_PRONOUN_SHARE:
        yield f"{_short(place)}: {total.pronoun_share:.1%} of words are pronouns without a noun; at most 3 %"


def print_figures() -> None:
    """Print one row for each folder and package."""
    _say(f"{'place':34s} {'words':>8s} {'what/1000':>9s} {'pronouns':>8s} {'long':>6s} {'colons':>6s} {'first':>6s}")
    for name, place in _places():
        c = count(_sample(place)) if name.startswith("(") else count(_sentences(place))
        shares = [f"{n / max(c.sentences, 1):6.1%}" for n in (c.long, c.colons, c.first)]
        _say(f"{name:34s} {c.words:8d} {c.what_per_1000:9.2f} {c.pronoun_share:8.2%} {' '.join(shares)}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _places() -> Iterator[tuple[str, Path]]:
    for package in ("autoshard", "passes", "cost_models"):
        for folder in sorted((ROOT / package).iterdir()):
            if any(folder.rglob("*.py")):
                yield str(folder.relative_to(ROOT)), folder
    yield from ((name, ROOT / name) for name in ("autoshard", "passes", "cost_models", "docs", "tests"))
    yield from ((path.name, path) for path in sorted(ROOT.glob("*.md")))
    for name in ANCHORS:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            yield f"({name})", Path(spec.origin).parent


def _problems(sentence: Sentence, counts: Counts) -> Iterator[str]:
    if counts.first:
        yield f"begins with {sentence.text.split()[0]}"
    if counts.long:
        yield f"{counts.words} words, at most {MAX_WORDS}"
    if counts.colons:
        yield f"more than {MAX_COLONS} colon"


def _sentences(place: Path) -> Iterator[Sentence]:
    """Return the sentences of a file or folder; records of measurements (`results.md`, `results/`) are data."""
    files = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])
    for path in files:
        if path.parent.name != "results" and path.name != "results.md":
            yield from sentences(path)


def _sample(place: Path) -> Iterator[Sentence]:
    """Return the sentences of 300 files of a package, evenly spread; a file in a newer Python's syntax is left out."""
    files = sorted(place.rglob("*.py"))
    for path in files[:: max(len(files) // 300, 1)]:
        with suppress(SyntaxError):
            yield from sentences(path)


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
