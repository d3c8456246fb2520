"""ListOps: grammar and values, the prepared data, interruptions, the LRA release's files."""

import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import signal
import socket
import statistics as stats
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lra.errors import UserError
from lra.lock import lock
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
#: Real lengths, few trees, many blocks: drawing takes about a second.
LONG = Variant("long", 500, 2000, 10, 10, 1000, 40, 40, block=128)
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


def contents(directory):
    """Every file below a folder with its bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


def examples(task, split):
    source = task.source(split)
    return [source[i] for i in range(len(source))]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The variant "test", prepared in this process and without network."""
    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", None)
        prepare("test", str(folder), workers=0)
    return str(folder)


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
        own = examples(task, split)
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
            own = [bytes(example["inputs"]) for example in examples(task, split)]
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
    own = examples(ListOps(9, data_dir=str(tmp_path), variant="few"), "train")
    assert [bytes(example["inputs"]) for example in own] == expected[:60]


def test_too_few_trees_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(listops_files, "_IDLE_BLOCKS", 40)
    # Two digits under one of four operators: there are 400 trees.
    few = Variant("few", 3, 5, 2, 2, 1000, 1, 1, block=64)
    with pytest.raises(ValueError, match=r"'few' has too few different trees.*'train': \d+"):
        prepare(few, str(tmp_path), workers=0)


def test_truncation_keeps_the_head_and_the_true_length(data_dir):
    task = ListOps(10, data_dir=data_dir, variant="test")
    short, full = (examples(task.with_length(n), "validation") for n in (10, 99))
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


def test_root_operator_baseline(tmp_path):
    train = ["[MIN 0 1 ]\t0", "[MIN 2 3 ]\t2", "[MIN 0 4 ]\t0", "[MAX 2 9 ]\t9"]
    test = ["[MIN 0 9 ]\t0", "[MIN 3 3 ]\t3", "[MAX 9 9 ]\t9", "[SM 5 5 ]\t0"]
    folder = release(tmp_path, train=train, test=test)
    task = ListOps(9, release_dir=folder)
    assert root_operator_baseline(task, "train") == 3 / 4
    # SM is not in train and gets its most frequent label, 0.
    assert root_operator_baseline(task, "test") == 3 / 4
    assert root_operator_baseline(task, "test", limit=2) == 1 / 2
    with pytest.raises(ValueError, match=r"limit.*-1"):
        root_operator_baseline(task, "test", limit=-1)


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


# Preparing: workers and interruptions.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What preparing LONG in one go and in this process writes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(LONG, str(folder), workers=0)
    return contents(folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_do_not_depend_on_workers(undisturbed, workers, tmp_path):
    directory = prepare(LONG, str(tmp_path), workers)
    assert directory == tmp_path / "listops" / "long" / VERSION
    assert contents(tmp_path) == undisturbed
    assert f"listops/long/{VERSION}/listops-train.array_record-00000-of-00001" in undisturbed


def start(folder, workers, kill_at=None, variant=LONG):
    """Starts preparing a variant in another process.

    kill_at: (module, function, n): the process is killed when it calls the function the n-th time.
    """
    code = f"from lra.tasks.listops import Variant, prepare\nvariant = {variant!r}\n"
    if kill_at:
        module, function, times = kill_at
        code += f"""
import importlib, itertools, os, signal
module = importlib.import_module("lra.tasks.{module}")
function, calls = module.{function}, itertools.count(1)
def killing(*arguments):
    if next(calls) == {times}:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments)
module.{function} = killing
"""
    code += f"prepare(variant, {str(folder)!r}, workers={workers})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("workers", "kill_at"),
    [
        pytest.param(2, ("listops_files", "_read_block", 4), id="drawing"),
        pytest.param(0, ("listops_builder", "_in_order", 500), id="writing"),
        pytest.param(0, ("listops_files", "_sync", 2), id="written"),
    ],
)
def test_killed_and_run_again_gives_the_same_bytes(undisturbed, workers, kill_at, tmp_path):
    work = tmp_path / "listops" / "long" / f"incomplete_{VERSION}"
    assert start(tmp_path, workers, kill_at).wait() == -signal.SIGKILL
    assert not (tmp_path / "listops" / "long" / VERSION).exists()
    before = {path: path.stat().st_mtime_ns for path in work.glob("blocks/*.npz")}
    assert before
    drawn = []
    draw = listops_files.draw_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            listops_files, "draw_block", lambda v, s, i: (drawn.append(i), draw(v, s, i))[1]
        )
        prepare(LONG, str(tmp_path), workers=0)
    assert not set(drawn) & {int(path.stem[-5:]) for path in before}
    assert contents(tmp_path) == undisturbed


def test_workers_end_with_a_killed_parent(tmp_path):
    process = start(tmp_path, 2, variant=dataclasses.replace(LONG, train=100_000))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        process.wait()
        pytest.skip("this system does not list a process's children")
    blocks = tmp_path / "listops" / "long" / f"incomplete_{VERSION}" / "blocks"
    while process.poll() is None and not list(blocks.glob("*.npz")):
        time.sleep(0.001)
    pids = children.read_text().split()
    assert len(pids) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_worker_that_dies_is_reported(tmp_path):
    with pytest.raises(ChildProcessError, match="a process that draws trees died"):
        for _ in listops_files._blocks(LONG, 0, tmp_path, 1):
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)
    assert list(tmp_path.glob("block-*.npz"))


