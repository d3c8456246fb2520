"""ListOps from the files of the LRA release."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from lra.tasks import make_task
from lra.tasks.listops import (
    ListOps,
    decode,
    root_operator_baseline,
)


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
    first, second = list(task.source("train"))[2:]
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
    assert [e["label"] for e in list(ListOps(9, release_dir=directory).source("test"))] == [9, 1]


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
