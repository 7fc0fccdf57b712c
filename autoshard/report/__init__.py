"""Text, HTML pages and tables of plans and of their answers.

Importing this folder registers them with `autoshard.ir.show`.
"""

from autoshard.report import explanation, page, printer

__all__ = ["explanation", "page", "printer"]