def test_damaged_blocks_are_drawn_again(tmp_path):
    path = tmp_path / "block-00000.npz"
    listops_files._ensure_block(LONG, 0, 0, path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    # Another variant's, empty, cut, and with one bit flipped.
    listops_files._ensure_block(dataclasses.replace(LONG, max_args=9), 0, 0, path)
    other = path.read_bytes()
    assert other != whole
    for damaged in (other, b"", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        listops_files._ensure_block(LONG, 0, 0, path)
        assert path.read_bytes() == whole
    # Sizes of splits do not matter to a block.
    written = path.stat().st_mtime_ns
    listops_files._ensure_block(dataclasses.replace(LONG, train=9), 0, 0, path)
    assert path.stat().st_mtime_ns == written


def test_failed_packing_leaves_no_data_set(tmp_path, monkeypatch, data_dir):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(listops_files, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        prepare("test", str(tmp_path), workers=0)
    with pytest.raises(FileNotFoundError, match="is not prepared"):
        ListOps(10, data_dir=str(tmp_path), variant="test").source("test")
    monkeypatch.undo()
    directory = prepare("test", str(tmp_path), workers=0)
    assert contents(directory) == contents(Path(data_dir, "listops", "test", VERSION))
    assert [path.name for path in directory.parent.iterdir()] == [VERSION]


def test_leftovers_of_a_whole_data_set_are_removed(tmp_path):
    directory = prepare("test", str(tmp_path), workers=0)
    before = contents(tmp_path)
    # As if the process had been killed between its last two acts.
    (directory.parent / f"incomplete_{VERSION}" / "blocks").mkdir(parents=True)
    written = directory.stat().st_mtime_ns
    assert prepare("test", str(tmp_path), workers=0) == directory
    assert contents(tmp_path) == before and directory.stat().st_mtime_ns == written


def test_second_process_is_refused(tmp_path):
    work = tmp_path / "listops" / "test" / f"incomplete_{VERSION}"
    work.mkdir(parents=True)
    with (
        lock(work / "lock", "it"),
        pytest.raises(UserError, match="is in use by process"),
    ):
        prepare("test", str(tmp_path), workers=0)
    prepare("test", str(tmp_path), workers=0)


# The release.


def release(tmp_path, folder="", end="\r\n", header="Source\tTarget", **rows):
    """Writes TSV files as the release has them; keywords: rows of train, val, test."""
    directory = tmp_path / folder
    directory.mkdir(parents=True, exist_ok=True)
    for split, lines in rows.items():
        text = "".join(line + end for line in [header, *lines])
        (directory / f"basic_{split}.tsv").write_bytes(text.encode())
    return str(tmp_path)


ROWS = ["( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [SM ( ( ( [MIN 3 ) 4 ) ] ) ) 8 ) ] )\t1"]


@pytest.mark.parametrize("folder", ["", "listops-1000", "lra_release/listops-1000"])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_release_files_are_read(tmp_path, folder, end):
    directory = release(tmp_path, folder, end, train=ROWS * 2, val=ROWS[1:], test=ROWS[:1])
    task = make_task("listops", length=5, seed=0, release_dir=directory)
    assert task.spec.data == "listops/default, LRA release"
    assert [len(task.source(split)) for split in ("train", "validation", "test")] == [4, 1, 1]
    first, second = examples(task, "train")[2:]
    assert decode(first["inputs"]) == "[MAX 2 9 ]"
    assert (first["label"], first["length"]) == (9, 4)
    assert decode(second["inputs"]) == "[SM [MIN 3 4 ]"
    assert (second["label"], second["length"]) == (1, 7)
    copy = pickle.loads(pickle.dumps(task.source("train")))
    np.testing.assert_array_equal(copy[3]["inputs"], second["inputs"])
    # The release has the default variant only.
    with pytest.raises(ValueError, match="'default' alone, got variant 'short'"):
        ListOps(5, release_dir=directory, variant="short")


def test_last_row_of_the_release_may_have_no_line_end(tmp_path):
    directory = release(tmp_path, test=ROWS)
    path = Path(directory, "basic_test.tsv")
    path.write_bytes(path.read_bytes().removesuffix(b"\r\n"))
    assert [e["label"] for e in examples(ListOps(9, release_dir=directory), "test")] == [9, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "got no tab"),
        ("( ( ( [MAX 2 ) 9", "got no tab in b'"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t", "expected a value 0 to 9 behind the tab, got b''"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t10", "behind the tab, got b'10'"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t9\t9", r"behind the tab, got b'9\\t9'"),
        ("( )\t1", "expected a tree before the tab"),
        ("( ( ( [MAX 2 ) 9 )\t9", "square brackets do not pair"),
        ("\0" * 99, r"got no tab in b'[\\x0]*' … b'"),
    ],
)
def test_damaged_rows_are_reported_with_file_and_line(tmp_path, row, message):
    directory = release(tmp_path, train=[ROWS[0], row, ROWS[1]])
    with pytest.raises(ValueError, match=rf"^{tmp_path}/basic_train.tsv:3: .*{message}"):
        ListOps(9, release_dir=directory).source("train")


def test_damaged_heads_are_reported(tmp_path):
    release(tmp_path, header="Target\tSource", train=ROWS)
    release(tmp_path, val=[])
    (tmp_path / "basic_test.tsv").touch()
    task = ListOps(9, release_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"basic_train.tsv:1: expected the header"):
        task.source("train")
    with pytest.raises(ValueError, match=r"basic_val.tsv:2: the file ends before its first row"):
        task.source("validation")
    with pytest.raises(ValueError, match=r"basic_test.tsv:1: the file ends before its first row"):
        task.source("test")


def test_missing_release_names_what_was_looked_for(tmp_path):
    release(tmp_path, train=ROWS)
    with pytest.raises(FileNotFoundError) as error:
        ListOps(9, release_dir=str(tmp_path)).source("validation")
    message = str(error.value)
    assert "\n" not in message
    for folder in ("", "listops-1000/", "lra_release/listops-1000/"):
        assert f"{tmp_path}/{folder}basic_val.tsv" in message


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
