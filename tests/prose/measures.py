"""Measure sentences: their first words, lengths and colons, the word "what", and pronouns without a noun.

The rule for pronouns: a word of `_DETERMINERS` stands alone if the next word cannot begin a noun. The next word is
then a verb such as "is", a preposition, a conjunction, an article or a punctuation mark. "This is split" counts,
"this plan" does not. Words of `_ALWAYS` ("it", "they") count everywhere. "That" counts in front of a verb ("the plan
that is found"). "That" does not count in front of a clause ("says that a plan fits"). Good prose has pronouns too: a
share of 0 % is not the aim. Well-known packages have 1.2 to 3 % by this rule; `--figures` prints their shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

from tests.prose.texts import Sentence

MAX_WORDS = 25
MAX_COLONS = 1
MAX_WHAT_PER_1000 = 1.0
MAX_PRONOUN_SHARE = 0.03


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FIRST_WORDS = _words("What what Of of Those those Where where As as See")
"""No sentence begins with these words. A description of an argument may be "see `compile`"."""

_ALWAYS = _words("it they them itself themselves whatever")
_DETERMINERS = _words(
    "this that these those one ones such other others another which what none each both all any either neither some "
    "several many most few"
)
_VERBS = _words(
    "is are was were be been has have had do does did can could may might must will would should shall need needs "
    "isn't aren't wasn't doesn't don't didn't can't cannot won't"
)
_LINKS = _words(
    "of in on at to for from with without by as than into onto over under between behind before after within per "
    "and or but nor so if when where while because since until though not only also too again there here"
)
_NOUN_PHRASES = _words("the a an it they we you i that this which who what")
_PUNCTUATION = frozenset(".,;:?!()")
_TOKEN = re.compile(r"`code`|[A-Za-z][A-Za-z'’-]*|[.,;:?!()](?![\w`])|\(|\)|\S+?(?=[.,;:?!()]*(?:\s|$))")
_FORMULA = re.compile(r"[=≤≥<>∑×→·²√∂]|\s[*/+^]\s")


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a text."""

    words: int = 0
    sentences: int = 0
    what: int = 0
    pronouns: int = 0
    long: int = 0
    colons: int = 0
    first: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def what_per_1000(self) -> float:
        return 1000 * self.what / max(self.words, 1)

    @property
    def pronoun_share(self) -> float:
        return self.pronouns / max(self.words, 1)


def count(sentences: Iterable[Sentence]) -> Counts:
    """Return the totals of sentences."""
    total = Counts()
    for sentence in sentences:
        total += count_sentence(sentence.text)
    return total


def count_sentence(text: str) -> Counts:
    """Return the counts of one sentence; a question may begin with any word, and a formula may be long."""
    tokens = _TOKEN.findall(text)
    words = [token for token in tokens if token not in _PUNCTUATION]
    first = bool(words) and words[0] in FIRST_WORDS and not text.endswith("?")
    return Counts(
        words=len(words),
        sentences=1,
        what=sum(word.lower() == "what" for word in words),
        pronouns=len(list(pronouns(text))),
        long=int(len(words) > MAX_WORDS and not _FORMULA.search(text)),
        colons=int(tokens.count(":") > MAX_COLONS),
        first=int(first),
    )


def pronouns(text: str) -> Iterator[str]:
    """Return the pronouns without a noun, each with the next word."""
    tokens = ["`code`" if token == "None" else token.lower() for token in _TOKEN.findall(text)]
    for word, behind in pairwise([*tokens, "."]):
        if word in _ALWAYS or (word in _DETERMINERS and _stands_alone(word, behind)):
            yield f"{word} {behind}"


def _stands_alone(word: str, behind: str) -> bool:
    if word == "such" and behind == "as":
        return False
    if behind in _VERBS or behind in _PUNCTUATION:
        return True
    if word == "that":  # in front of "in all ranks" or "the plan" a clause begins
        return False
    return behind in _LINKS or (behind in _NOUN_PHRASES and word not in ("all", "both"))
