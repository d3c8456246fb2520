"""Jobs through submitit: SLURM, or its local and debug executors."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from lra.errors import UserError
from lra.files import write_whole
from lra.lifeline import Lifeline
from lra.sweep.job import Job, Outcome, is_done, last_lines, run_job

CLUSTERS = ("slurm", "local", "debug")
#: Ids of the jobs that were handed in, by the run's name, in the sweep's `cluster` folder.
JOBS_FILE = "jobs.json"
#: States in which the scheduler may still start or go on with a job.
_ALIVE = ("READY", "PENDING", "RUNNING", "REQUEUED", "COMPLETING", "PREEMPTED")


class Task:
    """What a cluster's node does for a job; handed in again when it is preempted or out of time."""

    def __init__(self, job: Job):
        self.job = job
        self._stop: threading.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "_stop": None}

    def __call__(self) -> tuple[int, float, tuple[str, ...]]:
        """Runs the job here."""
        self._stop = threading.Event()
        lifeline = Lifeline()
        try:
            outcome = run_job(self.job, lifeline, self._stop)
        finally:
            lifeline.close()
        return outcome.status, outcome.seconds, outcome.tail

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """submitit's hook for preemption and timeouts: the run saves and goes on where it was."""
        return submitit.helpers.DelayedSubmission(Task(self.job))


class ClusterExecutor:
    """Hands jobs to submitit, and finds those again that an earlier sweep process handed in.

    Args:
        folder: where submitit keeps its files; every node must see it.
        cluster: one of `CLUSTERS`.
        slots: jobs that are handed in at once.
        parameters: of `submitit.AutoExecutor.update_parameters`.

    Raises:
        UserError: if the cluster is not there, or refuses a parameter.
    """

    def __init__(self, folder: Path, cluster: str, slots: int, parameters: Mapping[str, Any]):
        self.slots = slots
        self._folder, self._cluster = folder, cluster
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (RuntimeError, ValueError, NameError, TypeError) as error:
            raise UserError(f"--cluster={cluster}: {error}") from error
        self._handles: dict[str, tuple[Job, submitit.Job[Any]]] = {}
        self._ids: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self._ids = json.loads((folder / JOBS_FILE).read_text())

    def submit(self, job: Job) -> None:
        """Hands a job in, unless it is under way already."""
        handle = self._attach(job)
        if handle is None:
            handle = self._executor.submit(Task(job))
            self._ids[job.name] = handle.job_id
            write_whole(self._folder / JOBS_FILE, json.dumps(self._ids, indent=1) + "\n")
        self._handles[job.name] = (job, handle)

    def _attach(self, job: Job) -> submitit.Job[Any] | None:
        """The job of an earlier sweep process, if the scheduler still knows it as alive."""
        if self._cluster != "slurm" or job.name not in self._ids or job.name in self._handles:
            return None
        handle = submitit.SlurmJob(self._folder, self._ids[job.name])
        return handle if handle.get_info(mode="force") and handle.state in _ALIVE else None

    def outcome(self, name: str) -> Outcome | None:
        """How a job ended; None while it goes on."""
        job, handle = self._handles[name]
        if self._cluster != "debug" and not handle.done():
            return None
        try:
            return Outcome(*handle.result())
        except (UncompletedJobError, FailedJobError) as error:
            if is_done(job):
                return Outcome(0, 0.0)
            lines = last_lines(Path(job.workdir))
            return Outcome(1, 0.0, (*lines, " ".join(str(error).split())[:300]))

    def stop(self) -> None:
        """Cancels what was handed in and has not ended; the scheduler's SIGTERM makes runs save."""
        for _, handle in self._handles.values():
            if not handle.done():
                handle.cancel(check=False)

    def close(self) -> None:
        """Nothing to end here: jobs belong to the scheduler."""
