"""Jobs on this machine: a process each, some at a time."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from lra.lifeline import Lifeline
from lra.sweep.job import Job, Outcome, run_job


class LocalExecutor:
    """Runs up to `slots` jobs at once, each in processes of its own that end with this one.

    Args:
        slots: how many.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._stop = threading.Event()
        self._lifeline = Lifeline()
        self._pool = ThreadPoolExecutor(slots)
        self._futures: dict[str, Future[Outcome]] = {}

    def submit(self, job: Job) -> None:
        """Starts a job."""
        self._futures[job.name] = self._pool.submit(run_job, job, self._lifeline, self._stop)

    def outcome(self, name: str) -> Outcome | None:
        """How a job ended; None while it goes on."""
        future = self._futures[name]
        return future.result() if future.done() else None

    def stop(self) -> None:
        """Asks the jobs to save and end."""
        self._stop.set()

    def close(self) -> None:
        """Waits for the jobs; those that were not asked to end are, by their lifeline."""
        self._stop.set()
        self._pool.shutdown(wait=True)
        self._lifeline.close()
