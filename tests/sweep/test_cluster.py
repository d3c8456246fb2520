"""submitit's debug and local executors, and SLURM against submitit's own fakes."""

import gc

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
        mock.set_job_state("12", "NODE_FAIL")
        assert handle.done(force_check=True)
        assert executor.outcome("run").state == "failed"
        # Tried again, it is handed in again.
        executor.submit(job(tmp_path))
        assert len(list((tmp_path / "cluster").glob("[0-9]*_submission.sh"))) == 2


def test_a_job_out_of_time_is_handed_in_again_as_it_is(tmp_path):
    task = Task(job(tmp_path))
    again = task.checkpoint().function
    assert isinstance(again, Task)
    assert again.job == task.job


def test_a_cluster_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"--cluster=slurm: .*srun"):
        ClusterExecutor(tmp_path, "slurm", 1, {})
