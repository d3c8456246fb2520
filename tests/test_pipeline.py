"""The pipeline: which rows a batch holds, how they are padded, and what they do not depend on."""

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest

from lra.pipeline import eval_batches, train_batches
from lra.tasks.recall import Recall
from lra.tasks.spec import IGNORE, TaskSpec


class Numbers:
    """Example i is 1 + i % length tokens equal to i, with label i.

    Token 0 is a value like any other (`pad_id` None), as in images.
    """

    def __init__(self, num=10, kind="classify", length=6, pad_id=None):
        self.spec = TaskSpec("numbers", kind, 100, 100, length, pad_id, 0.01, "test")
        self.num = num

    def source(self, split):
        return _NumbersSource(self.num, self.spec)

    def with_length(self, length):
        return Numbers(self.num, self.spec.kind, length, self.spec.pad_id)


class _NumbersSource:
    def __init__(self, num, spec):
        self.num, self.spec = num, spec

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        assert 0 <= index < self.num
        size = 1 + index % self.spec.max_length
        inputs = np.full(size, index, np.uint8)
        label = index
        if self.spec.kind == "tag":
            label = np.where(np.arange(size) % 2, index, IGNORE).astype(np.int32)
        elif self.spec.kind == "match":
            inputs = (inputs, np.full(1, 99, np.uint8))
        return {"inputs": inputs, "label": label, "length": size + 50}


def _take(iterator, num):
    return list(itertools.islice(iterator, num))


def _assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def _train_labels(num_batches, **settings):
    settings = {"batch_size": 4, "seed": 0, **settings}
    task = settings.pop("task", Numbers())
    return np.concatenate([b["label"] for b in _take(train_batches(task, **settings), num_batches)])


# Shapes and padding


def test_classify_batch():
    batch = next(iter(eval_batches(Numbers(), "test", batch_size=3)))
    assert {k: (v.dtype.name, v.shape) for k, v in batch.items()} == {
        "inputs": ("int32", (3, 6)),
        "mask": ("bool", (3, 6)),
        "label": ("int32", (3,)),
        "weight": ("float32", (3,)),
        "length": ("int32", (3,)),
        "valid": ("bool", (3,)),
    }
    assert batch["inputs"][2].tolist() == [2, 2, 2, 0, 0, 0]
    # The mask follows the length: token 0 of example 0 is a token.
    assert batch["mask"].sum(1).tolist() == [1, 2, 3]
    assert batch["mask"][0].tolist() == [True] + [False] * 5
    assert batch["length"].tolist() == [51, 52, 53]
    assert batch["weight"].tolist() == [1, 1, 1]


def test_padding_is_the_pad_id():
    batch = next(iter(eval_batches(Numbers(pad_id=7), "test", batch_size=1)))
    assert batch["inputs"][0].tolist() == [0, 7, 7, 7, 7, 7]


def test_tag_batch_has_a_weight_for_each_position():
    batch = next(iter(train_batches(Numbers(kind="tag"), batch_size=10, seed=0)))
    assert "valid" not in batch
    assert batch["label"].shape == batch["weight"].shape == (10, 6)
    for row in range(10):
        number, size = batch["inputs"][row, 0], batch["mask"][row].sum()
        expected = (np.arange(6) < size) & (np.arange(6) % 2 == 1)
        assert batch["weight"][row].tolist() == expected.tolist()
        assert batch["label"][row].tolist() == np.where(expected, number, 0).tolist()


def test_match_batch_has_two_documents():
    batch = next(iter(eval_batches(Numbers(kind="match"), "test", batch_size=4)))
    assert batch["inputs"].shape == batch["mask"].shape == (4, 2, 6)
    assert batch["inputs"][3].tolist() == [[3, 3, 3, 3, 0, 0], [99, 0, 0, 0, 0, 0]]
    assert batch["mask"].sum(2).tolist() == [[1, 1], [2, 1], [3, 1], [4, 1]]
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["weight"].shape == (4,)


def test_example_above_the_length_is_refused():
    class Long(Numbers):
        def source(self, split):
            return Numbers(10, length=9).source(split)

    with pytest.raises(ValueError, match="'numbers' gave 7 tokens, above its length 6"):
        _take(eval_batches(Long(), "test", batch_size=1), 10)


# Training


def test_every_epoch_is_another_permutation():
    epochs = _train_labels(20, batch_size=5).reshape(10, 10)
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert len({tuple(epoch) for epoch in epochs}) == 10


def test_seeds_give_different_orders():
    orders = [tuple(_train_labels(5, seed=seed)) for seed in (0, 1, 2, 2**40)]
    assert len(set(orders)) == 4
    # Neither is one seed's order another's, an epoch later.
    assert orders[1][:10] != orders[0][10:]


def test_batches_run_on_across_epochs():
    labels = _train_labels(5, batch_size=4)
    assert sorted(labels[:10]) == sorted(labels[10:]) == list(range(10))


def test_batch_may_exceed_the_data_set():
    labels = _train_labels(1, batch_size=25)
    assert np.bincount(labels).tolist().count(0) == 0
    assert sorted(labels[:10]) == sorted(labels[10:20]) == list(range(10))
    assert _train_labels(2, batch_size=3, task=Numbers(1)).tolist() == [0] * 6


def test_batches_of_one_row():
    labels = _train_labels(20, batch_size=1)
    assert labels.tolist() == _train_labels(4, batch_size=5).tolist()


@pytest.mark.parametrize("start", [1, 3, 7])
def test_restart_continues_with_the_same_batches(start):
    task = Recall(64, 3, train_examples=21)
    whole = _take(train_batches(task, batch_size=4, seed=5), 10)
    rest = _take(train_batches(task, batch_size=4, seed=5, start_step=start), 10 - start)
    _assert_equal(whole[start:], rest)


