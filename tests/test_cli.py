"""The commands as a shell runs them: help, and one clear line for everything that is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from configs import recall
from lra import cli
from lra import config as configs
from lra.errors import UserError
from lra.evaluation.run import evaluate_run
from lra.modules import leaves
from lra.names import in_stack
from lra.tasks import TASKS, make_task
from lra.training.loop import train
from models.attention.stack import parse_stack

ROOT = Path(__file__).parents[1]
RECALL = "--config=configs/recall.py:size=tiny"


def command(*words):
    """Runs one of the commands on the CPU."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "LRA_TRACEBACK": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def refusal(*words):
    """The one line that a command which refuses its input says."""
    done = command(*words)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stdout + done.stderr
    return lines[0]


# What is wrong with the words themselves: told before JAX is imported, in a tenth of a second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py", RECALL), "--workdir is required"),
        (("train.py", "--workdir=x"), "--config is required"),
        (("eval.py",), "--workdir is required"),
        (("train.py", RECALL, "--workdir=", "--config.run.platform=gpu"), "--workdir"),
        (("train.py", RECALL, "--workdir=x", "more"), "unexpected argument 'more'"),
        (("train.py", RECALL, "--wrkdir=x"), "wrkdir"),
        (
            ("train.py", "--config=configs/recal.py", "--workdir=x"),
            "Did you mean 'configs/recall.py'?",
        ),
        (
            ("train.py", RECALL, "--config=configs/nope.py", "--workdir=x"),
            "no file configs/nope.py",
        ),
        (
            ("train.py", RECALL, "--workdir=x", "--config.train.step=3"),
            "Did you mean 'train.steps'",
        ),
        (("train.py", RECALL, "--workdir=x", "--config.train.steps=abc"), "abc"),
        (("train.py", "--workdir=x", "--config.train.steps=3"), "config"),
        (("eval.py", "--workdir=x", "--split=tset"), "split"),
        (("eval.py", "--workdir=x", "--lengths=64,abc"), "--lengths must be whole numbers"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_words_that_cannot_be_meant(words, said):
    assert said in refusal(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config=configs/recall.py:sise=tiny"], "no argument 'sise'.*Did you mean 'size'"),
        (["--config=configs/recall.py:size=tini"], "unknown size 'tini'.*Did you mean 'tiny'"),
        (["--config", "configs/recall.py:size"], "'size' is not of the form"),
        (["--config=nowhere/recall.py"], "there is no file nowhere/recall.py"),
        (["--config=README.md"], "README.md"),
        ([RECALL, "--config.lerning_rate=1"], "Did you mean 'optim.learning_rate'"),
        ([RECALL, "--config.model.learning_rate=1"], "Did you mean 'optim.learning_rate'"),
        ([RECALL, "--config.optim=1"], "config.optim is a section"),
        ([RECALL, "--noconfig.run.tensorbord"], "Did you mean 'run.tensorboard'"),
    ],
)
def test_configs_that_cannot_be_meant(monkeypatch, words, said):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=said):
        cli._check_config(words)


def test_right_words_pass(monkeypatch):
    monkeypatch.chdir(ROOT)
    cli._check_config(
        [RECALL, "--config.train.steps=3", "--noconfig.run.tensorboard", "--workdir=x"]
    )
    cli._check_config(["--workdir=x"])


# What only the machine, the data or the run can tell


def test_a_gpu_that_is_not_there(tmp_path):
    line = refusal("train.py", RECALL, f"--workdir={tmp_path}", "--config.run.platform=gpu")
    assert "JAX finds no gpu device" in line
    assert not (tmp_path / "config.json").exists()


def test_a_data_set_that_is_not_there(tmp_path):
    line = refusal(
        "train.py",
        "--config=configs/text.py:size=tiny",
        f"--workdir={tmp_path / 'run'}",
        f"--config.run.data_dir={tmp_path / 'data'}",
    )
    assert "imdb_reviews/plain_text:1.0.0 is not prepared" in line
    assert str(tmp_path / "data") in line
    assert "download_and_prepare" in line
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_error_after_the_workdir_was_opened_is_one_line_too(tmp_path):
    words = ("--config.init_from=nowhere", f"--workdir={tmp_path / 'run'}")
    assert "nowhere holds no run" in refusal("train.py", RECALL, *words)


def test_a_run_that_is_not_there(tmp_path):
    assert "holds no run" in refusal("eval.py", f"--workdir={tmp_path}", "--lengths=64")


def test_the_advice_names_the_flag_of_the_command(tmp_path, monkeypatch):
    """eval.py has --platform, and no --config."""
    configs.write_config(configs.resolve(recall.get_config()), tmp_path)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(UserError, match="no tpu device") as caught:
        evaluate_run(tmp_path, overrides={"platform": "tpu"})
    assert "--config.run" not in str(caught.value)


def refuses(tmp_path, message, **changes):
    config = recall.get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    with pytest.raises(UserError, match=message):
        train(config, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_values_that_do_not_go_together(tmp_path):
    refuses(tmp_path, "length 16 is below the 32 tokens", data__length=16)
    refuses(tmp_path, "num_heads must divide", model__num_heads=3)
    refuses(tmp_path, "unknown task 'recal'.*Did you mean 'recall'", task="recal")
    refuses(tmp_path, "schedule must be one of", optim__schedule="linear")
    refuses(tmp_path, "run.platform must be one of", run__platform="cuda")
    refuses(tmp_path, "must be a multiple of", train__batch_size=10, train__accumulate=3)


def test_a_workdir_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(UserError, match="file"):
        train(recall.get_config(), path)
    assert path.read_text() == "kept"


def test_unknown_tasks_suggest_the_nearest():
    for name in TASKS:
        with pytest.raises(ValueError, match=f"Did you mean '{name}'"):
            make_task(name + "x", length=64, seed=0)


# Help


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("train.py", ("config", "workdir")),
        (
            "eval.py",
            (
                "workdir",
                "lengths",
                "split",
                "checkpoint",
                "examples",
                "stream",
                "data_dir",
                "platform",
                "workers",
            ),
        ),
    ],
)
def test_help_lists_every_flag(name, flags):
    done = command(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python {name} --" in done.stdout
    for flag in flags:
        assert f"\n  --{flag}: " in done.stdout


def test_help_with_a_config_lists_every_key_with_its_default():
    done = command("train.py", "--help", "--config=configs/recall.py:attention=linear")
    assert (done.returncode, done.stderr) == (0, "")
    for key, value in leaves(recall.get_config("attention=linear")):
        assert f"  --config.{key}={value!r}\n" in done.stdout


def test_help_with_a_wrong_config_is_an_error():
    assert "no argument 'sise'" in refusal("train.py", "--help", RECALL.replace("size", "sise"))


def test_a_traceback_is_there_for_those_who_ask():
    environment = {**os.environ, "LRA_TRACEBACK": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", RECALL],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: --workdir is required")
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("stack", "names"),
    [
        ("softmax", {"softmax"}),
        ("3xmamba2/linear", {"mamba2", "linear"}),
        ("gated_deltanet/2xgla", {"gated_deltanet", "gla"}),
    ],
)
def test_the_mechanisms_of_a_stack_are_those_it_is_built_of(stack, names):
    assert in_stack(stack) == names == set(parse_stack(stack, 12))
