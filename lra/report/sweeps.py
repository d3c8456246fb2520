"""What sweeps planned and chose: read from sweep.json, so that what is missing has a row."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lra.names import told_seeds
from lra.report.read import find_files

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Planned:
    """A run that a sweep means to test.

    Attributes:
        folder: Where it runs; its results file is in there.
        setting: The sweep's file and the number of the setting in it.
        named: What tells the setting from others of its stack: `model.dtype=bfloat16`; may be "".
        lengths: Evaluation lengths in tokens.
        state: `done`, `failed`, `left`, or `running or interrupted`.
        reason: Of a failed run: the last line it said.
    """

    folder: str
    setting: tuple[str, int]
    named: str
    task: str
    stack: str
    split: str
    train_length: int
    lengths: tuple[int, ...]
    seed: int
    rate: float | None
    state: str
    reason: str

    @property
    def name(self) -> str:
        return Path(self.folder).name


@dataclass(frozen=True)
class Choice:
    """The learning rate of a setting, and what it was chosen from on validation.

    Attributes:
        seeds: those that every rate was tried with.
        tried: `(rate, accuracy, standard error, examples, what failed)` of each rate; the error is over
            the seeds, or over examples where there is one.
        chosen: The rate; None if every one failed.
    """

    task: str
    stack: str
    setting: str
    seeds: tuple[int, ...]
    tried: tuple[tuple[float, float | None, float | None, int | None, str | None], ...]
    chosen: float | None


@dataclass(frozen=True)
class Plans:
    """All sweeps of a report."""

    planned: tuple[Planned, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def without_result(self) -> tuple[Planned, ...]:
        """Runs that are to be tested and are not."""
        return tuple(run for run in self.planned if run.state != "done")


def read_plans(dirs: Iterable[Path], notices: list[str]) -> Plans:
    """Every sweep.json at or below `dirs`.

    Args:
        dirs: Directories to search.
        notices: Receives a line for every file that cannot be used.

    Raises:
        ReportError: One of `dirs` is not a directory.
    """
    planned: list[Planned] = []
    choices: list[Choice] = []
    for path in find_files(dirs, SWEEP_FILE, []):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            runs = [_planned(path, run) for run in stored["runs"] if run["tested"]]
            chosen = [_choice(entry) for entry in stored["selection"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notices.append(f"{path}: sweep left out: {type(error).__name__}: {error}")
            continue
        planned += runs
        choices += chosen
    return Plans(tuple(planned), tuple(choices))


def _planned(path: Path, run: Mapping[str, Any]) -> Planned:
    return Planned(
        folder=str(path.parent / str(run["name"])),
        setting=(str(path), int(run["setting"])),
        named=str(run["named"]),
        task=str(run["task"]),
        stack=str(run["stack"]),
        split=str(run["split"]),
        train_length=int(run["train_length"]),
        lengths=tuple(int(n) for n in run["lengths"]),
        seed=int(run["seed"]),
        rate=None if run["rate"] is None else float(run["rate"]),
        # A sweep that was killed says so for ever.
        state="running or interrupted" if run["state"] == "running" else str(run["state"]),
        reason=str(run["reason"]),
    )


def _choice(entry: Mapping[str, Any]) -> Choice:
    def tried(c: Mapping[str, Any]) -> tuple[Any, ...]:
        return (float(c["rate"]), c["accuracy"], c["accuracy_se"], c["n"], c["failed"])

    return Choice(
        task=str(entry["task"]),
        stack=str(entry["stack"]),
        setting=str(entry["setting"]),
        seeds=tuple(int(seed) for seed in entry["seeds"]),
        tried=tuple(tried(c) for c in entry["candidates"]),
        chosen=None if entry["chosen"] is None else float(entry["chosen"]),
    )


def choice_grid(choices: Sequence[Choice]) -> list[list[str]]:
    """The choices as cells of unescaped text, the header first; accuracies in percent."""
    body = [["task", "stack", "setting", "chosen rate", "tried (validation accuracy, %)"]]
    for choice in choices:
        told = []
        for rate, accuracy, se, n, failed in choice.tried:
            if failed is not None or accuracy is None:
                told.append(f"{rate:g}: failed ({failed or 'no accuracy'})")
            else:
                spread = "" if se is None else f" ± {100 * se:.2f}"
                over = f"n = {n}" if len(choice.seeds) == 1 else told_seeds(choice.seeds)
                told.append(f"{rate:g}: {100 * accuracy:.2f}{spread} ({over})")
        chosen = "none, every rate failed" if choice.chosen is None else f"{choice.chosen:g}"
        rates = [rate for rate, *_ in choice.tried]
        if len(rates) > 1 and choice.chosen in (min(rates), max(rates)):
            # The best may lie beyond what was tried.
            chosen += f" (the {'smallest' if choice.chosen == min(rates) else 'largest'} tried)"
        body.append([choice.task, choice.stack, choice.setting, chosen, "; ".join(told)])
    return body


def missing_grid(plans: Plans) -> list[list[str]]:
    """Runs without a result as cells of unescaped text, the header first."""
    body = [["task", "stack", "seed", "run", "state", "what it said"]]
    for run in plans.without_result:
        body.append(
            [run.task, run.stack, str(run.seed), run.name, run.state, run.reason or "nothing"]
        )
    return body
