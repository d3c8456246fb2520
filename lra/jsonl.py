"""Files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lra.errors import UserError
from lra.files import write_whole


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that a kill tore is left out.

    Raises:
        UserError: for any other line that is no JSON object; names file and line.
    """
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(
                f"{path}:{number} cannot be read ({error}); mend or remove that line"
            ) from error
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replaces the file, whole or not at all."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
