"""Rows to tables: grouped by what may be compared, averaged over seeds."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from lra.report.configs import differences
from lra.report.rows import CHECKPOINTS, VIEWS, Row
from lra.report.sweeps import Planned

#: Config hashes of the rows that the runs of a sweep's setting gave.
_Hashes = dict[tuple[str, int], set[str]]


class Group(NamedTuple):
    """What all numbers of one table share."""

    task: str
    split: str
    view: str
    train_length: int
    data: str


class Column(NamedTuple):
    """One evaluation length, or one bin of example lengths, in tokens."""

    eval_length: int
    bin: tuple[int, int | None] | None
    label: str


class Range(NamedTuple):
    """Smallest and largest of the values that should agree; counts stay integers."""

    low: int | float
    high: int | float


@dataclass(frozen=True)
class Cell:
    """Accuracy of one setting at one column.

    Attributes:
        mean: Mean accuracy over seeds, a fraction; None when no seed has a value.
        se: Standard error of the mean, a fraction; None when it is unknown.
        se_over: What `se` is taken over: "seeds", "examples" (one seed), or "none".
        seeds: The seeds that have a value here.
        n: Test examples of each of these seeds; None when no row was there at all.
        loss: Mean loss over the seeds that have one, or None.
        chance, majority: Reference accuracies that the rows of this cell state.
    """

    mean: float | None
    se: float | None
    se_over: str
    seeds: tuple[int, ...]
    n: Range | None
    loss: float | None
    chance: Range | None
    majority: Range | None


@dataclass(frozen=True)
class Cost:
    """What a setting costs at its training length; None where no row says it.

    Attributes:
        state_floats: Numbers that the attention layers keep of one example.
        mixing_flops: Floating-point operations of their mixing, per token.
        step_ms: Milliseconds of a training step, the median over a run; input and saving included.
        temporary_bytes: Memory that the compiled step needs beside parameters and data.
    """

    state_floats: Range | None = None
    mixing_flops: Range | None = None
    step_ms: Range | None = None
    temporary_bytes: Range | None = None


COSTS = tuple(field.name for field in fields(Cost))


@dataclass(frozen=True)
class Line:
    """One setting: an attention stack with its configuration, at one kind of checkpoint.

    Attributes:
        params: None where no run of the setting has a result.
        seeds: Those of its rows, and those that a sweep planned.
    """

    label: str
    stack: str
    config_hash: str
    checkpoint: str
    params: Range | None
    cost: Cost
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Provenance:
    """Where the rows of a table come from; more than one value means that they are mixed.

    Attributes:
        commits: Commit ("unknown" where a row has none) to number of rows.
        versions: Package to its versions ("unknown" where a row does not state it).
        commands: The commands that produced the rows.
    """

    commits: dict[str, int]
    versions: dict[str, tuple[str, ...]]
    commands: tuple[str, ...]

    @property
    def mixed(self) -> tuple[str, ...]:
        """One sentence for everything that differs between the rows."""
        several = ["commits"] if len(self.commits) > 1 else []
        several += [f"{name} versions" for name, found in self.versions.items() if len(found) > 1]
        return tuple(f"mixed: rows of different {what}" for what in several)


@dataclass(frozen=True)
class Table:
    """One comparison. `examples`, `chance` and `majority` have one entry for every column."""

    group: Group
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    examples: tuple[Range | None, ...]
    chance: tuple[Range | None, ...]
    majority: tuple[Range | None, ...]
    notes: tuple[str, ...]
    provenance: Provenance


def value_range(values: Iterable[int | float | None]) -> Range | None:
    """Smallest and largest of the values that are not None, or None if all are."""
    present = [value for value in values if value is not None]
    return Range(min(present), max(present)) if present else None


def make_cell(rows: Sequence[Row]) -> Cell:
    """Mean over seeds and its standard error: sd (n-1) / sqrt(number of seeds).

    Args:
        rows: The rows of one setting and column, at most one for each seed.

    Returns:
        The cell. With a single seed `se` is that row's standard error over test examples.
    """
    scored = [(row, row.accuracy) for row in rows if row.accuracy is not None]
    accuracies = [accuracy for _, accuracy in scored]
    losses = [row.loss for row in rows if row.loss is not None]
    mean, se, se_over = None, None, "none"
    if len(scored) > 1:
        mean = statistics.fmean(accuracies)
        se, se_over = statistics.stdev(accuracies) / math.sqrt(len(scored)), "seeds"
    elif scored:
        mean, se = accuracies[0], scored[0][0].accuracy_se
        se_over = "none" if se is None else "examples"
    return Cell(
        mean=mean,
        se=se,
        se_over=se_over,
        seeds=tuple(sorted(row.seed for row, _ in scored)),
        n=value_range(row.n for row in rows),
        loss=statistics.fmean(losses) if losses else None,
        chance=value_range(row.chance for row in rows),
        majority=value_range(row.majority for row in rows),
    )


def make_cost(rows: Sequence[Row]) -> Cost:
    """The costs that rows of one setting state; state and FLOPs are those at its training length."""
    own = [row for row in rows if row.eval_length == row.train_length]
    return Cost(
        state_floats=value_range(row.state_floats for row in own),
        mixing_flops=value_range(row.mixing_flops for row in own),
        step_ms=value_range(row.step_ms for row in rows),
        temporary_bytes=value_range(row.temporary_bytes for row in rows),
    )


def bin_label(low: int, high: int | None) -> str:
    """`256-511` for 256 <= length < 512, `1024+` where there is no upper end."""
    if high is None:
        return f"{low}+"
    return f"{low}-{high - 1}" if high - 1 > low else f"{low}"


def make_columns(rows: Iterable[Row]) -> tuple[Column, ...]:
    """The columns of a table, by length; a bin evaluated at two lengths is two columns."""

    def order(column: tuple[int, tuple[int, int | None] | None]) -> tuple[int | float, ...]:
        length, bounds = column
        low, high = bounds or (0, 0)
        return (low, math.inf if high is None else high, length)

    found = sorted({row.column for row in rows}, key=order)
    repeats = Counter(bounds for _, bounds in found)
    columns = []
    for length, bounds in found:
        label = str(length) if bounds is None else bin_label(*bounds)
        if bounds is not None and repeats[bounds] > 1:
            label += f" at {length}"
        columns.append(Column(length, bounds, label))
    return tuple(columns)


def _short_hashes(hashes: Iterable[str]) -> dict[str, str]:
    """The shortest prefixes, of 6 characters at least, that tell the hashes apart."""
    hashes = sorted(set(hashes))
    length = 6
    while len({full[:length] for full in hashes}) < len(hashes):
        length += 1
    return {full: full[:length] for full in hashes}


def make_provenance(rows: Sequence[Row]) -> Provenance:
    """Collects commits, package versions and commands."""
    commits = Counter(row.commit or "unknown" for row in rows)
    stated = [dict(row.versions) for row in rows]
    names = sorted({name for versions in stated for name in versions})
    return Provenance(
        commits=dict(sorted(commits.items())),
        versions={
            name: tuple(sorted({versions.get(name, "unknown") for versions in stated}))
            for name in names
        },
        commands=tuple(sorted({row.command for row in rows if row.command})),
    )


def _notes(
    lines: Sequence[Line], several: dict[str, int], examples: Sequence[Range | None]
) -> tuple[str, ...]:
    cells = [cell for line in lines for cell in line.cells]
    kinds = {cell.se_over for cell in cells}
    notes = []
    if "seeds" in kinds:
        notes.append("± is the standard error over seeds: sd (n-1) / sqrt(seeds)")
    if "examples" in kinds:
        notes.append("† one seed: ± is the standard error over test examples")
    if any(cell.mean is not None and cell.se is None for cell in cells):
        notes.append("± unknown: one seed, and its row states no standard error")
    if any(cell.mean is None for cell in cells):
        notes.append("missing: no row, or a row without examples")
    notes += [
        f"{stack} has {count} configurations, told apart by the start of their config hash"
        for stack, count in sorted(several.items())
        if any(line.stack == stack and line.label.endswith("]") for line in lines)
    ]
    if any(found is not None and found.low != found.high for found in examples):
        notes.append("the number of test examples differs between rows of one column")
    return tuple(notes)


def _label(stack: str, named: str | None, short: str | None) -> str:
    """The stack, and what tells this configuration from others of it."""
    if named:
        return f"{stack} ({named})"
    return f"{stack} [{short}]" if short else stack


def _missing_notes(missing: Iterable[Planned]) -> list[str]:
    """Why runs that a sweep planned are not in a table."""
    told = []
    for run in missing:
        reason = f": {run.reason}" if run.reason else ""
        told.append(f"{run.stack}, seed {run.seed}: {run.state}{reason} ({run.name})")
    return told


def _make_table(
    group: Group,
    rows: Sequence[Row],
    planned: Sequence[Planned],
    hashes_of: _Hashes,
    there: set[str],
) -> Table:
    columns = make_columns(rows) or tuple(
        Column(length, None, str(length))
        for length in sorted({n for run in planned for n in run.lengths})
    )
    missing = [run for run in planned if Path(run.folder).as_posix() not in there]
    absent: dict[tuple[str, str, int], list[Planned]] = defaultdict(list)
    known: dict[str, set[int]] = defaultdict(set)
    for run in missing:
        if run.setting in hashes_of:
            for config_hash in hashes_of[run.setting]:
                known[config_hash].add(run.seed)
        else:
            absent[(run.stack, *run.setting)].append(run)
    hashes: dict[str, set[str]] = defaultdict(set)
    settings: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        hashes[row.stack].add(row.config_hash)
        settings[row.stack, row.config_hash, row.checkpoint].append(row)
    several = {stack: len(found) for stack, found in hashes.items() if len(found) > 1}
    short = {stack: _short_hashes(hashes[stack]) for stack in several}
    named: dict[str, str] = {}
    for stack in several:
        own = {row.config_hash: Path(row.file).parent for row in rows if row.stack == stack}
        named |= differences(own)
    lines = []
    for (stack, config_hash, checkpoint), own in sorted(
        settings.items(), key=lambda item: (*item[0][:2], CHECKPOINTS.index(item[0][2]))
    ):
        at: dict[tuple[object, ...], list[Row]] = defaultdict(list)
        for row in own:
            at[row.column].append(row)
        lines.append(
            Line(
                label=_label(stack, named.get(config_hash), short.get(stack, {}).get(config_hash)),
                stack=stack,
                config_hash=config_hash,
                checkpoint=checkpoint,
                params=value_range(row.params for row in own),
                cost=make_cost(own),
                seeds=tuple(sorted({row.seed for row in own} | known[config_hash])),
                cells=tuple(make_cell(at[column[:2]]) for column in columns),
            )
        )
    for (stack, _, _), runs in sorted(absent.items()):
        lines.append(
            Line(
                label=_label(stack, runs[0].named, None),
                stack=stack,
                config_hash="",
                checkpoint="best",
                params=None,
                cost=Cost(),
                seeds=tuple(sorted(run.seed for run in runs)),
                cells=tuple(make_cell([]) for _ in columns),
            )
        )
    of_column = [[row for row in rows if row.column == column[:2]] for column in columns]
    examples = tuple(value_range(row.n for row in own) for own in of_column)
    return Table(
        group=group,
        columns=columns,
        lines=tuple(lines),
        examples=examples,
        chance=tuple(value_range(row.chance for row in own) for own in of_column),
        majority=tuple(value_range(row.majority for row in own) for own in of_column),
        notes=(*_notes(lines, several, examples), *_missing_notes(missing)),
        provenance=make_provenance(rows),
    )


def make_tables(rows: Iterable[Row], planned: Iterable[Planned] = ()) -> list[Table]:
    """One table for every (task, split, view, train length, data variant).

    Args:
        rows: Rows without duplicates.
        planned: Runs of sweeps that are to be tested; those without rows are shown as missing.

    Returns:
        The tables by task, split, train length, view and data, their lines by stack, config hash
        and checkpoint kind.
    """
    groups: dict[Group, list[Row]] = defaultdict(list)
    hash_of: dict[str, str] = {}
    there: dict[str, set[str]] = defaultdict(set)  # folders that have rows, by split
    for row in rows:
        there[row.split].add(Path(row.file).parent.as_posix())
        groups[Group(row.task, row.split, row.view, row.train_length, row.data)].append(row)
        hash_of[Path(row.file).parent.as_posix()] = row.config_hash
    plans: dict[tuple[str, str, int], list[Planned]] = defaultdict(list)
    hashes_of: _Hashes = defaultdict(set)
    for run in planned:
        plans[run.task, run.split, run.train_length].append(run)
        if own := hash_of.get(Path(run.folder).as_posix()):
            hashes_of[run.setting].add(own)
    tabled = {(group.task, group.split, group.train_length) for group in groups}
    for task, split, length in plans.keys() - tabled:
        groups[Group(task, split, "length", length, "")] = []

    def order(group: Group) -> tuple[object, ...]:
        view = VIEWS.index(group.view)
        return (group.task, group.split, group.train_length, view, group.data)

    return [
        _make_table(
            group,
            groups[group],
            plans[group.task, group.split, group.train_length],
            hashes_of,
            there[group.split],
        )
        for group in sorted(groups, key=order)
    ]
