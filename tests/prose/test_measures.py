"""Counts of sentences."""

import pytest

from tests.prose.__main__ import ENFORCED, ROOT, findings
from tests.prose.measures import Counts, count_sentence, pronouns


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("This plan has one axis and each rank its part.", []),
        ("It runs.", ["it runs"]),
        ("The plan that is found, and those of others.", ["that is", "those of", "others ."]),
        ("It says that a plan, such as this one, fits.", ["it says", "one ,"]),
        ("Both of them need what the model has.", ["both of", "them need", "what the"]),
    ],
)
def test_a_pronoun_in_front_of_a_noun_does_not_count(text: str, found: list[str]) -> None:
    """Behind a pronoun with its noun stands the noun."""
    assert list(pronouns(text)) == found


def test_first_words_lengths_and_colons_are_counted() -> None:
    """A question may begin with any word, and a formula may be long."""
    assert count_sentence("What is sent.") == Counts(words=3, sentences=1, what=1, pronouns=1, first=1)
    assert count_sentence("Where is it?").first == 0
    assert count_sentence("word " * 26 + ".").long == 1
    assert count_sentence("x = " + "word " * 26 + ".").long == 0
    assert count_sentence("One: two: three.").colons == 1


@pytest.mark.parametrize("place", ENFORCED)
def test_enforced_places_exist(place: str) -> None:
    """A renamed folder is renamed in the list too."""
    assert (ROOT / place).exists()
    assert isinstance(list(findings(ROOT / place)), list)
