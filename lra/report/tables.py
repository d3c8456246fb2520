"""A table as plain text, Markdown or long-form CSV.

Text and Markdown show accuracy in percent with two decimals; CSV keeps fractions at full precision.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lra.report.aggregate import COSTS, Cell, Column, Range, Table, make_tables
from lra.report.read import drop_duplicates
from lra.report.rows import parse_row

MISSING = "missing"
NOT_APPLICABLE = "-"

CSV_FIELDS = (
    *("task", "split", "view", "train_length", "data"),
    *("stack", "config_hash", "checkpoint", "params"),
    *("state_floats", "mixing_flops", "step_ms", "temporary_bytes"),
    *("eval_length", "bin_low", "bin_high"),
    *("mean", "se", "se_over", "n_seeds", "seeds", "n"),
    *("loss", "chance", "majority"),
)

_MARKDOWN_SPECIAL = re.compile(r"[*_\[\]`~$]")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "\\": "&#92;"})


def printable(text: str) -> str:
    """Replaces what is not printable, so that a value cannot break a line or drive a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def escape(text: str) -> str:
    """Makes any text one literal Markdown table cell: no markup, no HTML, no new column."""
    return _MARKDOWN_SPECIAL.sub(r"\\\g<0>", printable(text).translate(_ENTITIES))


def _integers(values: Range | None) -> str:
    if values is None:
        return MISSING
    low, high = values
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _percent(values: Range | None) -> str:
    if values is None:
        return MISSING
    low, high = (f"{100 * value:.2f}" for value in values)
    return low if low == high else f"{low} to {high}"


def format_cell(cell: Cell, seeds: int) -> str:
    """`97.00 ± 0.20`, in percent.

    Args:
        cell: The cell.
        seeds: Number of seeds of the whole line; a cell that has fewer says so.

    Returns:
        The text; † marks a standard error over test examples, and "missing" an absent value.
    """
    if cell.mean is None:
        return MISSING
    se = "unknown" if cell.se is None else f"{100 * cell.se:.2f}"
    mark = "†" if cell.se_over == "examples" else ""
    part = f" ({len(cell.seeds)} of {seeds} seeds)" if len(cell.seeds) < seeds else ""
    return f"{100 * cell.mean:.2f} ± {se}{mark}{part}"


def title(table: Table) -> str:
    """One line that says what is compared, without the data variant."""
    group = table.group
    against = "true example length" if group.view == "bin" else "evaluation length"
    return (
        f"{group.task} ({group.split}): accuracy against {against}, "
        f"trained at {group.train_length} tokens"
    )


def caption(table: Table) -> str:
    """What the numbers mean, their unit and the data they were measured on."""
    what = "bins of true example length" if table.group.view == "bin" else "evaluation lengths"
    data = table.group.data or "not stated"
    return f"Accuracy (%), mean ± standard error. Columns: {what} in tokens. Data: {data}."


#: What the columns of `cost_grid` are.
COST_CAPTION = (
    "Cost at the training length. State: numbers that the attention layers keep of one example. "
    "FLOPs: of their mixing alone, projections left out. Step: median wall time on the machine of the "
    "run, input and saving included, beside whatever else ran there. Temporary: memory of the "
    "compiled step beside parameters and data."
)


def cost_grid(table: Table) -> list[list[str]]:
    """Parameters, state, FLOPs, time and memory of each line as unescaped cells, the header first."""
    head = ["parameters", "state", "mixing FLOPs/token", "ms/step", "temporary MB"]
    body = [["stack", *head]]
    for line in table.lines:
        cost = line.cost
        counts = (line.params, cost.state_floats, cost.mixing_flops)
        step, memory = _decimal(cost.step_ms, 1.0), _decimal(cost.temporary_bytes, 1e-6)
        body.append([line.label, *map(_integers, counts), step, memory])
    return [[printable(cell) for cell in row] for row in body]


def _decimal(values: Range | None, factor: float) -> str:
    if values is None:
        return MISSING
    low, high = (f"{factor * value:,.1f}" for value in values)
    return low if low == high else f"{low} to {high}"


def grid(table: Table) -> list[list[str]]:
    """The table as cells of unescaped text, the header first; no cell is empty."""
    tail = ["parameters", "n seeds", "seeds"]
    body = [["stack", "checkpoint", *(column.label for column in table.columns), *tail]]
    for line in table.lines:
        cells = [format_cell(cell, len(line.seeds)) for cell in line.cells]
        seeds = ", ".join(map(str, line.seeds))
        last = [_integers(line.params), str(len(line.seeds)), seeds]
        body.append([line.label, line.checkpoint, *cells, *last])
    rest = [NOT_APPLICABLE] * len(tail)
    for name, values in (("chance", table.chance), ("majority", table.majority)):
        body.append([name, NOT_APPLICABLE, *map(_percent, values), *rest])
    body.append(["test examples", NOT_APPLICABLE, *map(_integers, table.examples), *rest])
    return [[printable(cell) for cell in row] for row in body]


