"""Finding and reading results.jsonl, and what happens to doubles."""

import json

import pytest

from lra.report.read import RESULTS_FILE, find_files, read_rows
from lra.report.rows import ReportError


def test_runs_are_found_at_and_below_a_folder(make_row, make_run, tmp_path):
    make_run("a/seed0", make_row(seed=0))
    make_run("a/seed1", make_row(seed=1))
    assert len(read_rows([tmp_path])[0]) == 2
    assert len(read_rows([tmp_path / "runs" / "a" / "seed1"])[0]) == 1


def test_a_file_reached_by_several_paths_counts_once(make_row, make_run, tmp_path):
    run = make_run("a", make_row())
    link = tmp_path / "link"
    link.symlink_to(run)
    (run / "loop").symlink_to(tmp_path / "runs")
    paths = find_files([tmp_path, run, link, run / ".." / "a"], RESULTS_FILE, [])
    assert len(paths) == 1
    rows, notices = read_rows([tmp_path, run, link])
    assert (len(rows), notices) == (1, [])


def test_a_linked_file_counts_once(make_row, make_run, tmp_path):
    run = make_run("a", make_row())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.jsonl").symlink_to(run / "results.jsonl")
    assert len(find_files([tmp_path], RESULTS_FILE, [])) == 1


def test_a_linked_run_is_found(make_row, make_run, tmp_path):
    run = make_run("a", make_row())
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "a").symlink_to(run)
    assert len(read_rows([tmp_path / "chosen"])[0]) == 1


def test_unusable_lines_are_named_and_skipped(make_row, make_run):
    torn = json.dumps(make_row(seed=2))[:50]
    lacking = make_row(seed=3)
    del lacking["accuracy"]
    run = make_run("a", make_row(seed=0), "", "[1]", lacking, make_row(seed=1), torn)
    rows, notices = read_rows([run])
    assert [row.seed for row in rows] == [0, 1]
    file = run / "results.jsonl"
    assert [notice.partition(": ")[0] for notice in notices] == [
        f"{file}:3",
        f"{file}:4",
        f"{file}:6",
    ]
    assert "lacks the needed key(s) accuracy" in notices[1]
    assert "not JSON" in notices[2]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_hostile_lines_are_skipped(make_row, make_run, line):
    run = make_run("a", make_row())
    with (run / "results.jsonl").open("ab") as file:
        file.write(line)
    rows, notices = read_rows([run])
    assert len(rows) == 1
    assert f"{run / 'results.jsonl'}:2: line skipped" in notices[0]


def test_a_setting_in_two_files_uses_the_larger_step_and_names_both(make_row, make_run, tmp_path):
    late = make_run("a", make_row(step=800, accuracy=0.8))
    early = make_run("b", make_row(step=400, accuracy=0.7))
    rows, notices = read_rows([tmp_path])
    assert [row.accuracy for row in rows] == [0.8]
    assert len(notices) == 1
    assert f"{late}/results.jsonl:1 (step 800, " in notices[0]
    assert f"{early}/results.jsonl:1 (step 400, " in notices[0]


def test_at_the_same_step_the_later_file_is_used(make_row, make_run):
    first = make_run("b", make_row(accuracy=0.8))
    second = make_run("a", make_row(accuracy=0.7))
    assert [row.accuracy for row in read_rows([first, second])[0]] == [0.7]
    assert [row.accuracy for row in read_rows([second, first])[0]] == [0.8]


@pytest.mark.parametrize("folders", [("a", "a"), ("a", "b")])
def test_a_row_of_fewer_examples_does_not_stand_for_all(make_row, make_run, tmp_path, folders):
    every, some = make_row(n=1000, step=400, accuracy=0.8), make_row(n=10, step=800, accuracy=0.9)
    if folders[0] == folders[1]:
        make_run("a", every, some)
    else:
        make_run("a", every)
        make_run("b", some)
    rows, notices = read_rows([tmp_path])
    assert [row.n for row in rows] == [1000]
    assert "step 800, 10 examples" in notices[0]


def test_equal_copies_and_earlier_steps_of_one_file_are_no_news(make_row, make_run, tmp_path):
    make_run("a", make_row(step=200, accuracy=0.5), make_row(step=400, accuracy=0.9))
    make_run("b", make_row(step=400, accuracy=0.9))
    rows, notices = read_rows([tmp_path])
    assert ([row.accuracy for row in rows], notices) == ([0.9], [])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"checkpoint": "last"},
        {"split": "validation"},
        {"eval_length": 128},
        {"config_hash": "f" * 12},
        {"view": "bin", "bin": [1, 65]},
    ],
)
def test_different_settings_are_both_kept(make_row, make_run, change):
    run = make_run("a", make_row(), make_row(accuracy=0.1, **change))
    rows, notices = read_rows([run])
    assert (len(rows), notices) == (2, [])


def test_errors_say_what_to_do(make_run, tmp_path):
    with pytest.raises(ReportError, match=r"nowhere does not exist.*run eval\.py"):
        read_rows([tmp_path / "nowhere"])
    with pytest.raises(ReportError, match=r"no results\.jsonl at or below .*run eval\.py"):
        read_rows([tmp_path])
    run = make_run("a")
    with pytest.raises(ReportError, match=r"results\.jsonl is a file, expected a directory"):
        read_rows([run / "results.jsonl"])
    with pytest.raises(ReportError, match=r"every results\.jsonl is empty.*run eval\.py"):
        read_rows([run])
    make_run("a", "{", "{}")
    with pytest.raises(ReportError, match=r"first of 2: .*results\.jsonl:1: .*run eval\.py"):
        read_rows([run])
