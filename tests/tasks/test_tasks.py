"""The registry: names, settings and what it says about wrong ones."""

import subprocess
import sys

import numpy as np
import pytest

from lra.tasks import SPLITS, TASKS, make_task
from lra.tasks.baselines import majority_label
from lra.tasks.spec import IGNORE, TaskSpec


def test_registered_name_is_the_spec_name():
    for name in TASKS:
        task = make_task(name, length=64, seed=0)
        assert task.spec.name == name
        assert task.spec.max_length == 64


def test_own_and_shared_settings_reach_the_task():
    task = make_task("recall", length=64, seed=3, data_dir="unused", num_pairs=4)
    assert task.spec.chance == 1 / 4
    other_seed = make_task("recall", length=64, seed=4, num_pairs=4)
    first, second = (t.source("train")[0]["inputs"].tolist() for t in (task, other_seed))
    assert first != second


def test_unknown_name_lists_names_and_suggests():
    with pytest.raises(ValueError, match=r"recall, text.*Did you mean 'recall'\?"):
        make_task("recal", length=64, seed=0)


def test_unknown_setting_lists_settings():
    with pytest.raises(TypeError, match=r"'num_pair'.*vocab_size, num_pairs, filler"):
        make_task("recall", length=64, seed=0, num_pair=4)
    with pytest.raises(TypeError, match=r"validation_fraction, holdout_seed"):
        make_task("text", length=64, seed=0, num_pairs=4)


@pytest.mark.parametrize("name", TASKS)
def test_unknown_split_lists_splits(name):
    with pytest.raises(ValueError, match=r"'valid'.*train, validation, test"):
        make_task(name, length=64, seed=0).source("valid")


@pytest.mark.parametrize("name", TASKS)
def test_length_must_be_positive(name):
    with pytest.raises(ValueError, match=r"length.*0"):
        make_task(name, length=0, seed=0)
    with pytest.raises(ValueError, match=r"length.*0"):
        make_task(name, length=64, seed=0).with_length(0)


def test_import_is_light():
    """Tasks know no JAX, and TFDS is imported only by the task that reads it."""
    code = (
        "import sys, lra.tasks, lra.tasks.baselines; "
        "print([m for m in ('jax', 'flax', 'tensorflow', 'tensorflow_datasets') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


class _Labels:
    """A task of given labels for each split."""

    def __init__(self, kind, labels):
        self.spec = TaskSpec("labels", kind, 2, 3, 4, 0, 1 / 3, "test")
        self.labels = labels

    def source(self, split):
        return [{"label": label} for label in self.labels[split]]

    def with_length(self, length):
        return self


def test_majority_label_is_that_of_train():
    task = _Labels("classify", {"train": [2, 0, 2], "test": [0, 0, 2, 1]})
    assert majority_label(task) == majority_label(task, limit=0) == 2
    # The first two train labels tie: the smaller wins.
    assert majority_label(task, limit=2) == 0


def test_majority_counts_labelled_positions():
    rows = [np.array([IGNORE, 1, IGNORE, 1]), np.array([IGNORE, IGNORE, IGNORE, 2])]
    assert majority_label(_Labels("tag", {"train": rows})) == 1


def test_majority_refuses_bad_limit_and_no_labels():
    with pytest.raises(ValueError, match=r"limit.*-1"):
        majority_label(_Labels("classify", {"train": [1]}), limit=-1)
    with pytest.raises(ValueError, match="the train split of task 'labels' has no labels"):
        majority_label(_Labels("classify", {"train": []}))


def test_splits_are_named_once():
    assert SPLITS == ("train", "validation", "test")
