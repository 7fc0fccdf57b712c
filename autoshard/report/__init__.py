"""Text, HTML pages and tables of plans and their answers.

Importing this folder registers the functions with `autoshard.ir.show`.
"""

from autoshard.report import explanation, page, printer, profile_table, run_table

__all__ = ["explanation", "page", "printer", "profile_table", "run_table"]
