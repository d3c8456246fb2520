"""ListOps as the LRA release has it: TSV files, one tree a row.

Header `Source<TAB>Target`, then rows of a tree in words, a tab and its value; lines end in CRLF or
LF. Trees are nested to the left by round brackets, `( ( ( [MAX 2 ) 9 ) ] )`, which are no tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lra.tasks.listops_trees import encode

_FOLDERS = ("", "listops-1000", "lra_release/listops-1000")
_FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
_HEADER = b"Source\tTarget"


@dataclasses.dataclass(frozen=True)
class ReleaseRows:
    """The rows of one file; only their places are in memory."""

    path: Path
    ends: np.ndarray  # [rows + 1] int64: bytes up to the end of the header and of each row

    def __len__(self) -> int:
        return len(self.ends) - 1

    def read(self, indices: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        """The rows at `indices`: (token ids [length] uint8, value)."""
        rows = []
        with self.path.open("rb") as file:
            for index in indices:
                start, end = self.ends[index : index + 2].tolist()
                file.seek(start)
                source, _, target = file.read(end - start).partition(b"\t")
                rows.append((encode(source), int(target)))
        return rows


def open_release(release_dir: str, split: str) -> ReleaseRows:
    """Finds the file of a split and checks its rows.

    Args:
        release_dir: Directory of the unpacked release, or its folder listops-1000.
        split: "train", "validation" or "test".

    Raises:
        FileNotFoundError: The file is not there.
        ValueError: A row is damaged; the message starts with file:line.
    """
    name = _FILES[split]
    paths = [Path(release_dir, folder, name).expanduser() for folder in _FOLDERS]
    for path in paths:
        if path.is_file():
            return ReleaseRows(path, _index(path))
    raise FileNotFoundError(
        f"the LRA release's {name} is not in {release_dir}: there is no "
        f"{', '.join(map(str, paths))}"
    )


def _index(path: Path) -> np.ndarray:
    """The end of each line in bytes, [lines] int64; ValueError for a line that is damaged."""
    ends = []
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            wrong = _what_is_wrong(line) if number > 1 else _wrong_header(line)
            if wrong:
                raise ValueError(f"{path}:{number}: {wrong}")
            end += len(line)
            ends.append(end)
    if len(ends) < 2:
        raise ValueError(f"{path}:{len(ends) + 1}: the file ends before its first row")
    return np.array(ends, np.int64)


def _wrong_header(line: bytes) -> str:
    """What is wrong with the first line, or nothing."""
    if line.rstrip(b"\r\n") == _HEADER:
        return ""
    return f"expected the header {_HEADER.decode()!r}, got {_shown(line)}"


def _what_is_wrong(line: bytes) -> str:
    """What is wrong with a row, or nothing."""
    source, tab, target = line.rstrip(b"\r\n").partition(b"\t")
    if not tab:
        return f"expected a tree, a tab and its value, got no tab in {_shown(line)}"
    if len(target) != 1 or not target.isdigit():
        return f"expected a value 0 to 9 behind the tab, got {_shown(target)}"
    if not source.strip(b" ()"):
        return "expected a tree before the tab, got none"
    if source.count(b"[") != source.count(b"]"):
        # "[MAX" opens an operator and "]" closes it.
        return f"the tree's square brackets do not pair: {_shown(source)}"
    return ""


def _shown(text: bytes, most: int = 60) -> str:
    """Text for a message: its beginning and its end."""
    if len(text) > most:
        return f"{text[: most // 2]!r} … {text[-most // 2 :]!r}"
    return repr(text)
