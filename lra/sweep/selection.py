"""Which learning rate a setting is run with: the best on validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lra.sweep.job import best_validation
from lra.sweep.plan import Run


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A rate that was tried, and what it reached on validation.

    Attributes:
        rate: learning rate.
        run: the run's name.
        step, accuracy, accuracy_se, loss, n: of the run's best checkpoint; None if it failed.
        failed: the last line of a run that failed.
    """

    rate: float | None
    run: str
    step: int | None = None
    accuracy: float | None = None
    accuracy_se: float | None = None
    loss: float | None = None
    n: int | None = None
    failed: str | None = None


def candidates(runs: Sequence[Run], workdir: Path, failures: Mapping[str, str]) -> list[Candidate]:
    """What each rate reached with the first seed.

    Args:
        runs: one for each rate; all have ended.
        workdir: the sweep's directory.
        failures: last line of each run that failed, by its name.
    """
    found = []
    for run in runs:
        row: dict[str, Any] | None = best_validation(workdir / run.name)
        if run.name in failures or row is None:
            told = failures.get(run.name, "no validation row in metrics.jsonl")
            found.append(Candidate(run.rate, run.name, failed=told))
            continue
        keys = ("step", "accuracy", "accuracy_se", "loss", "n")
        found.append(Candidate(run.rate, run.name, **{key: row.get(key) for key in keys}))
    return found


def choose(found: Sequence[Candidate]) -> Candidate | None:
    """Highest validation accuracy, then lower loss, then lower rate; None if every one failed."""
    sound = [c for c in found if c.failed is None]
    return max(
        sound,
        key=lambda c: (c.accuracy or 0.0, -(c.loss or 0.0), -(c.rate or 0.0)),
        default=None,
    )
