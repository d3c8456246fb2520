"""ListOps: grammar and values of trees, the task on prepared data, and the command."""

import dataclasses
import hashlib
import pickle
import statistics as stats
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lra.tasks import listops, listops_files, make_task
from lra.tasks.baselines import majority_label
from lra.tasks.listops import (
    TOKENS,
    VARIANTS,
    VERSION,
    ListOps,
    Variant,
    decode,
    encode,
    prepare,
    root_operator_baseline,
)
from lra.tasks.listops_trees import content_hash, draw_block, split_of


def constant_accuracy(task, split):
    """Of always answering the most frequent train label."""
    source, label = task.source(split), majority_label(task)
    return sum(source[i]["label"] == label for i in range(len(source))) / len(source)


ROOT = Path(__file__).parents[2]
#: Every tree is kept.
ALL = Variant("all", 1, 10**6, 3, 10, 1, 1, 1, block=20_000)


def parse(words):
    """Reads a tree by recursive descent: (value, depth, [arguments of each operator])."""
    word = words.pop(0)
    if word.isdigit():
        return int(word), 1, []
    values, depths, arities = [], [], []
    while words[0] != "]":
        value, depth, below = parse(words)
        values.append(value)
        depths.append(depth)
        arities += below
    words.pop(0)
    function = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda v: int(stats.median(v)),
        "[SM": lambda v: sum(v) % 10,
    }[word]
    return function(values), 1 + max(depths), [len(values), *arities]


# Trees.


@pytest.mark.parametrize("name", VARIANTS)
def test_trees_follow_the_grammar_and_have_their_values(name):
    variant = dataclasses.replace(VARIANTS[name], block=200)
    trees = draw_block(variant, 0, 0)
    assert len(trees) > 20
    assert trees.tokens.dtype == np.uint8
    for tokens, length, label in zip(trees.split(), trees.lengths, trees.labels, strict=True):
        words = decode(tokens).split()
        assert variant.min_length < len(words) == length < variant.max_length
        digits = sum(word.isdigit() for word in words)
        operators = sum(word.startswith("[") for word in words)
        assert length == digits + 2 * operators
        value, depth, arities = parse(words)
        assert not words
        assert value == label
        assert depth <= variant.max_depth
        assert min(arities) >= 2 and max(arities) <= variant.max_args


def test_choices_are_uniform():
    """Over trees of which none is thrown away; 5 standard errors."""
    trees = draw_block(ALL, 1, 0)
    assert len(trees) == ALL.block
    sequences = [decode(tokens).split() for tokens in trees.split()]

    def check(values, probability):
        assert (
            abs(np.mean(values) - probability)
            < 5 * (probability * (1 - probability) / len(values)) ** 0.5
        )

    for operator in ("[MIN", "[MAX", "[MED", "[SM"):
        check([words[0] == operator for words in sequences], 1 / 4)
    arities = [parse(words)[2][0] for words in map(list, sequences)]
    for number in range(2, 11):
        check([arity == number for arity in arities], 1 / 9)
    # The node after the root is at depth 2; of its first argument, at depth 3, every node is a digit.
    second = [words[1] for words in sequences]
    check([word.startswith("[") for word in second], 1 / 4)
    for digit in "0123456789":
        check([word == digit for word in second], 3 / 4 / 10)
    third = [words[2] for words in sequences if words[1].startswith("[")]
    assert all(word.isdigit() for word in third)
    for digit in "0123456789":
        check([word == digit for word in third], 1 / 10)


def test_statistics_are_those_of_the_original_generator():
    """A simulation of the original kept 1 of 12 trees; figures of 4000 kept; 3 standard errors."""
    blocks = [draw_block(VARIANTS["default"], 0, index) for index in range(6)]
    labels = np.concatenate([block.labels for block in blocks])
    lengths = np.concatenate([block.lengths for block in blocks])
    num = len(labels)

    def error(probability):
        variance = probability * (1 - probability)
        return 3 * (variance / 4000 + variance / num) ** 0.5

    # A tree of the original is thrown away at once when its root is a digit: 3 of 4.
    tried = 4 * len(blocks) * VARIANTS["default"].block
    assert abs(num / tried - 1 / 12) < 3 * (1 / 12 * 11 / 12 * (1 / tried + 1 / 48_000)) ** 0.5
    median_error = 3 * 1.2533 * lengths.std() * (1 / 4000 + 1 / num) ** 0.5
    assert abs(np.median(lengths) - 967) < median_error < 40
    shares = np.bincount(labels, minlength=10) / num
    assert abs(shares[0] - 0.167) < error(0.167)
    assert abs(shares[9] - 0.163) < error(0.163)
    assert abs(shares[1:9].min() - 0.065) < error(0.065)
    assert abs(shares[1:9].max() - 0.098) < error(0.098)


