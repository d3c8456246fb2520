"""`python -m lra.sweep`: its flags, its exit status, its lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lra.lock import lock
from lra.sweep.__main__ import main

QUICK = "configs/sweeps/quickstart.py"
#: Two runs that can be trained, and one whose loss is soon no number.
TINY = """
from lra.sweep import Sweep, product

def get_sweep(arg=None):
    values = {
        "data.length": 16, "data.vocab_size": 16, "data.num_pairs": 2,
        "data.validation_examples": 16, "data.test_examples": 16,
        "model.num_layers": 1, "model.dim": 8, "train.steps": 6, "train.batch_size": 4,
        "train.eval_every": 3, "eval.batch_size": 8, "optim.warmup_steps": 1,
        "optim.learning_rate": [1e-2, 1e6], "run.tensorboard": False,
    }
    return Sweep(product("configs/recall.py", {"attention": "linear"}, values), lengths=(16, 32))
"""


def test_a_dry_run_prints_commands_and_their_number_and_makes_nothing(tmp_path, capsys):
    assert main([QUICK, "--dry_run", f"--workdir={tmp_path / 'no'}", "--run.platform=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "python train.py --config=configs/recall.py:attention=softmax --workdir="
    )
    assert lines[0].endswith("--config.run.platform=cpu")
    assert lines[-1] == "2 settings, 2 runs"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([QUICK], "--workdir is required"),
        ([QUICK, "--workdir=w", "--rn.x=1"], "unexpected argument '--rn.x=1'"),
        ([QUICK, "--workdir=w", "--run.platfrm=cpu"], "no key 'run.platfrm'"),
        ([QUICK, "--workdir=w", "--gpus_per_node=2"], "--gpus_per_node has a meaning only with"),
        (["nothing.py", "--workdir=w"], "there is no file nothing.py"),
        ([QUICK, "--workdir=w", "--cluster=slurm"], "--cluster=slurm needs --timeout_min"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv, message, capsys, tmp_path, monkeypatch):
    argv = [word.replace("=w", f"={tmp_path / 'w'}") for word in argv]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_jobs_must_be_a_number(capsys):
    with pytest.raises(SystemExit) as caught:
        main([QUICK, "--workdir=w", "--jobs=0"])
    assert caught.value.code == 2
    assert "--jobs: expected a whole number of at least 1, got '0'" in capsys.readouterr().err


def test_a_second_sweep_on_the_same_workdir_is_refused(tmp_path, capsys):
    with lock(tmp_path / "sweep.lock", "x"):
        assert main([QUICK, f"--workdir={tmp_path}"]) == 2
    assert f"the sweep in {tmp_path} is in use by process {os.getpid()}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.lock"]


@pytest.mark.slow
def test_a_sweep_with_a_run_that_diverges(tmp_path):
    """Named in the summary and the table, the other whole, status 1; the rerun trains nothing anew."""
    file = tmp_path / "tiny.py"
    file.write_text(TINY)
    command = [
        sys.executable, "-m", "lra.sweep", str(file), f"--workdir={tmp_path / 'runs'}",
        "--jobs=2", "--retries=0", "--run.platform=cpu",
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "2 runs: 1 done, 1 failed" in done.stdout
    assert "failed: recall-linear-learning-rate1000000.0-s0-" in done.stdout
    report = (tmp_path / "runs" / "report" / "report.md").read_text()
    assert "Runs without a result" in report
    assert "the loss is nan" in report or "the loss is inf" in report
    good = next((tmp_path / "runs").glob("recall-linear-learning-rate0.01-*"))
    before = (good / "results.jsonl").read_bytes()
    again = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert (good / "results.jsonl").read_bytes() == before
    assert (good / "log.txt").read_text().count("$ python train.py") == 1
