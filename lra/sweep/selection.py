"""Which learning rate a setting is run with: the best on validation."""

from __future__ import annotations

import dataclasses
import statistics
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
        runs: names of the runs, one a seed.
        accuracy, loss: means over these of their best checkpoints; None if one failed.
        accuracy_se: standard error of the accuracy: over the seeds, or over examples where there is one.
        n: validation examples.
        failed: the last line of a run that failed.
    """

    rate: float | None
    runs: tuple[str, ...]
    accuracy: float | None = None
    accuracy_se: float | None = None
    loss: float | None = None
    n: int | None = None
    failed: str | None = None


def measured(run: Run, workdir: Path, failures: Mapping[str, str]) -> dict[str, Any] | str:
    """The validation row of a run's best checkpoint; of a run that failed, its last line.

    Args:
        run: that has ended.
        workdir: the sweep's directory.
        failures: last line of each run that failed, by its name.
    """
    row: dict[str, Any] | None = best_validation(workdir / run.name)
    if run.name in failures or row is None:
        return failures.get(run.name, "no validation row in metrics.jsonl")
    return row


def candidates(runs: Sequence[Run], results: Mapping[str, dict[str, Any] | str]) -> list[Candidate]:
    """What each rate reached.

    Args:
        runs: of every rate with every seed of the search.
        results: what `measured` gives, by name.
    """
    found = []
    for rate in dict.fromkeys(run.rate for run in runs):
        names = tuple(run.name for run in runs if run.rate == rate)
        rows = [results[name] for name in names]
        failed = next((row for row in rows if isinstance(row, str)), None)
        if failed is not None:
            found.append(Candidate(rate, names, failed=failed))
            continue
        sound = [row for row in rows if not isinstance(row, str)]
        accuracies = [row.get("accuracy") or 0.0 for row in sound]
        spread = sound[0].get("accuracy_se")
        if len(sound) > 1:
            spread = statistics.stdev(accuracies) / len(sound) ** 0.5
        loss = statistics.fmean(row.get("loss") or 0.0 for row in sound)
        accuracy = statistics.fmean(accuracies)
        found.append(Candidate(rate, names, accuracy, spread, loss, sound[0].get("n")))
    return found


def choose(found: Sequence[Candidate]) -> Candidate | None:
    """Highest mean validation accuracy, then lower loss, then lower rate; None if every one failed."""
    sound = [c for c in found if c.failed is None]
    return max(
        sound,
        key=lambda c: (c.accuracy or 0.0, -(c.loss or 0.0), -(c.rate or 0.0)),
        default=None,
    )
