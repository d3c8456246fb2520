"""Result rows of whole directories: found, read, freed of duplicates.

A file is read even while a run still appends to it, so a torn last line is ordinary: whatever
cannot be used becomes a notice (`file:line: reason`) and never stops the report.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from lra.report.rows import ReportError, Row, parse_row

RESULTS_FILE = "results.jsonl"
HOW_TO_GET_ROWS = "run eval.py --workdir=RUN first"


def find_files(dirs: Iterable[Path], name: str, notices: list[str]) -> list[Path]:
    """Every file of a name at or below `dirs`, each once however many paths lead to it.

    Args:
        dirs: Directories to search; symbolic links are followed, loops are not.
        name: The file's name.
        notices: Receives a line for every folder that cannot be listed.

    Returns:
        Paths in the order of `dirs`, sorted within each.

    Raises:
        ReportError: One of `dirs` is not a directory.
    """
    found: dict[Path, Path] = {}
    seen: set[Path] = set()
    for top in dirs:
        if not top.is_dir():
            what = "is a file" if top.is_file() else "does not exist"
            raise ReportError(f"{top} {what}, expected a directory with runs; {HOW_TO_GET_ROWS}")
        walk = os.walk(
            top,
            followlinks=True,
            onerror=lambda e: notices.append(f"{e.filename}: not searched: {e.strerror}"),
        )
        for folder, subfolders, files in walk:
            resolved = Path(folder).resolve()
            if resolved in seen:
                subfolders.clear()
                continue
            seen.add(resolved)
            subfolders.sort()
            if name in files:
                path = Path(folder, name)
                found.setdefault(path.resolve(), path)
    return list(found.values())


def read_rows(dirs: Iterable[Path], *, needed: bool = True) -> tuple[list[Row], list[str]]:
    """Reads the result rows below `dirs`.

    Args:
        dirs: Directories to search; a run's own directory is one too.
        needed: Whether it is an error that there are none.

    Returns:
        `(rows, notices)`: one row for every setting, and a line for everything left out.

    Raises:
        ReportError: A directory does not exist, or there is no usable row anywhere.
    """
    dirs = list(dirs)
    where = ", ".join(map(str, dirs))
    notices: list[str] = []
    paths = find_files(dirs, RESULTS_FILE, notices)
    if not paths and needed:
        raise ReportError(f"no {RESULTS_FILE} at or below {where}; {HOW_TO_GET_ROWS}")
    rows = []
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            notices.append(f"{path}: file skipped: {error.strerror}")
            continue
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            source = f"{path}:{number}"
            try:
                rows.append(parse_row(json.loads(line.decode("utf-8")), source))
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                notices.append(f"{source}: line skipped: not JSON (a torn line?)")
            except ValueError as error:
                notices.append(f"{source}: line skipped: {error}")
    if not rows and needed:
        if notices:
            detail = f"no line holds a usable result row (first of {len(notices)}: {notices[0]})"
        else:
            detail = f"every {RESULTS_FILE} is empty"
        raise ReportError(f"below {where} {detail}; {HOW_TO_GET_ROWS}")
    return drop_duplicates(rows, notices), notices


def drop_duplicates(rows: Iterable[Row], notices: list[str]) -> list[Row]:
    """Keeps one row for every setting: of most examples, then of the largest step, then the last.

    Args:
        rows: Rows in the order they were read.
        notices: Receives a line for every pair of rows that disagree, unless one only supersedes
            an earlier step of the same file on as many examples.

    Returns:
        The rows kept, in the order of their settings' first appearance.
    """
    kept: dict[tuple[object, ...], Row] = {}
    for row in rows:
        other = kept.setdefault(row.key, row)
        if other is row:
            continue
        better = (other.n, other.step) > (row.n, row.step)
        winner, loser = (other, row) if better else (row, other)
        kept[row.key] = winner
        superseded = winner.file == loser.file and winner.step > loser.step and winner.n == loser.n
        if winner.values != loser.values and not superseded:
            notices.append(
                f"{loser.source} (step {loser.step}, {loser.n} examples) and {winner.source} (step "
                f"{winner.step}, {winner.n} examples) are "
                f"the same setting ({row.stack}, config {row.config_hash}, seed {row.seed}, "
                f"{row.checkpoint}, {row.split}, length {row.eval_length}) with different values; "
                f"the second is used"
            )
    return list(kept.values())
