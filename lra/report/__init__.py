"""Tables and plots of accuracy against length, made from results.jsonl files only.

`python -m lra.report RUNS` writes a report; `text_tables` prints rows that are still in memory.
"""

from lra.report.rows import ReportError
from lra.report.tables import text_tables
from lra.report.write import write_report

__all__ = ["ReportError", "text_tables", "write_report"]
