"""Jobs through submitit: SLURM, or its local and debug executors."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# submitit's own logging setup would write beside the progress, and holds on to the streams it met.
os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from lra.errors import UserError
from lra.files import write_whole
from lra.lifeline import Lifeline
from lra.sweep.job import GRACE, STOPPED, Job, Outcome, is_done, last_lines, run_job

#: Ids of the jobs that were handed in, in the sweep's `cluster` folder: by the run's name, with a
#: digest of what the job was to do.
JOBS_FILE = "jobs.json"
#: States in which the scheduler may still start or go on with a job.
_ALIVE = ("READY", "PENDING", "RUNNING", "REQUEUED", "COMPLETING", "PREEMPTED", "SUSPENDED")
#: States of jobs that something other than the run ended.
_STOPPED = ("CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "TIMEOUT", "REVOKED")
#: How often the scheduler is asked for a job that it does not know, before it is taken as gone.
_ASKED = 3


class Task:
    """What a cluster's node does for a job; handed in again when it is preempted or out of time.

    The job runs in a thread, so that the main one, which signals reach, can ask it to stop and wait
    until its process has saved.

    Args:
        job: what to do.
        owner: a process of this machine that the job ends with; 0 for none.
    """

    def __init__(self, job: Job, owner: int = 0):
        self.job = job
        self._owner = owner
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "_owner": self._owner, "_stop": None, "_thread": None}

    def __call__(self) -> tuple[int, float, tuple[str, ...]]:
        """Runs the job here."""
        stop, lifeline, found = threading.Event(), Lifeline(), []
        self._stop = stop
        self._thread = threading.Thread(
            target=lambda: found.append(run_job(self.job, lifeline, stop))
        )
        own_process = "SUBMITIT_DEBUG_JOB_ID" not in os.environ
        before = signal.getsignal(signal.SIGTERM)
        if own_process:
            # submitit ignores SIGTERM, with which schedulers announce the end of a cancelled job.
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(1)
                if self._owner and not _alive(self._owner):
                    stop.set()
        finally:
            if own_process:
                signal.signal(signal.SIGTERM, before)
            lifeline.close()
        if not found:
            raise RuntimeError(f"the job of {self.job.name} ended without an outcome")
        return found[0].status, found[0].seconds, found[0].tail

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """submitit's hook for preemption and timeouts: the run saves, and goes on where it was."""
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join(GRACE + 10)
        return submitit.helpers.DelayedSubmission(Task(self.job, self._owner))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _digest(job: Job) -> str:
    return hashlib.sha256(repr(job).encode()).hexdigest()[:12]


class ClusterExecutor:
    """Hands jobs to submitit, and finds those on SLURM that an earlier sweep process handed in.

    Args:
        folder: where submitit keeps its files; every node must see it.
        cluster: "slurm"; "local", whose jobs end with this process; or "debug", which runs one at a time
            in this process and can be stopped between them.
        slots: jobs that are handed in at once.
        parameters: of `submitit.AutoExecutor.update_parameters`.

    Raises:
        UserError: if the cluster is not there or refuses a parameter, or `jobs.json` cannot be read.
    """

    def __init__(self, folder: Path, cluster: str, slots: int, parameters: Mapping[str, Any]):
        self.slots = 1 if cluster == "debug" else slots
        self._folder, self._cluster = folder, cluster
        self._stopping = False
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (RuntimeError, ValueError, NameError, TypeError) as error:
            raise UserError(f"--cluster={cluster}: {error}") from error
        self._handles: dict[str, tuple[Job, submitit.Job[Any]]] = {}
        self._ids: dict[str, list[str]] = {}
        path = folder / JOBS_FILE
        if path.exists():
            try:
                self._ids = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{path} cannot be read ({error}), and with it which jobs are under way; see squeue, "
                    "wait for or cancel them, and remove the file"
                ) from error

    def submit(self, job: Job) -> None:
        """Hands a job in, unless it is under way already (`UserError` if the scheduler refuses)."""
        handle = self._attach(job)
        if handle is None:
            try:
                owner = os.getpid() if self._cluster == "local" else 0
                handle = self._executor.submit(Task(job, owner))
            except FailedJobError as error:
                told = " ".join(str(error).split())[:300]
                raise UserError(
                    f"--cluster={self._cluster}: the job was refused: {told}"
                ) from error
            self._ids[job.name] = [handle.job_id, _digest(job)]
            write_whole(self._folder / JOBS_FILE, json.dumps(self._ids, indent=1) + "\n")
        self._handles[job.name] = (job, handle)

    def _attach(self, job: Job) -> submitit.Job[Any] | None:
        """The same job of an earlier sweep process, if the scheduler knows it as alive.

        Where it does not and is wrong, the new job waits for the old one: both take the run's lock.
        """
        known = self._ids.get(job.name)
        if self._cluster != "slurm" or known is None or job.name in self._handles:
            return None
        if known[1] != _digest(job):
            return None
        handle = submitit.SlurmJob(self._folder, known[0])
        for attempt in range(_ASKED):
            if handle.get_info(mode="force"):
                return handle if handle.state.split()[0] in _ALIVE else None
            if attempt < _ASKED - 1:
                time.sleep(1)  # accounting may lag behind, or be out of reach for a moment
        return None

    def outcome(self, name: str) -> Outcome | None:
        """How a job ended; None while it goes on."""
        job, handle = self._handles[name]
        if self._cluster != "debug" and not handle.done():
            return None
        try:
            outcome = Outcome(*handle.result())
        except (UncompletedJobError, FailedJobError) as error:
            if is_done(job):
                return Outcome(0, 0.0)
            state = handle.state.split()[0] if handle.state else ""
            if self._stopping or state in _STOPPED:
                return Outcome(STOPPED[0], 0.0)
            lines = last_lines(Path(job.workdir))
            return Outcome(1, 0.0, (*lines, " ".join(str(error).split())[:300]))
        return outcome

    def stop(self) -> None:
        """Cancels what was handed in; runs save when the scheduler tells them to end."""
        self._stopping = True
        if self._cluster != "debug":
            for _, handle in self._handles.values():
                if not handle.done():
                    handle.cancel(check=False)

    def close(self) -> None:
        """Nothing to end here: jobs belong to the scheduler."""
