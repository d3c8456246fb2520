"""Builders of result rows and of run folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _row(**changes: Any) -> dict[str, Any]:
    row = {
        "task": "recall",
        "stack": "softmax",
        "view": "length",
        "train_length": 64,
        "eval_length": 64,
        "bin": None,
        "split": "test",
        "n": 1000,
        "labels": 1000,
        "seed": 0,
        "step": 400,
        "checkpoint": "best",
        "accuracy": 0.9,
        "accuracy_se": 0.01,
        "loss": 0.25,
        "chance": 0.125,
        "majority": 0.2,
        "params": 91234,
        "config_hash": "0123456789ab",
        "versions": {"jax": "0.10.2"},
        "commit": "abc123",
        "data": "8 pairs",
        "command": "python eval.py --workdir=runs/a",
    }
    return row | changes


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    """Returns a function that makes a valid row with some keys changed."""
    return _row


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes rows (or raw lines) to a run's results.jsonl."""

    def write(name: str, *rows: dict[str, Any] | str) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / "results.jsonl").write_text("\n".join(lines) + ("\n" if lines else ""))
        return folder

    return write
