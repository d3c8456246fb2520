"""Evaluation of a trained run: the numbers of training again, the rows on disk, what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

from configs import recall
from lra import config as configs
from lra.errors import UserError
from lra.evaluation.run import RESULTS_FILE, batch_size_at, evaluate_run
from lra.jsonl import read_rows
from lra.sweep.job import is_evaluated
from lra.tasks.recall import Recall
from lra.training.checkpoint import Checkpoints
from lra.training.loop import train
from lra.training.optimizer import make_optimizer
from lra.training.state import initial_state, split_model
from models.encoder import Transformer

ROOT = Path(__file__).parents[2]
MEASURED = ("n", "labels", "accuracy", "accuracy_se", "loss")
SMALL = {
    "data.length": 16,
    "data.vocab_size": 16,
    "data.num_pairs": 2,
    "data.train_examples": 24,
    "data.validation_examples": 10,
    "data.test_examples": 7,
    "model.num_layers": 1,
    "model.dim": 8,
    "train.steps": 4,
    "train.batch_size": 4,
    "train.eval_every": 2,
    "eval.batch_size": 4,
    "run.tensorboard": False,
}


def small(**changes):
    """A small run; keys with `__` for the dot."""
    config = recall.get_config("attention=linear")
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    config.update_from_flattened_dict({**SMALL, **dotted})
    return config


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Evaluations of the same model share their compiled programs: compiling is most of their time."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("evaluated")
    train(small(), workdir)
    return workdir


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_new_process_gives_exactly_the_numbers_of_training(run):
    command = ["eval.py", f"--workdir={run}", "--split=validation", "--checkpoint=last"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert str(run / RESULTS_FILE) in done.stdout
    (row,) = read_rows(run / RESULTS_FILE)
    stored = [row for row in read_rows(run / "metrics.jsonl") if row["split"] == "validation"][-1]
    assert row["step"] == stored["step"] == 4
    assert {k: row[k] for k in MEASURED} == {k: stored[k] for k in MEASURED}
    assert "python eval.py" in row["command"]


def test_rows_say_what_was_measured(run):
    rows = evaluate_run(run, lengths=[16, 33])
    assert rows == read_rows(run / RESULTS_FILE)
    config = configs.read_config(run)
    for row, length in zip(rows, (16, 33), strict=True):
        expected = {
            "task": "recall",
            "stack": "linear",
            "train_length": 16,
            "eval_length": length,
            "split": "test",
            "view": "length",
            "bin": None,
            "n": 7,
            "labels": 14,
            "seed": 0,
            "checkpoint": "best",
            "config_hash": configs.config_hash(config),
            "chance": 0.5,
        }
        assert {key: row[key] for key in expected} == expected
        assert row.keys() >= {"step", "params", "versions", "commit", "majority", "data"}
        assert row["params"] == json.loads((run / "run.json").read_text())["parameters"]
        assert 0 <= row["majority"] <= 1


@pytest.mark.parametrize("chunk", (1, 5, 16, 33, 100))
def test_reading_in_chunks_gives_the_same_row(run, chunk, monkeypatch):
    (whole,) = evaluate_run(run, lengths=[33])
    used = []
    plain = Transformer.stream
    monkeypatch.setattr(
        Transformer, "stream", lambda *args, **more: used.append(1) or plain(*args, **more)
    )
    (streamed,) = evaluate_run(run, lengths=[33], chunk=chunk)
    for name in MEASURED:
        assert streamed[name] == pytest.approx(whole[name], rel=1e-5), name
    assert len(read_rows(run / RESULTS_FILE)) == 1
    assert len(used) == 4, "traced for its shapes and for the loop, in the check and in what is run"


def test_the_command_reads_in_chunks(run):
    command = ["eval.py", f"--workdir={run}", "--stream=5", "--examples=3"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = read_rows(run / RESULTS_FILE)
    assert (row["n"], row["limit"]) == (3, 3)
    assert row["command"].endswith("--stream=5 --examples=3")


def test_what_cannot_be_read_in_chunks_is_refused_before_any_work(tmp_path):
    for changes, message in (
        ({"model__causal": False}, "model.causal=False"),
        ({"model__attention": "softmax"}, "Softmax keeps every token"),
    ):
        configs.write_config(configs.resolve(small(**changes)), tmp_path)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            evaluate_run(tmp_path, chunk=4)
    assert not (tmp_path / RESULTS_FILE).exists()


def test_some_examples_do_not_replace_the_row_of_all(run, capsys):
    (some,) = evaluate_run(run, limit=3)
    assert (some["n"], some["limit"]) == (3, 3)
    assert not is_evaluated(run, (16,), "test")
    (every,) = evaluate_run(run)
    assert every["limit"] is None and is_evaluated(run, (16,), "test")
    assert evaluate_run(run, limit=2, lengths=[16, 17])[0]["n"] == 2
    assert read_rows(run / RESULTS_FILE)[0] == every
    told = capsys.readouterr().err
    assert told.count("keeps its row of 7 examples at length 16: this one of 2 is not stored") == 1


def test_more_examples_than_there_are_is_all_of_them(run):
    (row,) = evaluate_run(run, limit=8)
    assert (row["n"], row["limit"]) == (7, None)
    assert is_evaluated(run, (16,), "test")


def test_a_limited_bin_does_not_replace_the_whole_one(run):
    config = configs.read_config(run)
    config.eval.bins = (100,)
    configs.write_config(config, run)
    evaluate_run(run)
    evaluate_run(run, limit=3)
    assert [row["limit"] for row in read_rows(run / RESULTS_FILE)] == [None, None, None]


def test_one_example_has_no_standard_error(run):
    (row,) = evaluate_run(run, limit=1)
    assert row["accuracy"] is not None and row["accuracy_se"] is None


def test_a_repeated_evaluation_replaces_its_row(run):
    first = evaluate_run(run)
    evaluate_run(run, split="validation")
    stored = read_rows(run / RESULTS_FILE)
    stored[0]["accuracy"] = -1.0
    (run / RESULTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in stored))
    again = evaluate_run(run)
    rows = read_rows(run / RESULTS_FILE)
    assert [row["split"] for row in rows] == ["test", "validation"]
    assert [row["accuracy"] for row in rows[:1]] == [first[0]["accuracy"]]
    assert {k: again[0][k] for k in MEASURED} == {k: first[0][k] for k in MEASURED}


def test_best_and_last_are_different_checkpoints(run):
    store = Checkpoints(run)
    best = store.best
    config = configs.read_config(run)
    _, params, buffers = split_model(
        configs.build_model(
            config, configs.build_task(config).spec, nnx.Rngs(params=jax.random.key(1))
        )
    )
    other = initial_state(params, buffers, make_optimizer(config.optim))
    store.save(9, other.as_dict(), {"accuracy": -1.0, "loss": 9.0})
    store.close()
    (at_best,) = evaluate_run(run, split="validation", checkpoint="best")
    (at_last,) = evaluate_run(run, split="validation", checkpoint="last")
    assert (at_best["step"], at_last["step"]) == (best, 9)
    assert (at_best["checkpoint"], at_last["checkpoint"]) == ("best", "last")
    assert at_best["loss"] != at_last["loss"]
    stored = [r for r in read_rows(run / "metrics.jsonl") if r["split"] == "validation"]
    assert at_best["loss"] == next(r["loss"] for r in stored if r["step"] == best)
    assert len(read_rows(run / RESULTS_FILE)) == 2


def test_bins_part_the_whole(run, monkeypatch):
    """Recall is as long everywhere: here its examples claim lengths of 1, 2, …"""
    config = configs.read_config(run)
    config.eval.bins = (3, 6, 50)
    configs.write_config(config, run)

    class Lengths:
        def __init__(self, source):
            self.source = source

        def __len__(self):
            return len(self.source)

        def __getitem__(self, index):
            return {**self.source[index], "length": index + 1}

    plain = Recall.source
    monkeypatch.setattr(Recall, "source", lambda self, split: Lengths(plain(self, split)))
    whole, *bins = evaluate_run(run, lengths=[16])
    assert whole["view"] == "length"
    assert {row["view"] for row in bins} == {"bin"}
    assert [row["bin"] for row in bins] == [[0, 3], [3, 6], [6, 50], [50, None]]
    assert [row["n"] for row in bins] == [2, 3, 2, 0]
    assert bins[-1]["accuracy"] is None
    measured = bins[:-1]
    for name in ("accuracy", "loss"):
        total = sum(row[name] * row["labels"] for row in measured) / whole["labels"]
        assert total == pytest.approx(whole[name])


def test_lengths_beyond_learned_positions_are_refused_before_any_work(tmp_path):
    config = configs.resolve(small(model__positions="learned"))
    configs.write_config(config, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"learned positions end at 16, asked for .* 17"):
        evaluate_run(tmp_path, lengths=[16, 17])
    assert not (tmp_path / RESULTS_FILE).exists()


def test_the_default_lengths_are_the_config_s(run):
    config = configs.read_config(run)
    config.eval.lengths = (12, 16)
    configs.write_config(config, run)
    assert [row["eval_length"] for row in evaluate_run(run)] == [12, 16]


@pytest.mark.parametrize("lengths", [[0], [-3], [16, 16]])
def test_lengths_that_make_no_sense_are_refused(trained, lengths):
    with pytest.raises(UserError, match="--lengths must be different whole numbers"):
        evaluate_run(trained, lengths=lengths)


def test_a_length_that_the_task_cannot_have_is_refused(trained):
    with pytest.raises(UserError, match="length 7 is below the 8 tokens"):
        evaluate_run(trained, lengths=[7])


def test_an_empty_split_is_refused_by_name(run, monkeypatch):
    plain = Recall.source
    monkeypatch.setattr(
        Recall, "source", lambda self, split: [] if split == "test" else plain(self, split)
    )
    with pytest.raises(UserError, match="the test split is empty"):
        evaluate_run(run)
    assert not (run / RESULTS_FILE).exists()


def test_without_a_run_or_a_checkpoint_the_message_says_what_to_do(trained, tmp_path):
    with pytest.raises(UserError, match=r"holds no run.*train.py"):
        evaluate_run(tmp_path)
    shutil.copy(trained / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"holds no checkpoints yet"):
        evaluate_run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"holds no best checkpoint yet"):
        evaluate_run(tmp_path)


def test_a_damaged_results_file_is_refused_and_kept(run):
    path = run / RESULTS_FILE
    path.write_text("x\n{}\n")
    with pytest.raises(UserError, match=rf"{RESULTS_FILE}:1 "):
        evaluate_run(run)
    assert path.read_text() == "x\n{}\n"


def test_longer_examples_come_in_smaller_batches():
    config = small(data__length=64, eval__batch_size=32)
    assert [batch_size_at(config, n) for n in (16, 64, 65, 128, 2048, 4096)] == [
        32,
        32,
        31,
        16,
        1,
        1,
    ]
