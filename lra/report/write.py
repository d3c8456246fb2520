"""The report folder: every file is whole or absent, and report.md comes last."""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lra.report.aggregate import Group, Table, make_tables
from lra.report.read import read_rows
from lra.report.rows import CHECKPOINTS, ReportError, Row
from lra.report.sweeps import Plans, choice_grid, missing_grid, read_plans
from lra.report.tables import escape, format_csv, format_markdown, markdown_rows, printable


def slug(group: Group) -> str:
    """A file name for a table: readable, safe on every system, and different for every group."""
    readable = f"{group.task}-{group.split}-{group.view}-train{group.train_length}".lower()
    readable = re.sub(r"[^a-z0-9]+", "-", readable).strip("-")[:80]
    digest = hashlib.sha256(repr(tuple(group)).encode()).hexdigest()
    return f"{readable}-{digest[:8]}"


@dataclass(frozen=True)
class Report:
    """What a report says.

    Attributes:
        tables: Results.
        plans: What sweeps planned and chose.
        notices: A line for everything that was left out or is doubtful.
    """

    tables: list[Table]
    plans: Plans
    notices: list[str]


def load_report(dirs: Iterable[Path | str], checkpoint: str | None = None) -> Report:
    """Reads and aggregates the rows below `dirs`.

    Args:
        dirs: Directories to search for results.jsonl and sweep.json.
        checkpoint: Keep only rows of this kind, "best" or "last"; None keeps both.

    Raises:
        ReportError: There is nothing to report.
    """
    if checkpoint not in (None, *CHECKPOINTS):
        raise ReportError(f"checkpoint is {checkpoint!r}, expected one of {', '.join(CHECKPOINTS)}")
    paths = [Path(path) for path in dirs]
    planned_notices: list[str] = []
    plans = read_plans(paths, planned_notices)
    rows, notices = read_rows(paths, needed=not plans.planned)
    rows = _of_plans(rows, plans, notices)
    kept = [row for row in rows if checkpoint in (None, row.checkpoint)]
    if rows and not kept:
        other = ", ".join(sorted({row.checkpoint for row in rows}))
        raise ReportError(
            f"no row of checkpoint {checkpoint!r}, there are rows of: {other}; "
            f"leave --checkpoint out or evaluate that checkpoint with eval.py"
        )
    return Report(make_tables(kept, plans.planned), plans, planned_notices + notices)


def _of_plans(rows: Sequence[Row], plans: Plans, notices: list[str]) -> list[Row]:
    """The rows without those in a sweep's folder that the sweep, as it is now, does not test."""
    tested = {Path(run.folder) for run in plans.planned}
    sweeps = {folder.parent for folder in tested}
    left_out = {
        folder
        for row in rows
        if row.file and (folder := Path(row.file).parent) not in tested and folder.parent in sweeps
    }
    notices += [
        f"{folder}: left out: the sweep in {folder.parent} does not test this run (it was changed, or "
        "chose another rate)"
        for folder in sorted(left_out)
    ]
    return [row for row in rows if not row.file or Path(row.file).parent not in left_out]


def _encode(text: str) -> bytes:
    # JSON can hold half of a surrogate pair, which UTF-8 cannot.
    return text.encode(errors="backslashreplace")


def _section(title: str, grid: Sequence[Sequence[str]]) -> list[str]:
    """A section with a table, or nothing where the table has no rows."""
    return [f"## {title}\n", "\n".join([*markdown_rows(grid), ""])] if len(grid) > 1 else []


def make_files(report: Report) -> dict[str, bytes]:
    """The report as file name to content, report.md last because it links to the others."""
    # Only a report draws: matplotlib must not load for who prints a table.
    from lra.report.plots import render

    files: dict[str, bytes] = {}
    sections = ["# Accuracy against length\n"]
    for table in report.tables:
        name = slug(table.group)
        files[f"{name}.csv"] = _encode(format_csv(table))
        files |= {f"{name}.{kind}": image for kind, image in render(table).items()}
        sections.append(format_markdown(table, name))
    sections += _section("Learning rates, chosen on validation", choice_grid(report.plans.choices))
    sections += _section("Runs without a result", missing_grid(report.plans))
    if report.notices:
        sections.append("## Left out or doubtful\n")
        sections.append("".join(f"- {escape(notice)}\n" for notice in report.notices))
    files["report.md"] = _encode("\n".join(sections))
    return files


def write_files(files: Mapping[str, bytes], out: Path) -> Path:
    """Writes the files of `make_files` into `out`, which is made if absent.

    All contents are on disk under temporary names before the first file gets its own name, so an
    interruption or a full disk leaves the earlier report, never a part of a file.

    Args:
        files: File name to content; the last one gets its name last.
        out: The folder.

    Returns:
        The absolute path of report.md.

    Raises:
        ReportError: `out` cannot be made or written.
    """
    temporary = {name: out / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            temporary[name].write_bytes(content)
        for name, path in temporary.items():
            path.replace(out / name)
    except OSError as error:
        raise ReportError(
            f"cannot write the report to {out}: {error.strerror or error}; "
            f"expected a folder that can be written, name one with --out=DIR"
        ) from error
    finally:
        for path in temporary.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return out.resolve() / "report.md"


def default_out(dirs: Sequence[Path | str]) -> Path:
    """`DIR/report` for one directory, `./report` for several."""
    return Path(dirs[0], "report") if len(dirs) == 1 else Path("report")


def write_report(
    dirs: Sequence[Path | str], out: Path | str | None = None, checkpoint: str | None = None
) -> Path:
    """Writes report.md, and a CSV, PNG and SVG for every table.

    Lines that were skipped and settings that disagree are warned about on stderr and listed at
    the end of report.md. The same rows give the same bytes.

    Args:
        dirs: Directories to search for results.jsonl; each file counts once.
        out: Folder to write to; None for `default_out(dirs)`.
        checkpoint: Keep only rows of this kind, "best" or "last"; None keeps both.

    Returns:
        The absolute path of report.md.

    Raises:
        ReportError: No directory, no usable row, or `out` cannot be written.
    """
    report = load_report(dirs, checkpoint)
    path = write_files(make_files(report), Path(out or default_out(dirs)))
    warn(report.notices)
    return path


def warn(notices: Iterable[str]) -> None:
    """Prints notices to stderr."""
    for notice in notices:
        print(f"warning: {printable(notice)}", file=sys.stderr)
