"""Metric rows on disk: what a restart keeps, what a kill can tear, what damage is refused."""

import json

import pytest

from lra.errors import UserError
from lra.jsonl import read_rows, write_rows
from lra.training.writer import METRICS_FILE, MetricWriter


def write(workdir, start, steps, tensorboard=False, loss=1.0):
    writer = MetricWriter(workdir, step=start, tensorboard=tensorboard)
    for step in steps:
        writer.write(step, "train", {"loss": loss * step})
    writer.close()


def test_rows_hold_step_split_and_values(tmp_path):
    write(tmp_path, 0, [1, 2])
    assert read_rows(tmp_path / METRICS_FILE) == [
        {"step": 1, "split": "train", "loss": 1.0},
        {"step": 2, "split": "train", "loss": 2.0},
    ]


def test_a_row_is_on_disk_when_write_returns(tmp_path):
    writer = MetricWriter(tmp_path, step=0, tensorboard=False)
    writer.write(1, "train", {"loss": 0.1})
    assert read_rows(tmp_path / METRICS_FILE) == [{"step": 1, "split": "train", "loss": 0.1}]
    writer.close()


def test_a_restart_drops_rows_past_its_step_and_keeps_the_rest(tmp_path):
    write(tmp_path, 0, [1, 2, 3, 4])
    write(tmp_path, 2, [3], loss=10.0)
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_restart_drops_a_torn_last_line(tmp_path):
    write(tmp_path, 0, [1, 2])
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text() + '{"step": 3, "spl')
    write(tmp_path, 2, [3])
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    assert path.read_text().endswith("\n")


@pytest.mark.parametrize("damage", ["{", "[1]", '"text"'])
def test_a_damaged_line_in_the_middle_is_refused_with_file_and_line(tmp_path, damage):
    path = tmp_path / METRICS_FILE
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 2}}\n')
    before = path.read_text()
    with pytest.raises(UserError, match=rf"{METRICS_FILE}:2 "):
        MetricWriter(tmp_path, step=5, tensorboard=False)
    assert path.read_text() == before


def test_a_damaged_last_line_that_was_written_whole_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2 "):
        read_rows(path)


def test_write_rows_replaces_the_file_or_leaves_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"a": 1}])
    with pytest.raises(TypeError):
        write_rows(path, [{"a": 2}, {"a": object()}])
    assert read_rows(path) == [{"a": 1}]
    write_rows(path, [{"a": 3}, {"b": "é"}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 3}, {"b": "é"}]


def test_tensorboard_files_come_only_if_asked_for(tmp_path):
    (tmp_path / "off").mkdir()
    write(tmp_path / "off", 0, [1])
    assert not (tmp_path / "off" / "tensorboard").exists()
    (tmp_path / "on").mkdir()
    write(tmp_path / "on", 0, [1, 2], tensorboard=True)
    (events,) = (tmp_path / "on" / "tensorboard").glob("events.*")
    assert b"train/loss" in events.read_bytes()
