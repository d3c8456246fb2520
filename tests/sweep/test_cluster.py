"""submitit's debug and local executors, and SLURM against submitit's own fakes."""

import dataclasses
import gc
import os
import pickle
import signal
import threading
import time

import pytest
from submitit.core import submission
from submitit.slurm.test_slurm import mocked_slurm

from lra.errors import UserError
from lra.sweep.cluster import ClusterExecutor, Task
from lra.sweep.job import Job

FINISH = "import pathlib, sys; pathlib.Path(sys.argv[1], 'finished.json').write_text('{}')"


def job(workdir, name="run", code=FINISH):
    return Job(name, str(workdir / name), ("-c", code, str(workdir / name)), (), (), "test")


def until_done(executor, name):
    while (outcome := executor.outcome(name)) is None:
        pass
    return outcome


# submitit's debug executor leaves its log files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cluster", ["debug", "local"])
def test_jobs_run_and_fail_through_submitit(tmp_path, cluster):
    executor = ClusterExecutor(tmp_path / "cluster", cluster, 2, {"timeout_min": 5})
    executor.submit(job(tmp_path))
    executor.submit(job(tmp_path, "bad", "import sys; sys.exit('error: no')"))
    assert until_done(executor, "run").state == "done"
    assert (tmp_path / "run" / "finished.json").exists()
    bad = until_done(executor, "bad")
    assert (bad.state, bad.tail[-1]) == ("failed", "error: no")
    for _, handle in executor._handles.values():
        if cluster == "local":
            handle._process.wait()
    del executor, handle
    gc.collect()


def test_slurm_gets_its_parameters_and_a_sweep_finds_its_jobs_again(tmp_path):
    parameters = {"slurm_partition": "gpu", "gpus_per_node": 2, "timeout_min": 90}
    with mocked_slurm() as mock:
        executor = ClusterExecutor(tmp_path / "cluster", "slurm", 100, parameters)
        executor.submit(job(tmp_path))
        assert executor.outcome("run") is None
        (script,) = (tmp_path / "cluster").glob("[0-9]*_submission.sh")
        for line in ("--partition=gpu", "--gpus-per-node=2", "--time=90"):
            assert f"#SBATCH {line}" in script.read_text()
        # The sweep dies; another one meets the job where it is.
        again = ClusterExecutor(tmp_path / "cluster", "slurm", 100, parameters)
        again.submit(job(tmp_path))
        assert len(list((tmp_path / "cluster").glob("[0-9]*_submission.sh"))) == 1
        assert again.outcome("run") is None
        with mock.job_context("12"):
            submission.process_job(tmp_path / "cluster")
        mock.set_job_state("12", "COMPLETED")
        assert again.outcome("run").state == "done"
        assert (tmp_path / "run" / "finished.json").exists()


def test_a_slurm_job_that_is_gone_without_a_result_has_failed(tmp_path):
    with mocked_slurm() as mock:
        executor = ClusterExecutor(tmp_path / "cluster", "slurm", 100, {})
        executor.submit(job(tmp_path))
        handle = executor._handles["run"][1]
        handle._results_timeout_s = 0
        mock.set_job_state("12", "OUT_OF_MEMORY")
        assert handle.done(force_check=True)
        assert executor.outcome("run").state == "failed"
        # Tried again, it is handed in again.
        executor.submit(job(tmp_path))
        assert len(list((tmp_path / "cluster").glob("[0-9]*_submission.sh"))) == 2


#: Says that it is up; asked to end, takes a moment to save.
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""


def when_up(tmp_path, then):
    """Calls `then` in a thread, as soon as the job's process is up."""

    def wait():
        log = tmp_path / "run" / "log.txt"
        while not (log.exists() and "up\n" in log.read_text()):
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_job_out_of_time_saves_and_is_handed_in_again_as_it_is(tmp_path):
    task, found = Task(job(tmp_path, code=SAVES)), []
    thread = when_up(tmp_path, lambda: found.append(task.checkpoint().function))
    assert task()[0] == 143
    thread.join()
    assert (tmp_path / "run" / "saved").exists()
    assert isinstance(found[0], Task) and found[0].job == task.job
    assert isinstance(pickle.loads(pickle.dumps(task)), Task)


def test_a_cancelled_job_saves(tmp_path):
    task = Task(job(tmp_path, code=SAVES))
    before = signal.getsignal(signal.SIGTERM)
    thread = when_up(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert task()[0] == 143
    thread.join()
    assert (tmp_path / "run" / "saved").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_job_of_the_same_run_is_no_job_to_wait_for(tmp_path):
    with mocked_slurm():
        executor = ClusterExecutor(tmp_path / "cluster", "slurm", 100, {})
        executor.submit(job(tmp_path))
        again = ClusterExecutor(tmp_path / "cluster", "slurm", 100, {})
        again.submit(dataclasses.replace(job(tmp_path), lengths=(64,)))
        assert len(list((tmp_path / "cluster").glob("[0-9]*_submission.sh"))) == 2


def test_what_the_scheduler_ended_was_stopped_and_did_not_fail(tmp_path):
    with mocked_slurm() as mock:
        executor = ClusterExecutor(tmp_path / "cluster", "slurm", 100, {})
        executor.submit(job(tmp_path))
        handle = executor._handles["run"][1]
        handle._results_timeout_s = 0
        mock.set_job_state("12", "CANCELLED")
        assert handle.done(force_check=True)
        assert executor.outcome("run").state == "stopped"


def test_unreadable_job_ids_are_an_error(tmp_path):
    (tmp_path / "jobs.json").write_text("{")
    with pytest.raises(UserError, match=r"jobs\.json cannot be read"):
        ClusterExecutor(tmp_path, "debug", 1, {})


def test_a_cluster_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"--cluster=slurm: .*srun"):
        ClusterExecutor(tmp_path, "slurm", 1, {})
