"""Scalars to metrics.jsonl and TensorBoard: the one place that speaks to tensorboardX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lra.jsonl import read_rows, write_rows

METRICS_FILE = "metrics.jsonl"


class MetricWriter:
    """Appends rows `{"step", "split", …}`; after a restart, rows past the restored step go.

    Args:
        workdir: the run's directory.
        step: optimizer steps already done; later rows are dropped.
        tensorboard: also write event files under `tensorboard/`.
    """

    def __init__(self, workdir: Path, *, step: int, tensorboard: bool):
        path = workdir / METRICS_FILE
        if path.exists():
            write_rows(path, [row for row in read_rows(path) if row.get("step") in range(step + 1)])
        self._file = path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, split: str, values: dict[str, Any]) -> None:
        """One row, on disk when this returns.

        Args:
            step: optimizer steps done.
            split: "train" or "validation".
            values: numbers by name.
        """
        self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        if self._board is not None:
            self._board.close()