def test_prefetch_changes_nothing():
    reference = _take(train_batches(Numbers(), batch_size=4, seed=0, prefetch=0), 12)
    for prefetch in (1, 3):
        _assert_equal(
            _take(train_batches(Numbers(), batch_size=4, seed=0, prefetch=prefetch), 12), reference
        )


@pytest.mark.parametrize("num_hosts", [2, 3, 6])
def test_hosts_together_have_the_global_batch(num_hosts):
    def batches(read, **settings):
        return _take(read(batch_size=6, **settings), 4)

    def train(**settings):
        return train_batches(Numbers(), seed=1, start_step=2, **settings)

    def evaluate(**settings):
        return eval_batches(Numbers(20), "test", **settings)

    for read in (train, evaluate):
        reference = batches(read)
        hosts = [batches(read, host=h, num_hosts=num_hosts) for h in range(num_hosts)]
        joined = [
            {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            for parts in zip(*hosts, strict=True)
        ]
        _assert_equal(joined, reference)


WORKERS = """
import itertools, pickle, sys
import numpy as np
from absl import flags
from lra.pipeline import eval_batches, train_batches
from lra.tasks.recall import Recall

def main():
    task = Recall(64, 3, train_examples=21, test_examples=9)
    if "parse" in sys.argv:
        flags.FLAGS.mark_as_parsed()
    workers = 2
    train = train_batches(task, batch_size=4, seed=5, start_step=2, workers=workers)
    result = list(itertools.islice(train, 7))
    train.close()
    result += eval_batches(task, "test", batch_size=4, workers=workers)
    # Arrays that come from a worker may lie in shared memory, which ends with this process.
    result = [{key: np.array(value) for key, value in batch.items()} for batch in result]
    sys.stdout.buffer.write(pickle.dumps(result))

if __name__ == "__main__":
    main()
"""


def _run_workers(tmp_path, *arguments):
    # A file, because worker processes import the main module anew.
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        timeout=120,
    )


def test_workers_change_nothing(tmp_path):
    result = _run_workers(tmp_path, "parse")
    assert result.returncode == 0, result.stderr.decode()
    task = Recall(64, 3, train_examples=21, test_examples=9)
    here = _take(train_batches(task, batch_size=4, seed=5, start_step=2), 7)
    here += eval_batches(task, "test", batch_size=4)
    _assert_equal(pickle.loads(result.stdout), here)


def test_workers_need_parsed_flags(tmp_path):
    result = _run_workers(tmp_path)
    assert b"RuntimeError: 2 worker processes need absl's flags" in result.stderr


# Evaluation


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 12, 25])
def test_every_example_counts_once(batch_size):
    batches = list(eval_batches(Numbers(), "test", batch_size=batch_size))
    assert len(batches) == -(-10 // batch_size)
    assert {b["inputs"].shape for b in batches} == {(batch_size, 6)}
    joined = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}
    valid = joined["valid"]
    assert valid.tolist() == [True] * 10 + [False] * (len(valid) - 10)
    assert joined["label"][valid].tolist() == list(range(10))
    assert joined["weight"].tolist() == valid.astype(float).tolist()
    assert not joined["mask"][~valid].any()
    assert not joined["label"][~valid].any() and not joined["length"][~valid].any()


def test_filled_rows_of_tag_tasks_weigh_nothing():
    (batch,) = eval_batches(Numbers(kind="tag"), "test", batch_size=16)
    assert batch["weight"].sum() == sum((1 + i % 6) // 2 for i in range(10))
    assert not batch["weight"][10:].any()


@pytest.mark.parametrize(("limit", "expected"), [(0, 10), (7, 7), (10, 10), (99, 10)])
def test_limit_takes_the_first_examples(limit, expected):
    batches = list(eval_batches(Numbers(), "test", batch_size=4, limit=limit))
    labels = np.concatenate([b["label"][b["valid"]] for b in batches])
    assert labels.tolist() == list(range(expected))
    assert len(batches) == -(-expected // 4)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size.*0"),
        ({"batch_size": 10, "num_hosts": 4}, "num_hosts 4 does not divide batch_size 10"),
        ({"host": 2, "num_hosts": 2}, "host 2 of 2"),
        ({"host": -1}, "host -1 of 1"),
        ({"workers": -1}, "workers.*-1"),
        ({"prefetch": -1}, "prefetch.*-1"),
    ],
    ids=str,
)
def test_refusals(settings, message):
    settings = {"batch_size": 4, **settings}
    with pytest.raises(ValueError, match=message):
        train_batches(Numbers(), seed=0, **settings)
    with pytest.raises(ValueError, match=message):
        eval_batches(Numbers(), "test", **settings)


def test_refusals_of_one_kind():
    with pytest.raises(ValueError, match=r"seed.*-1"):
        train_batches(Numbers(), batch_size=4, seed=-1)
    with pytest.raises(ValueError, match=r"start_step.*-1"):
        train_batches(Numbers(), batch_size=4, seed=0, start_step=-1)
    with pytest.raises(ValueError, match=r"limit.*-1"):
        eval_batches(Numbers(), "test", batch_size=4, limit=-1)


def test_empty_source_is_named():
    with pytest.raises(ValueError, match="'train' of task 'numbers' is empty"):
        train_batches(Numbers(0), batch_size=4, seed=0)
    with pytest.raises(ValueError, match="'test' of task 'numbers' is empty"):
        eval_batches(Numbers(0), "test", batch_size=4)
