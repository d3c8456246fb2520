"""Processes of a run: their lock, log, lifeline and end."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lra.lifeline import Lifeline
from lra.sweep.job import Job, best_validation, is_evaluated, run_job
from lra.sweep.local import LocalExecutor

FINISH = "import pathlib, sys; pathlib.Path(sys.argv[1], 'finished.json').write_text('{}')"


def job(workdir, code=FINISH):
    """A job whose training is a line of Python that is given the workdir."""
    return Job("run", str(workdir), ("-c", code, str(workdir)), (), (), "test")


@pytest.fixture
def lifeline():
    line = Lifeline()
    yield line
    line.close()


def test_a_job_runs_logs_and_is_not_done_twice(tmp_path, lifeline):
    code = f"print('hello'); {FINISH}"
    for _ in range(2):
        outcome = run_job(job(tmp_path, code), lifeline, threading.Event())
        assert (outcome.status, outcome.state, outcome.tail) == (0, "done", ())
    assert (tmp_path / "log.txt").read_text().count("hello\n") == 1


def test_a_failure_has_its_status_and_last_lines(tmp_path, lifeline):
    code = "import sys; [print(n) for n in range(9)]; sys.exit('error: no')"
    outcome = run_job(job(tmp_path, code), lifeline, threading.Event())
    assert (outcome.status, outcome.state) == (1, "failed")
    assert outcome.tail == ("5", "6", "7", "8", "error: no")


def test_a_job_waits_for_the_processes_of_another_sweep(tmp_path, lifeline):
    handle = os.open(tmp_path / "job.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(run_job(job(tmp_path), lifeline, threading.Event()))
    )
    thread.start()
    time.sleep(0.5)
    assert not (tmp_path / "finished.json").exists()
    os.close(handle)
    thread.join(30)
    assert found[0].state == "done"


def test_a_stop_asks_the_process_to_end(tmp_path):
    executor = LocalExecutor(1)
    executor.submit(job(tmp_path, "print('up'); import time; time.sleep(600)"))
    while "up" not in (
        (tmp_path / "log.txt").read_text() if (tmp_path / "log.txt").exists() else ""
    ):
        time.sleep(0.02)
    assert executor.outcome("run") is None
    executor.stop()
    executor.close()
    assert executor.outcome("run").state == "stopped"


PARENT = """
import sys, threading
from lra.lifeline import Lifeline
from lra.sweep.job import Job, run_job
code = (
    "from lra import lifeline; lifeline.watch(); import os, time; print(os.getpid());"
    "time.sleep(600)"
)
run_job(Job("run", sys.argv[1], ("-c", code), (), (), "test"), Lifeline(), threading.Event())
"""


def test_the_process_ends_when_its_sweep_is_killed_and_holds_the_lock_until_then(tmp_path):
    env = {**os.environ, "PYTHONPATH": "."}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=Path(__file__).parents[2], env=env
    )
    log = tmp_path / "log.txt"
    while not (log.exists() and log.read_text().split()[-1].isdecimal()):
        time.sleep(0.02)
    child = int(log.read_text().split()[-1])
    parent.kill()
    parent.wait()
    handle = os.open(tmp_path / "job.lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)  # comes back when the child is gone
    os.close(handle)
    assert (
        not Path(f"/proc/{child}/cmdline").exists()
        or not Path(f"/proc/{child}/cmdline").read_bytes()
    )


def test_only_results_of_every_length_count_as_evaluated(tmp_path):
    from lra.jsonl import write_rows

    assert not is_evaluated(tmp_path, (32,), "test")
    rows = [{"eval_length": 32, "split": "test", "checkpoint": "best"}]
    rows += [{"eval_length": 64, "split": "validation", "checkpoint": "best"}]
    write_rows(tmp_path / "results.jsonl", rows)
    assert is_evaluated(tmp_path, (32,), "test")
    assert not is_evaluated(tmp_path, (32, 64), "test")
    (tmp_path / "results.jsonl").write_text("{broken\n{}\n")
    assert not is_evaluated(tmp_path, (32,), "test")


def test_a_place_that_cannot_be_used_is_the_failure_of_that_run(tmp_path, lifeline):
    (tmp_path / "file").touch()
    outcome = run_job(job(tmp_path / "file"), lifeline, threading.Event())
    assert outcome.state == "failed" and "File exists" in outcome.tail[0]


def test_rows_without_a_measure_are_no_candidates(tmp_path):
    from lra.jsonl import write_rows

    good = {"step": 1, "split": "validation", "accuracy": 0.5, "loss": 1.0}
    write_rows(tmp_path / "metrics.jsonl", [good, {"step": 2, "split": "validation", "loss": 0.1}])
    assert best_validation(tmp_path) == good
    assert best_validation(tmp_path / "nowhere") is None
