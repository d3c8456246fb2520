"""The training loop as a user meets it: what a run leaves, what a restart gives, what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lra.tasks
from configs import recall
from lra import config as configs
from lra.errors import UserError
from lra.jsonl import read_rows
from lra.training import loop
from lra.training.checkpoint import Checkpoints
from lra.training.loop import train

TIMING = ("steps_per_second", "tokens_per_second")
SMALL = {
    "data.length": 16,
    "data.vocab_size": 16,
    "data.num_pairs": 2,
    "data.train_examples": 24,
    "data.validation_examples": 6,
    "data.test_examples": 6,
    "model.num_layers": 1,
    "model.dim": 8,
    "model.dropout": 0.2,
    "optim.warmup_steps": 1,
    "train.steps": 4,
    "train.batch_size": 4,
    "train.eval_every": 2,
    "train.save_every": 3,
    "eval.batch_size": 4,
    "run.log_every": 1,
    "run.tensorboard": False,
}


def small(**changes):
    """A small run; keys with `__` for the dot."""
    config = recall.get_config("attention=linear")
    config.update_from_flattened_dict(
        {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}}
    )
    return config


def metrics(workdir):
    """Rows without what depends on the clock."""
    rows = read_rows(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMING} for row in rows]


def entering_state(monkeypatch, config, workdir):
    """The state with which the loop would begin; runs no step."""
    seen = []

    def stub(config, workdir, task, graph, optimizer, schedule, state, start, *rest):
        seen.append((start, state))

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_steps", stub)
        train(config, workdir)
    return seen[0]


def ranks(rows):
    """Accuracy, then the lower loss, of each evaluated step."""
    validated = [row for row in rows if row["split"] == "validation"]
    return {row["step"]: (row["accuracy"], -row["loss"]) for row in validated}


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of the same config share their compiled programs: compiling is most of their time."""
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
def whole(tmp_path_factory):
    """A run of four steps that nothing interrupts."""
    workdir = tmp_path_factory.mktemp("whole")
    train(small(), workdir)
    return workdir


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The state before the first step."""
    with pytest.MonkeyPatch.context() as patch:
        start, state = entering_state(patch, small(), tmp_path_factory.mktemp("fresh"))
    assert start == 0
    return state


def stored(workdir, step, fresh):
    """The state in a checkpoint."""
    return Checkpoints(workdir, read_only=True).restore(step, fresh.as_dict())


def test_a_run_leaves_what_its_readers_need(whole):
    rows = metrics(whole)
    assert [(row["step"], row["split"]) for row in rows] == [
        (1, "train"),
        (2, "train"),
        (2, "validation"),
        (3, "train"),
        (4, "train"),
        (4, "validation"),
    ]
    assert rows[0].keys() == {"step", "split", "loss", "accuracy", "grad_norm", "learning_rate"}
    assert rows[0]["loss"] == pytest.approx(np.log(16), rel=0.5)
    assert rows[2]["n"] == 6
    assert rows[2]["labels"] == 12
    facts = json.loads((whole / "run.json").read_text())
    assert facts.keys() >= {"command", "commit", "versions", "devices", "parameters", "config_hash"}
    assert facts["config_hash"] == configs.config_hash(configs.read_config(whole))
    assert facts["versions"]["jax"] == jax.__version__
    best = max((2, 4), key=ranks(rows).__getitem__)
    store = Checkpoints(whole, read_only=True)
    assert (store.latest, store.best) == (4, best)
    assert {int(p.name) for p in (whole / "checkpoints").iterdir()} == {3, 4, best}
    assert not (whole / "tensorboard").exists()


def test_a_run_that_is_grown_ends_with_the_bits_of_one_of_that_length(whole, fresh, tmp_path):
    schedule = configs.read_config(whole).optim.schedule_steps
    train(small(train__steps=2, optim__schedule_steps=schedule), tmp_path)
    assert metrics(tmp_path) == metrics(whole)[:3]
    train(small(), tmp_path)
    assert metrics(tmp_path) == metrics(whole)
    again = stored(tmp_path, 4, fresh)
    assert int(again["step"]) == 4
    assert bits(again) == bits(stored(whole, 4, fresh))
    assert bits(again["params"]) != bits(fresh.params)


def test_a_killed_run_ends_with_the_bits_of_one_never_killed(monkeypatch, whole, fresh, tmp_path):
    """Killed between the last batch and its save: rows past the checkpoint are there already."""
    save = Checkpoints.save

    def killed(self, step, *rest):
        if step == 4:
            raise KeyboardInterrupt
        save(self, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", killed)
        train(small(), tmp_path)
    assert metrics(tmp_path)[-1]["step"] == 4
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "spl')
    train(small(), tmp_path)
    assert metrics(tmp_path) == metrics(whole)
    assert bits(stored(tmp_path, 4, fresh)) == bits(stored(whole, 4, fresh))


def test_the_same_command_on_a_finished_run_changes_nothing(whole, capsys):
    before = metrics(whole)
    train(small(), whole)
    assert metrics(whole) == before
    assert "has finished its 4 steps" in capsys.readouterr().out


def test_another_config_in_the_workdir_is_refused_by_its_keys(whole):
    changed = small(seed=1, optim__learning_rate=0.5)
    changed.data.num_pairs = 3
    with pytest.raises(UserError) as caught:
        train(changed, whole)
    for text in ("seed: 0 → 1", "learning_rate: 0.01 → 0.5", "data.num_pairs: 2 → 3"):
        assert text in str(caught.value)
    assert "batch_size" not in str(caught.value)
    assert configs.read_config(whole).seed == 0


def test_keys_under_run_may_change_and_are_stored(monkeypatch, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / loop.FINISHED_FILE).unlink()
    config = small(run__log_every=3, train__steps=5)
    start, state = entering_state(monkeypatch, config, run)
    assert (start, int(state.step)) == (4, 4)
    assert configs.read_config(run).run.log_every == 3


def test_steps_may_grow_with_the_schedule_kept_and_not_shrink(monkeypatch, whole, tmp_path):
    with pytest.raises(UserError, match=r"train\.steps: 4 → 3"):
        train(small(train__steps=3), whole)
    with pytest.raises(UserError, match=r"optim\.schedule_steps: 3 → 7"):
        train(small(train__steps=8, optim__schedule_steps=7), whole)
    configs.write_config(configs.read_config(whole), tmp_path)
    entering_state(monkeypatch, small(train__steps=8), tmp_path)
    stored = configs.read_config(tmp_path)
    assert (stored.train.steps, stored.optim.schedule_steps) == (8, 3)


def test_an_infinite_loss_stops_the_run_and_names_the_step(tmp_path):
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step 2\b"):
        train(small(optim__learning_rate=1e30, train__eval_every=4), tmp_path)
    assert [row["step"] for row in metrics(tmp_path)] == [1]
    assert Checkpoints(tmp_path, read_only=True).latest is None


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    """The step that ruins the parameters is evaluated and saved before its successor's loss shows."""
    with pytest.raises(UserError, match=r"loss is (nan|inf)"):
        train(small(optim__learning_rate=1e30, train__eval_every=1), tmp_path)
    assert Checkpoints(tmp_path, read_only=True).latest is None


