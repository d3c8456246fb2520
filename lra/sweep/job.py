"""One run of a sweep as processes: train.py, then eval.py, under the run's lock."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lra.errors import UserError
from lra.jsonl import read_rows
from lra.lifeline import Lifeline
from lra.sweep.plan import ROOT, Run

LOG = "log.txt"
#: Statuses of a process that was asked to end and saved first.
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)
#: Seconds a process has to save after it was asked to end.
GRACE = 60.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process, here or on a cluster, has to do for a run.

    Attributes:
        name: the run's.
        workdir: the run's directory.
        train: the command that trains it, without the interpreter.
        evaluate: the command that evaluates it; () to train only.
        lengths: evaluation lengths that must be there.
        split: what is evaluated.
    """

    name: str
    workdir: str
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    lengths: tuple[int, ...]
    split: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: exit status of its last process; negative for a signal that killed it.
        seconds: that it ran.
        tail: the last lines of its log, if it failed.
    """

    status: int
    seconds: float
    tail: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """`done`, `stopped` (asked to end) or `failed`."""
        if self.status == 0:
            return "done"
        return "stopped" if self.status in STOPPED else "failed"


def make_job(run: Run, workdir: Path, extra: Mapping[str, str], split: str, test: bool) -> Job:
    """The job that trains a run and, if `test`, reads the split that results are reported on."""
    folder = workdir / run.name
    shown = folder.resolve()
    if shown.is_relative_to(ROOT):
        shown = shown.relative_to(ROOT)  # jobs run there, and results name their commands
    evaluate: tuple[str, ...] = ()
    if test:
        lengths = ",".join(map(str, run.lengths))
        evaluate = ("eval.py", f"--workdir={shown}", f"--lengths={lengths}", f"--split={split}")
    return Job(
        name=run.name,
        workdir=str(folder.resolve()),
        train=tuple(run.train_command(shown, extra)),
        evaluate=evaluate,
        lengths=run.lengths,
        split=split,
    )


def is_trained(workdir: Path) -> bool:
    """Whether the run's last step is done and saved."""
    return (workdir / "finished.json").is_file()


def is_evaluated(workdir: Path, lengths: tuple[int, ...], split: str) -> bool:
    """Whether results of the best checkpoint, over all examples, are there for every length."""
    path = workdir / "results.jsonl"
    if not path.is_file():
        return False
    try:
        rows = read_rows(path)
    except UserError:
        return False
    there = {
        row.get("eval_length")
        for row in rows
        if row.get("split") == split and row.get("checkpoint") == "best" and not row.get("limit")
    }
    return set(lengths) <= there


def is_done(job: Job) -> bool:
    """Whether nothing of a job is left to do."""
    workdir = Path(job.workdir)
    if not is_trained(workdir):
        return False
    return not job.evaluate or is_evaluated(workdir, job.lengths, job.split)


def last_lines(workdir: Path, count: int = 5) -> tuple[str, ...]:
    """The end of a run's log."""
    try:
        with (workdir / LOG).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 8192, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple([line for line in text.splitlines() if line.strip()][-count:])


def run_job(job: Job, lifeline: Lifeline, stop: threading.Event) -> Outcome:
    """Trains and evaluates, as far as that is not done; returns when the processes have ended.

    The run's lock passes to the processes, so that it is held until the last of them is gone, even
    after this process was killed: who starts the same sweep again waits for it here.

    Args:
        job: what to do.
        lifeline: the processes end with the process that made it.
        stop: asks them to save and end.
    """
    began = time.monotonic()
    try:
        status = _locked(job, lifeline, stop)
    except OSError as error:
        # A full disk, or something else in the run's place: this run's failure and not the others'.
        return Outcome(1, time.monotonic() - began, (f"error: {error}",))
    failed = status and status not in STOPPED
    tail = last_lines(Path(job.workdir)) if failed else ()
    return Outcome(status, time.monotonic() - began, tail)


def _locked(job: Job, lifeline: Lifeline, stop: threading.Event) -> int:
    """`run_job`'s commands under the run's lock; the status of the last."""
    workdir = Path(job.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    handle = os.open(workdir / "job.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not stop.is_set():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(0.2)
        status = 0
        for command in (job.train, job.evaluate):
            done = is_trained(workdir) if command is job.train else is_done(job)
            if stop.is_set():
                status = 128 + signal.SIGTERM
            elif command and not done:
                status = _run(command, workdir, handle, lifeline, stop)
            if status:
                break
    finally:
        os.close(handle)
    return status


def _run(
    command: tuple[str, ...], workdir: Path, lock: int, lifeline: Lifeline, stop: threading.Event
) -> int:
    """One process to its end; its output goes to the run's log."""
    with (workdir / LOG).open("ab") as log:
        log.write(f"$ python {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **lifeline.environment(), "PYTHONUNBUFFERED": "1"},
            pass_fds=(lock, lifeline.read),
            # Ctrl-C reaches the sweep alone, which asks each process once.
            start_new_session=True,
        )
    asked = 0.0
    while (status := process.poll()) is None:
        if stop.is_set() and not asked:
            asked = time.monotonic()
            process.terminate()
        if asked and time.monotonic() - asked > GRACE:
            process.kill()
        time.sleep(0.05)
    return 128 + signal.SIGTERM if asked and status else status


def best_validation(workdir: Path) -> dict[str, Any] | None:
    """The validation row of the checkpoint that is called best; None if there is none.

    Accuracy, then the lower loss, then the later step, as checkpoints are ranked.
    """
    try:
        rows = read_rows(workdir / "metrics.jsonl")
    except (OSError, UserError):
        return None
    measured = [
        row
        for row in rows
        if row.get("split") == "validation"
        and all(isinstance(row.get(key), int | float) for key in ("accuracy", "loss", "step"))
    ]
    return max(measured, key=lambda r: (r["accuracy"], -r["loss"], r["step"]), default=None)
