"""Takes a sweep from its runs to its results: search, choice, all seeds, test."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lra.files import write_whole
from lra.names import told_seeds
from lra.progress import Progress
from lra.signals import StopRequest
from lra.sweep.grid import Sweep
from lra.sweep.job import Job, Outcome, is_done, is_evaluated, last_lines, make_job
from lra.sweep.plan import Run, is_search, planned
from lra.sweep.selection import Candidate, candidates, choose, measured

#: What the report knows of a sweep: its runs, their states, and what was chosen from what.
SWEEP_FILE = "sweep.json"
#: How often a run may be stopped from outside (preemption) and go on within one sweep.
PREEMPTIONS = 20
#: Exit status of a command that has said what is wrong: trying again would say it again.
EXPLAINED = 2


@runtime_checkable
class Executor(Protocol):
    """Where jobs run."""

    slots: int

    def submit(self, job: Job) -> None:
        """Starts a job."""
        ...

    def outcome(self, name: str) -> Outcome | None:
        """How a job ended; None while it goes on."""
        ...

    def stop(self) -> None:
        """Asks the jobs to save and end."""
        ...


@dataclasses.dataclass
class _Item:
    """A run and how far it is. States: left, running, done, failed, not chosen."""

    run: Run
    job: Job
    search: bool
    state: str = "left"
    attempts: int = 0
    stops: int = 0
    reason: str = ""


class Driver:
    """Runs a sweep.

    Args:
        sweep: the grid.
        groups: its runs by setting, from `expand`.
        workdir: the sweep's directory; each run gets a folder in it.
        extra: keys under `run` for every run.
        retries: how often a failed run is tried again.
        facts: stored with the sweep: file, command, commit.
    """

    def __init__(
        self,
        sweep: Sweep,
        groups: Sequence[Sequence[Run]],
        workdir: Path,
        extra: Mapping[str, str],
        retries: int,
        facts: Mapping[str, Any],
    ):
        self._sweep, self._groups, self._workdir = sweep, groups, workdir
        self._extra, self._retries, self._facts = extra, retries, facts
        self._items: dict[str, _Item] = {}
        self._pending: collections.deque[_Item] = collections.deque()
        self._chosen: dict[int, tuple[list[Candidate], Candidate | None]] = {}
        self._tried = sweep.seeds[: sweep.search_seeds]
        self._searching = [is_search(runs) for runs in groups]
        for runs, search in zip(groups, self._searching, strict=True):
            for run in runs:
                if not search:
                    self._add(run, search=False)
                elif run.seed in self._tried:
                    self._add(run, search=True)
        for index in range(len(groups)):
            self._choose(index)

    def _add(self, run: Run, *, search: bool) -> None:
        """Puts a run on the list, or notes that it is done."""
        job = make_job(run, self._workdir, self._extra, self._sweep.split, test=not search)
        item = _Item(run, job, search)
        self._items[run.name] = item
        if is_done(job):
            item.state = "done"
        else:
            self._pending.append(item)

    def _choose(self, index: int) -> None:
        """When every rate of a setting has ended, goes on with the best."""
        if not self._searching[index] or index in self._chosen:
            return
        runs = [r for r in self._groups[index] if r.seed in self._tried]
        items = [self._items[run.name] for run in runs]
        if any(item.state not in ("done", "failed") for item in items):
            return
        failures = {item.run.name: item.reason for item in items if item.state == "failed"}
        results = {run.name: measured(run, self._workdir, failures) for run in runs}
        for item in items:
            result = results[item.run.name]
            if isinstance(result, str) and item.state != "failed":
                item.state, item.reason = "failed", result
        found = candidates(runs, results)
        # Where runs of a rate have been tested, a rate that failed then and would win now comes too
        # late: test is read at one rate.
        tested = {
            run.rate
            for run in self._groups[index]
            if is_evaluated(self._workdir / run.name, run.lengths, self._sweep.split)
        }
        best = choose([c for c in found if not tested or c.rate in tested])
        self._chosen[index] = (found, best)
        for item in items:
            if best is None or item.run.rate != best.rate:
                item.state = item.state if item.state == "failed" else "not chosen"
        if best is not None:
            for run in self._groups[index]:
                if run.rate == best.rate:
                    self._add(run, search=False)

    @property
    def planned(self) -> int:
        """Runs that the sweep comes to."""
        return planned(self._sweep, self._groups)

    def counts(self) -> dict[str, int]:
        """Runs by state; what is not on the list yet is left."""
        states = collections.Counter(item.state for item in self._items.values())
        # A chosen run is one run, although it is trained in the search and tested after it.
        counts = {
            "done": states["done"] + states["not chosen"],
            "running": states["running"],
            "failed": states["failed"],
        }
        hopeless = sum(
            len(self._sweep.seeds) - len(self._tried)
            for _, best in self._chosen.values()
            if best is None
        )
        counts["left"] = self.planned - hopeless - sum(counts.values())
        return counts

    def run(self, executor: Executor, stop: StopRequest) -> None:
        """Until every run has ended, or `stop` is asked for and the running ones have."""
        running: dict[str, _Item] = {}
        counts = self.counts()
        progress = Progress("sweep", self.planned, initial=counts["done"], unit="runs")
        self._write()
        told = False
        with progress, contextlib.ExitStack() as last:
            last.callback(self._leave, running)
            while (self._pending and not stop.signal) or running:
                if stop.signal and not told:
                    told = True
                    progress.say("stopping: the runs under way save first")
                    executor.stop()
                while self._pending and len(running) < executor.slots and not stop.signal:
                    item = self._pending.popleft()
                    item.state = "running"
                    running[item.run.name] = item
                    executor.submit(item.job)
                    self._write()
                ended = [
                    (item, outcome)
                    for item in running.values()
                    if (outcome := executor.outcome(item.run.name)) is not None
                ]
                for item, outcome in ended:
                    del running[item.run.name]
                    self._end(item, outcome, progress, stopping=bool(stop.signal))
                    self._write()
                if not ended:
                    progress.update(self._note(running), by=0)
                    time.sleep(0.25)

    def _leave(self, running: Mapping[str, _Item]) -> None:
        """However it ends, nothing is called running after it."""
        for item in running.values():
            item.state = "left"
        self._write()

    def _end(self, item: _Item, outcome: Outcome, progress: Progress, *, stopping: bool) -> None:
        """Takes note of how a run ended; a failed one may be tried again."""
        name = item.run.name
        state, reason = outcome.state, ""
        if state == "done" and not is_done(item.job):
            # An earlier process handed in less of it.
            state = "stopped"
        if state == "stopped":
            item.stops += 1
            if not stopping and item.stops > PREEMPTIONS:
                state, reason = "failed", f"stopped {PREEMPTIONS} times by something else"
        elif state == "failed":
            item.attempts += 1
            reason = outcome.tail[-1] if outcome.tail else f"status {outcome.status}"
        again = state == "stopped" or (
            state == "failed"
            and outcome.state == "failed"
            and outcome.status != EXPLAINED
            and item.attempts <= self._retries
        )
        if stopping and state != "done":
            # The sweep's own end: the same command goes on with it.
            item.state = "left"
            return
        if again:
            item.state = "left"
            self._pending.append(item)
            what = f"failed (status {outcome.status})" if state == "failed" else "was stopped"
            progress.say(f"{name} {what}, is tried again")
            for line in outcome.tail:
                progress.say(f"    {line}")
            return
        item.state, item.reason = state, reason
        self._choose(item.run.setting)
        progress.update(by=self.counts()["done"] - progress.done)
        what = "trained" if item.search and state == "done" else state
        progress.say(f"{what}: {name} ({outcome.seconds:.0f} s); {self._told()}")
        for line in outcome.tail:
            progress.say(f"    {line}")

    def _told(self) -> str:
        return ", ".join(f"{number} {state}" for state, number in self.counts().items())

    def _note(self, running: Mapping[str, _Item]) -> str:
        """What runs, with the last line of the log of one of them."""
        counts = self._told()
        if not running:
            return counts
        names = list(running)
        name = names[int(time.monotonic() / 15) % len(names)]
        lines = [line for line in last_lines(self._workdir / name, 1) if not line.startswith("$")]
        return f"{counts}; {name}: {lines[0][:100] if lines else 'starting'}"

    @property
    def unfinished(self) -> int:
        """Runs that are left, because the sweep was stopped."""
        return self.counts()["left"]

    @property
    def failed(self) -> list[_Item]:
        """Runs that failed, after their retries."""
        return [item for item in self._items.values() if item.state == "failed"]

    def _write(self) -> None:
        """Stores states and choices, whole or not at all."""
        hopeless = {index for index, (_, best) in self._chosen.items() if best is None}
        runs = [
            {
                "name": item.run.name,
                "setting": item.run.setting,
                "named": self._sweep.settings[item.run.setting].told,
                "task": item.run.task,
                "stack": item.run.stack,
                "seed": item.run.seed,
                "rate": item.run.rate,
                "train_length": item.run.length,
                "lengths": list(item.run.lengths),
                "split": self._sweep.split,
                # Where every rate failed, nothing will be tested: those stand for it.
                "tested": not item.search or item.run.setting in hopeless,
                "state": item.state,
                "reason": item.reason,
                "attempts": item.attempts,
            }
            for item in self._items.values()
        ]
        selection = [
            {
                "task": self._groups[index][0].task,
                "stack": self._groups[index][0].stack,
                "setting": self._sweep.settings[index].label,
                "seeds": list(self._tried),
                "candidates": [dataclasses.asdict(c) for c in found],
                "chosen": best.rate if best else None,
            }
            for index, (found, best) in sorted(self._chosen.items())
        ]
        whole = {**self._facts, "runs": runs, "selection": selection}
        write_whole(self._workdir / SWEEP_FILE, json.dumps(whole, indent=1) + "\n")

    def summary(self) -> str:
        """What was done, chosen, and failed."""
        counts = self.counts()
        lines = [f"{self.planned} runs: " + ", ".join(f"{n} {s}" for s, n in counts.items() if n)]
        for index, (found, best) in sorted(self._chosen.items()):
            tried = ", ".join(
                f"{c.rate:g} failed"
                if c.failed
                else f"{c.rate:g} → {100 * (c.accuracy or 0):.2f} %"
                for c in found
            )
            took = f"rate {best.rate:g}" if best else "no rate, every one failed,"
            lines.append(
                f"{self._sweep.settings[index].label}: {took} of {tried} (validation, "
                f"{told_seeds(self._tried)})"
            )
        for item in self.failed:
            lines.append(
                f"failed: {item.run.name} (attempt {item.attempts}): {item.reason} "
                f"(log: {self._workdir / item.run.name / 'log.txt'})"
            )
        return "\n".join(lines)
