"""Sweeps in the report: what is missing has a row, and what was chosen is said."""

import json

import pytest

from lra.report.write import load_report, write_report

RUN = {
    "setting": 0, "named": "", "task": "recall", "stack": "linear", "seed": 0, "rate": 0.01,
    "train_length": 64, "lengths": [64, 128], "split": "test", "tested": True, "state": "done", "reason": "",
}  # fmt: skip
CHOICE = {
    "task": "recall", "stack": "linear", "setting": "configs/recall.py", "seeds": [0], "chosen": 0.01,
    "candidates": [
        {"rate": 0.01, "accuracy": 0.5, "accuracy_se": 0.01, "n": 10, "failed": None},
        {"rate": 1e6, "accuracy": None, "accuracy_se": None, "n": None, "failed": "loss is nan"},
    ],
}  # fmt: skip


@pytest.fixture
def sweep(make_run, make_row):
    """A sweep of two settings and two seeds, of which the second setting and a seed failed."""
    row = make_row(
        task="recall", stack="linear", split="test", train_length=64, eval_length=64, seed=0
    )
    folder = make_run("sweep/a", row).parent
    runs = [
        {**RUN, "name": "a"},
        {**RUN, "name": "b", "seed": 1, "state": "failed", "reason": "loss is nan"},
        {
            **RUN,
            "name": "c",
            "setting": 1,
            "named": "model.dim=8",
            "stack": "softmax",
            "state": "left",
        },
        {**RUN, "name": "d", "setting": 2, "stack": "other", "train_length": 16, "state": "left"},
        {**RUN, "name": "e", "tested": False, "state": "not chosen"},
    ]
    path = folder / "sweep.json"
    path.write_text(json.dumps({"runs": runs, "selection": [CHOICE]}))
    return folder


def test_missing_seeds_and_settings_are_rows(sweep):
    tables = load_report([sweep]).tables
    assert [table.group.train_length for table in tables] == [16, 64]
    there = {line.stack: line for line in tables[1].lines}
    assert [line.label for line in tables[1].lines] == ["linear", "softmax (model.dim=8)"]
    assert there["linear"].seeds == (0, 1)
    assert there["linear"].cells[0].seeds == (0,)
    assert there["softmax"].seeds == (0,)
    assert all(cell.mean is None for cell in there["softmax"].cells)
    notes = "\n".join(tables[1].notes)
    assert "linear, seed 1: failed: loss is nan (b)" in notes
    assert "softmax, seed 0: left (c)" in notes
    assert [column.label for column in tables[0].columns] == ["64", "128"]
    assert [line.label for line in tables[0].lines] == ["other"]


def test_the_page_says_what_was_chosen_from_what(sweep):
    text = write_report([sweep]).read_text()
    assert "Learning rates, chosen on validation" in text
    assert "0.01: 50.00 ± 1.00 (n = 10); 1e+06: failed (loss is nan)" in text
    assert "Runs without a result" in text
    assert "| recall | softmax | 0 | c | left | nothing |" in text
    assert "not chosen" not in text


def test_a_sweep_without_any_result_is_a_report_of_missing_rows(tmp_path):
    (tmp_path / "sweep.json").write_text(
        json.dumps({"runs": [{**RUN, "name": "a", "state": "left"}], "selection": []})
    )
    (table,) = load_report([tmp_path]).tables
    assert [line.label for line in table.lines] == ["linear"]
    assert write_report([tmp_path]).exists()


def test_rows_of_runs_that_the_sweep_does_not_test_are_left_out_and_named(
    sweep, make_run, make_row
):
    make_run("sweep/old", make_row(stack="stale", train_length=64))
    report = load_report([sweep])
    assert "stale" not in {line.stack for table in report.tables for line in table.lines}
    assert any("old: left out" in notice for notice in report.notices)


def test_a_run_with_a_result_on_other_data_is_not_missing(sweep, make_run, make_row):
    row = make_row(task="recall", stack="softmax", split="test", train_length=64, data="other")
    make_run("sweep/c", row)
    for table in load_report([sweep]).tables:
        assert "(c)" not in "\n".join(table.notes)


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 3}', '{"runs": [{}], "selection": []}'])
def test_a_damaged_sweep_file_is_left_out_with_a_notice(sweep, text):
    (sweep / "sweep.json").write_text(text)
    report = load_report([sweep])
    assert "sweep.json: sweep left out" in report.notices[0]
    assert len(report.tables) == 1


def test_configurations_of_a_stack_are_told_apart_by_what_differs(tmp_path, make_run, make_row):
    for name, rate, scale in (("a", 0.1, "none"), ("b", 0.2, "none"), ("c", 0.2, "ssmax")):
        folder = make_run(name, make_row(config_hash=name * 12))
        config = {
            "seed": ord(name), "run": {"workers": ord(name)}, "model": {"dim": 8},
            "optim": {"learning_rate": rate}, "attention": {"softmax": {"scale": scale}},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
    (table,) = load_report([tmp_path]).tables
    assert [line.label for line in table.lines] == [
        "softmax (attention.softmax.scale=none, optim.learning_rate=0.1)",
        "softmax (attention.softmax.scale=none, optim.learning_rate=0.2)",
        "softmax (attention.softmax.scale=ssmax, optim.learning_rate=0.2)",
    ]
    assert not any("config hash" in note for note in table.notes)
    (folder / "config.json").unlink()
    (table,) = load_report([tmp_path]).tables
    assert table.lines[0].label == "softmax [aaaaaa]"