def test_init_from_starts_at_step_0_with_the_best_parameters(monkeypatch, whole, fresh, tmp_path):
    best = Checkpoints(whole, read_only=True).best
    start, state = entering_state(monkeypatch, small(seed=5, init_from=str(whole)), tmp_path)
    assert (start, int(state.step)) == (0, 0)
    assert bits(state.params) == bits(stored(whole, best, fresh)["params"])
    assert all(float(jnp.abs(leaf).sum()) == 0 for leaf in jax.tree.leaves(state.opt_state))


def test_init_from_takes_parameters_whatever_the_optimizer_was(monkeypatch, whole, fresh, tmp_path):
    config = small(init_from=str(whole), optim__clip_norm=0.0)
    start, state = entering_state(monkeypatch, config, tmp_path)
    assert start == 0
    best = Checkpoints(whole, read_only=True).best
    assert bits(state.params) == bits(stored(whole, best, fresh)["params"])


def test_init_from_needs_a_run_with_checkpoints(monkeypatch, whole, tmp_path):
    with pytest.raises(UserError, match="nowhere holds no run"):
        train(small(init_from=str(tmp_path / "nowhere")), tmp_path / "a")
    source = tmp_path / "source"
    source.mkdir()
    configs.write_config(configs.read_config(whole), source)
    with pytest.raises(UserError, match="source holds no checkpoint"):
        train(small(init_from=str(source)), tmp_path / "b")
    assert [p.name for p in source.iterdir()] == ["config.json"]


def test_a_batch_that_devices_and_parts_do_not_divide_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"train.batch_size=4 must be a multiple.* 1 × 3 = 3"):
        train(small(train__accumulate=3), tmp_path)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(UserError, match=r"train.batch_size=4 must be a multiple.* 8 × 1 = 8"):
        train(small(), tmp_path)
    assert not (tmp_path / "config.json").exists()


class Toy:
    """A classify task of four tokens, of which validation may be empty."""

    def __init__(self, length, seed, empty=""):
        from lra.tasks import TaskSpec

        self.empty = empty
        self.spec = TaskSpec(
            name="toy",
            kind="classify",
            vocab_size=4,
            num_classes=2,
            max_length=length,
            pad_id=0,
            chance=0.5,
            data="toy",
        )

    def source(self, split):
        example = {"inputs": np.array([1, 2], np.int32), "label": 1, "length": 2}
        return [] if split == self.empty else [example] * 4

    def with_length(self, length):
        return Toy(length, 0, self.empty)


def toy_config(monkeypatch, **data):
    monkeypatch.setitem(lra.tasks.TASKS, "toy", Toy)
    config = small(train__steps=1, model__causal=False)
    config.task = "toy"
    config.data = {"length": 16, **data}
    return config


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_split_is_refused_by_name(monkeypatch, tmp_path, split):
    with pytest.raises(UserError, match=f"the {split} split is empty"):
        train(toy_config(monkeypatch, empty=split), tmp_path)


def test_an_unknown_pool_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    config = toy_config(monkeypatch)
    config.model.pool = "avg"
    with pytest.raises(UserError, match=r"model.pool must be one of cls, mean, max, last.*'avg'"):
        train(config, tmp_path)
    assert not (tmp_path / "config.json").exists()