def test_block_is_a_function_of_variant_seed_and_number():
    def digest(*arguments):
        trees = draw_block(*arguments)
        return hashlib.sha256(trees.tokens.tobytes() + trees.labels.tobytes()).hexdigest()[:16]

    first = digest(VARIANTS["test"], 0, 0)
    assert first == digest(VARIANTS["test"], 0, 0)
    others = [(VARIANTS["test"], 1, 0), (VARIANTS["test"], 0, 1), (VARIANTS["short"], 0, 0)]
    assert len({first, *(digest(*other) for other in others)}) == 4
    # Whoever changes these two changes the data: VERSION must change with them.
    assert (VERSION, first) == ("1.0.0", "7130fdab1b6c7686")


def test_vocabulary_and_round_trip():
    assert len(TOKENS) == 17
    assert (TOKENS[2], TOKENS[11], TOKENS[12], TOKENS[16]) == ("0", "9", "[MIN", "]")
    text = "[MIN 0 [MAX 1 2 ] [MED 3 4 5 ] [SM 6 7 8 9 ] ]"
    assert decode(encode(text.encode())) == text
    nested = b"( ( ( [MAX 2 ) 9 ) ] )"
    assert encode(nested).tolist() == [13, 4, 11, 16]
    # Words that no tree has are unknown, padding's name included; a number is one word.
    assert encode(b"[AVG 12 <pad> ] 3").tolist() == [1, 1, 1, 16, 5]
    for tokens in draw_block(VARIANTS["test"], 0, 0).split():
        assert encode(decode(tokens).encode()).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_length": 0}, "min_length 0"),
        ({"max_length": 6}, "min_length 5 and max_length 6"),
        ({"max_depth": 1}, "max_depth.*1"),
        ({"max_args": 1}, "max_args.*1"),
        ({"block": 0}, "block.*0"),
        ({"test": 0}, "test.*0"),
    ],
)
def test_variant_refuses_bad_values(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(VARIANTS["test"], **change)


# Prepared data.


def test_prepared_splits_have_their_sizes_and_values(data_dir):
    task = ListOps(1000, data_dir=data_dir, variant="test")
    for split, size in VARIANTS["test"].sizes.items():
        own = list(task.source(split))
        assert len(own) == size
        for example in own:
            assert example["inputs"].dtype == np.uint8
            words = decode(example["inputs"]).split()
            assert example["length"] == len(words)
            assert example["label"] == parse(words)[0]
    assert (task.spec.vocab_size, task.spec.num_classes, task.spec.pad_id) == (17, 10, 0)
    assert (task.spec.chance, task.spec.kind) == (0.1, "classify")


def test_trees_are_unique_and_splits_cannot_overlap(data_dir):
    prepare("test", data_dir, workers=0, seed=7)
    trees = {}
    for seed in (0, 7):
        task = make_task("listops", length=1000, seed=0, data_dir=data_dir, variant="test",
                         data_seed=seed)  # fmt: skip
        for split in VARIANTS["test"].sizes:
            own = [bytes(example["inputs"]) for example in list(task.source(split))]
            assert len(set(own)) == len(own)
            hashes = [content_hash(np.frombuffer(tree, np.uint8)) for tree in own]
            assert {split_of(digest) for digest in hashes} == {split}
            trees[seed, split] = set(own)
    assert not trees[0, "train"] & trees[7, "test"]
    assert trees[0, "train"] != trees[7, "train"]


def test_split_is_the_first_distinct_trees_of_the_blocks(tmp_path, monkeypatch):
    """Few different trees, so that most are drawn again and again."""
    monkeypatch.setitem(VARIANTS, "few", Variant("few", 3, 5, 2, 2, 60, 3, 3, block=64))
    prepare("few", str(tmp_path), workers=0)
    expected = []
    for index in range(20):
        for tokens in draw_block(VARIANTS["few"], 0, index).split():
            if split_of(content_hash(tokens)) == "train" and bytes(tokens) not in expected:
                expected.append(bytes(tokens))
    own = list(ListOps(9, data_dir=str(tmp_path), variant="few").source("train"))
    assert [bytes(example["inputs"]) for example in own] == expected[:60]


def test_too_few_trees_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(listops_files, "_IDLE_BLOCKS", 40)
    # Two digits under one of four operators: there are 400 trees.
    few = Variant("few", 3, 5, 2, 2, 1000, 1, 1, block=64)
    with pytest.raises(ValueError, match=r"'few' has too few different trees.*'train': \d+"):
        prepare(few, str(tmp_path), workers=0)


def test_truncation_keeps_the_head_and_the_true_length(data_dir):
    task = ListOps(10, data_dir=data_dir, variant="test")
    short, full = (list(task.with_length(n).source("validation")) for n in (10, 99))
    assert max(example["length"] for example in short) > 10
    for cut, whole in zip(short, full, strict=True):
        assert cut["inputs"].tolist() == whole["inputs"][:10].tolist()
        assert cut["length"] == whole["length"] == len(whole["inputs"])
        assert cut["label"] == whole["label"]


def test_pickled_source_gives_the_same_examples(data_dir):
    source = ListOps(50, data_dir=data_dir, variant="test").source("train")
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == len(source)
    np.testing.assert_array_equal(copy[3]["inputs"], source[3]["inputs"])
    for index in (len(source), -1):
        with pytest.raises(IndexError, match=str(index)):
            source[index]


def test_run_seed_does_not_matter_and_data_seed_is_named(data_dir):
    first, second = (
        ListOps(50, seed, data_dir, variant="test").source("train")[0] for seed in (0, 1)
    )
    assert first["inputs"].tolist() == second["inputs"].tolist()
    assert ListOps(50).spec.data == f"listops/default:{VERSION}, generated (seed 0)"
    data = {
        ListOps(50, variant=v, data_seed=s).spec.data for v in ("default", "test") for s in (0, 1)
    }
    assert len(data) == 4


def test_baselines_of_prepared_data(data_dir):
    task = ListOps(50, data_dir=data_dir, variant="test")
    assert 0.08 < constant_accuracy(task, "train") < root_operator_baseline(task, "train") < 0.5
    assert 0 <= root_operator_baseline(task, "test", limit=5) <= 1


def test_missing_data_name_place_and_command(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        ListOps(10, data_dir=str(tmp_path), variant="test", data_seed=3).source("test")
    message = str(error.value)
    assert "\n" not in message
    assert str(tmp_path / "listops/test_seed3" / VERSION / "dataset_info.json") in message
    assert f"python -m lra.tasks.listops --config=test --data_dir={tmp_path} --seed=3" in message


def test_default_directory_is_that_of_tfds(data_dir, monkeypatch):
    from tensorflow_datasets.core import constants

    monkeypatch.setattr(constants, "DATA_DIR", data_dir)
    assert len(ListOps(10, variant="test").source("test")) == 20


def test_stored_vocabulary_is_compared(tmp_path):
    directory = prepare("test", str(tmp_path), workers=0)
    path = directory / "metadata.json"
    path.write_text(path.read_text().replace("[SM", "[SUM"))
    with pytest.raises(ValueError, match=r"prepared with the vocabulary .*\[SUM.*, not .*\[SM"):
        ListOps(10, data_dir=str(tmp_path), variant="test").source("test")


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'shrt'; there are: default, short, test"):
        ListOps(10, variant="shrt")
    with pytest.raises(ValueError, match="'shrt'; there are: default, short, test"):
        prepare("shrt", str(tmp_path))
    with pytest.raises(ValueError, match=r"data_seed.*-1"):
        ListOps(10, data_seed=-1)
    for name in ("workers", "seed"):
        with pytest.raises(ValueError, match=f"{name}.*-1"):
            prepare("test", str(tmp_path), **{name: -1})
    assert not list(tmp_path.iterdir())


# The command.


def test_command_prepares_and_prints_statistics(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "lra.tasks.listops", "--config=test"]
    result = subprocess.run(
        [*command, f"--data_dir={tmp_path}", "--workers=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"listops/test:{VERSION}, generated (seed 0)"
    assert lines[-1] == str(tmp_path / "listops" / "test" / VERSION)
    for split, size in VARIANTS["test"].sizes.items():
        assert f"{split}: {size} trees" in lines
    task = ListOps(9, data_dir=str(tmp_path), variant="test")
    majority, root = constant_accuracy(task, "test"), root_operator_baseline(task, "test")
    assert lines[-2] == f"  baselines  majority {majority:.1%}  root operator {root:.1%}"


def test_command_tells_errors_in_one_line(tmp_path, capsys):
    for arguments, message in (
        ([], "--config"),
        (["--config=tset"], "invalid choice: 'tset'"),
        (["--config=test", "--workers=-1"], "at least 0, got '-1'"),
        (["--config=test", "--seed=x"], "at least 0, got 'x'"),
    ):
        with pytest.raises(SystemExit) as ended:
            listops.main(arguments)
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and message in err and err.count("\n") == 1
    (tmp_path / "file").touch()
    assert listops.main(["--config=test", f"--data_dir={tmp_path}/file", "--workers=0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        listops.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for word in ("--data_dir", "--workers", "--seed", "501 to 1999 tokens", "Exit status"):
        assert word in out
