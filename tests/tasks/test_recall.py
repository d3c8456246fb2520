"""Multi-query associative recall: what an example looks like and what it depends on."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from lra.tasks import recall
from lra.tasks.recall import Recall
from lra.tasks.spec import IGNORE, SPLITS

SETTINGS = [
    {"length": 64},
    {"length": 64, "filler": "zeros"},
    {"length": 65, "num_pairs": 16},  # odd, and no spare slot but half a one
    {"length": 256, "vocab_size": 8192, "num_pairs": 16},
    {"length": 33, "vocab_size": 18, "num_pairs": 8},  # every key is used, one token is free
    {"length": 16, "vocab_size": 32, "num_pairs": 1, "power": 1.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_examples_are_mqar(settings, split):
    task = Recall(seed=1, **settings)
    vocab, pairs = task.spec.vocab_size, settings.get("num_pairs", 8)
    length = settings["length"]
    source = task.source(split)
    for i in range(20):
        example = source[i]
        inputs, label = example["inputs"], example["label"]
        assert inputs.shape == label.shape == (length,)
        assert inputs.dtype == label.dtype == np.int32
        assert example["length"] == length

        keys, values = inputs[: 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1 and keys.max() < vocab // 2
        assert values.min() >= vocab // 2 and values.max() < vocab

        queries = np.flatnonzero(label != IGNORE)
        assert sorted(inputs[queries]) == sorted(keys)
        assert (queries >= 2 * pairs).all() and (queries % 2 == 0).all()
        assert queries.max() + 1 < length  # a slot is two tokens
        value_of = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [value_of[k] for k in inputs[queries].tolist()] == label[queries].tolist()

        filler = np.delete(inputs, [*range(2 * pairs), *queries])
        assert not set(filler) & set(keys)
        assert not set(filler) & set(values)
        if settings.get("filler") == "zeros":
            assert (filler == 0).all()
        else:
            assert filler.min() > 0 and filler.max() < vocab


def test_random_filler_is_uniform_over_free_tokens():
    source = Recall(64, 0, vocab_size=32, num_pairs=4).source("train")
    counts = np.zeros(32)
    for i in range(400):
        example = source[i]
        filler = example["inputs"][8:][example["label"][8:] == IGNORE]
        np.add.at(counts, filler, 1)
    # Keys are live 4 times in 15 and values 4 times in 16, so both kinds appear about as often.
    total = counts.sum()
    assert counts[0] == 0
    keys, values = counts[1:16].mean() / total, counts[16:].mean() / total
    assert abs(keys - 11 / 15 / 23) < 0.002 and abs(values - 12 / 16 / 23) < 0.002
    assert counts[1:].min() > 0.8 * counts[1:].mean()


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_slots_follow_the_power_law(power):
    """A single query stands in slot i with probability proportional to i^(power − 1)."""
    source = Recall(34, 5, num_pairs=1, power=power, train_examples=4000).source("train")
    slots = [(int(np.argmax(source[i]["label"] != IGNORE)) - 2) // 2 for i in range(4000)]
    share = np.bincount(slots, minlength=16) / 4000
    expected = np.arange(1, 17) ** (power - 1)
    expected /= expected.sum()
    error = np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(share - expected) < 4.5 * error).all()


def test_several_slots_follow_sequential_draws():
    """Two queries are two draws without replacement: P(i, j) = p_i p_j / (1 − p_i)."""
    num = 4000
    source = Recall(10, 5, num_pairs=2, power=0.01, train_examples=num).source("train")
    pairs = np.zeros((3, 3))
    for i in range(num):
        example = source[i]
        keys = example["inputs"][:4:2]
        first, second = ((int(np.flatnonzero(example["inputs"][4:] == k)[0])) // 2 for k in keys)
        pairs[first, second] += 1 / num
    p = np.arange(1, 4) ** (0.01 - 1)
    p /= p.sum()
    expected = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(expected, 0)
    assert np.abs(pairs - expected).max() < 0.03


def test_pure_function_of_seed_split_and_index():
    task = Recall(64, 7)
    source = task.source("train")
    forwards = [source[i]["inputs"] for i in range(10)]
    again = Recall(64, 7).source("train")
    backwards = [again[i]["inputs"] for i in reversed(range(10))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    assert len({row.tobytes() for row in forwards}) == 10
    # The number of examples is no part of an example.
    np.testing.assert_array_equal(
        Recall(64, 7, train_examples=3).source("train")[2]["inputs"], forwards[2]
    )
    for other in (Recall(64, 8).source("train"), task.source("test")):
        assert not np.array_equal(other[0]["inputs"], forwards[0])


def test_examples_do_not_depend_on_hash_randomisation():
    code = (
        "from lra.tasks.recall import Recall; "
        "print(Recall(64, 7).source('validation')[5]['inputs'].tolist())"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert results == {f"{Recall(64, 7).source('validation')[5]['inputs'].tolist()}\n"}


def test_pickled_source_gives_the_same_examples():
    source = Recall(64, 7).source("test")
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == len(source) == 3000
    np.testing.assert_array_equal(copy[11]["inputs"], source[11]["inputs"])


def test_splits_share_no_context():
    """So few contexts exist (42) that splits drawn freely would share nearly all of them.

    Seeds and lengths differ, as they do between a training run and evaluation at other lengths.
    """
    seen = {}
    for split, length, seed in (("train", 8, 0), ("validation", 16, 1), ("test", 32, 2)):
        source = Recall(length, seed, vocab_size=14, num_pairs=1).source(split)
        seen[split] = {tuple(source[i]["inputs"][:2].tolist()) for i in range(300)}
        assert seen[split]
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert len(set().union(*seen.values())) == 42


def test_shares_cover_the_unit_interval():
    bounds = [recall._SHARES[split] for split in SPLITS]
    assert bounds[0][0] == 0 and bounds[-1][1] == 1
    assert [high for _, high in bounds[:-1]] == [low for low, _ in bounds[1:]]


def test_too_few_contexts_are_reported():
    # Two contexts cannot fill three splits.
    with pytest.raises(ValueError, match="vocabulary of 4 belongs to split"):
        for split in SPLITS:
            Recall(8, 0, vocab_size=4, num_pairs=1).source(split)[0]


def test_with_length_keeps_everything_else():
    task = Recall(64, 7, vocab_size=128, num_pairs=4, filler="zeros", test_examples=5, power=0.5)
    longer = task.with_length(256)
    assert longer.spec.max_length == 256
    assert (longer.spec.vocab_size, longer.spec.chance) == (128, 1 / 4)
    assert longer.spec.data == task.spec.data
    source = longer.source("test")
    assert len(source) == 5
    example = source[0]
    assert (example["label"] != IGNORE).sum() == 4
    assert set(example["inputs"][8:][example["label"][8:] == IGNORE]) == {0}
    # Drawn afresh, but the way back leads to the same examples.
    assert not np.array_equal(example["inputs"][:8], task.source("test")[0]["inputs"][:8])
    np.testing.assert_array_equal(
        longer.with_length(64).source("test")[0]["inputs"], task.source("test")[0]["inputs"]
    )


def test_sizes_and_bounds_of_sources():
    task = Recall(64, 0, train_examples=3, validation_examples=2, test_examples=1)
    assert [len(task.source(split)) for split in SPLITS] == [3, 2, 1]
    for index in (3, -1):
        with pytest.raises(IndexError, match=str(index)):
            task.source("train")[index]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 31}, "31.*32.*num_pairs 8"),
        ({"num_pairs": 16, "vocab_size": 32}, "num_pairs 16.*15 keys.*32"),
        ({"num_pairs": 0}, "num_pairs.*0"),
        ({"vocab_size": 255}, "even.*255"),
        ({"vocab_size": 2}, "at least 4.*2"),
        ({"filler": "ones"}, "'random' or 'zeros'.*'ones'"),
        ({"power": 0.0}, "power.*0"),
        ({"power": float("nan")}, "power.*nan"),
        ({"seed": -1}, "seed.*-1"),
        ({"train_examples": 0}, "train_examples.*0"),
        ({"validation_examples": -2}, "validation_examples.*-2"),
        ({"test_examples": 0}, "test_examples.*0"),
    ],
    ids=str,
)
def test_refusals_name_both_values(settings, message):
    with pytest.raises(ValueError, match=message):
        Recall(**{"length": 64, "seed": 0, **settings})


def test_shortest_length_is_accepted():
    example = Recall(32, 0).source("train")[0]
    assert (example["label"][16::2] != IGNORE).all()