def provenance_lines(table: Table) -> list[str]:
    """Commits and versions, with what is mixed first; commands are left to the caller."""
    found = table.provenance
    commits = ", ".join(f"{name} ({count} rows)" for name, count in found.commits.items())
    versions = ", ".join(f"{name} {' / '.join(each)}" for name, each in found.versions.items())
    return [*found.mixed, f"commits: {commits}", f"versions: {versions or 'unknown'}"]


def aligned(grid: Sequence[Sequence[str]]) -> str:
    """Cells as plain text in columns, the header first."""
    rows = [[printable(cell) for cell in row] for row in grid]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def format_text(table: Table) -> str:
    """The table as aligned plain text with its caption, notes and provenance."""
    below = [*table.notes, *provenance_lines(table)]
    parts = [title(table), caption(table), "", aligned(grid(table))]
    text = "\n".join([*(map(printable, parts[:2])), *parts[2:], *map(printable, below)]) + "\n"
    if table.group.view == "length":
        text += f"\n{aligned(cost_grid(table))}\n"
    return text


def text_tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """Plain text tables of result rows that were just computed.

    Args:
        rows: Result rows as they stand in results.jsonl, decoded. Of several rows of one setting
            one counts; see `lra.report.read.drop_duplicates`.

    Returns:
        One aligned table for every (task, split, view, train length, data variant), separated by
        empty lines and ended by a newline; accuracies in percent. Empty without rows.

    Raises:
        ValueError: A row lacks a needed key or has an unacceptable value.
    """
    kept = drop_duplicates([parse_row(row) for row in rows], [])
    return "\n".join(format_text(table) for table in make_tables(kept))


def _fenced(lines: Sequence[str]) -> list[str]:
    # A fence longer than any run of backticks inside cannot be closed by the content.
    runs = [len(run) for line in lines for run in re.findall("`+", line)]
    fence = "`" * max(3, 1 + max(runs, default=0))
    return [fence, *map(printable, lines), fence]


def markdown_rows(grid: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; every cell is escaped, the header comes first."""
    header, *body = ([escape(cell) for cell in row] for row in grid)
    rule = [":--", *["--:"] * (len(header) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (header, rule, *body)]


def format_markdown(table: Table, slug: str) -> str:
    """The table as a Markdown section: caption, plot, table, notes and provenance.

    Args:
        table: The table.
        slug: Name, without its ending, of the plot and CSV files beside the report.

    Returns:
        The section, ended by a newline. Every value from a row is escaped.
    """
    lines = [f"## {escape(title(table))}", "", escape(caption(table)), ""]
    lines += markdown_rows(grid(table))
    if table.group.view == "length":
        lines += ["", escape(COST_CAPTION), "", *markdown_rows(cost_grid(table))]
    lines += ["", *(f"- {escape(note)}" for note in table.notes)]
    lines += [f"- {escape(line)}" for line in provenance_lines(table)]
    lines += [f"- full precision: [CSV]({slug}.csv); plot: [SVG]({slug}.svg), [PNG]({slug}.png)"]
    lines += ["", f"![{escape(title(table))}]({slug}.png)", ""]
    commands = table.provenance.commands
    if commands:
        lines += [f"<details><summary>{len(commands)} command(s)</summary>", ""]
        lines += [*_fenced(commands), "", "</details>", ""]
    else:
        lines += ["Commands: not stated.", ""]
    return "\n".join(lines)


def _exact(values: Range | None) -> str:
    if values is None:
        return "nan"
    return str(values.low) if values.low == values.high else f"{values.low} to {values.high}"


def _number(value: float | None) -> str:
    return "nan" if value is None else repr(value)


def _bounds(column: Column) -> tuple[str, str]:
    if column.bin is None:
        return ("nan", "nan")
    low, high = column.bin
    return (str(low), "inf" if high is None else str(high))


def format_csv(table: Table) -> str:
    """The table in long form: a line for every setting and column, missing ones included.

    Args:
        table: The table.

    Returns:
        CSV with the header `CSV_FIELDS`. Accuracies are fractions; `nan` stands for what is
        missing or unknown, `inf` for a bin without an upper end; `seeds` are separated by spaces;
        a reference that differs over the seeds reads "low to high".
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for line in table.lines:
        setting = (line.stack, line.config_hash, line.checkpoint)
        costs = (getattr(line.cost, name) for name in COSTS)
        cost = tuple(map(_exact, (line.params, *costs)))
        for column, cell in zip(table.columns, line.cells, strict=True):
            where = (column.eval_length, *_bounds(column))
            mean = (_number(cell.mean), _number(cell.se), cell.se_over)
            seeds = (len(cell.seeds), " ".join(map(str, cell.seeds)) or "none", _exact(cell.n))
            rest = (_number(cell.loss), _exact(cell.chance), _exact(cell.majority))
            writer.writerow((*table.group, *setting, *cost, *where, *mean, *seeds, *rest))
    return out.getvalue()
