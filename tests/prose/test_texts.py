"""The sentences of Python and Markdown files."""

from pathlib import Path

from tests.prose.texts import sentences

SOURCE = '''"""Run a model. It takes `inputs` of shape [B, T], e.g. tokens.

Args:
    model: any module. The parameters
        stay: they are not copied.
    batch, length: sizes.

Example:
    >>> run(model)
    3
"""
x = 1  # a short comment
# A comment of two lines
# is read.
raise ValueError(f"Axis {x} has no size. Give it " "one.")
'''

PAGE = """# A heading

First [sentence](page.md). Second:

```python
code = "is no prose."
```

* **Item**: a meaning
| cell | other cell |
|---|---|
"""


def test_docstrings_comments_and_messages_are_read(tmp_path: Path) -> None:
    """Code and names of arguments are left out; a wrapped line with a colon does not end its sentence."""
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = [(s.line, s.text) for s in sentences(path)]
    assert sorted(found, key=lambda pair: pair[0]) == [
        (1, "Run a model."),
        (1, "It takes `code` of shape [B, T], e.g. tokens."),
        (4, "any module."),
        (4, "The parameters stay: they are not copied."),
        (6, "sizes."),
        (13, "A comment of two lines is read."),
        (15, "Axis `code` has no size."),
        (15, "Give it one."),
    ]


def test_pages_are_read_without_code_and_headings(tmp_path: Path) -> None:
    """Links read as their text, and each cell of a table is a sentence."""
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert [s.text for s in sentences(path)] == ["First sentence.", "Second:", "a meaning", "cell", "other cell"]


def test_a_word_that_ends_like_an_abbreviation_ends_its_sentence(tmp_path: Path) -> None:
    """The word "usual." ends a sentence and "et al." does not; a literal block behind "::" is left out."""
    path = tmp_path / "page.md"
    path.write_text("Shazeer et al. 2017 wrote as usual. Ranks wait::\n\n    literal text\n")
    assert [s.text for s in sentences(path)] == ["Shazeer et al. 2017 wrote as usual.", "Ranks wait:"]
