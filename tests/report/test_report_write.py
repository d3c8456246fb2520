"""The report folder."""

import re

import pytest

from lra.report import ReportError, write_report
from lra.report.aggregate import Group
from lra.report.write import load_report, slug, write_files


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_report_has_its_table_plot_and_data(make_row, make_run, capsys):
    run = make_run("a", make_row(), make_row(task="x/y: <z>|", data="d"))
    path = write_report([run], None)
    assert path == (run / "report" / "report.md").resolve()
    text = path.read_text()
    files = _contents(path.parent)
    assert sorted(name.rpartition(".")[2] for name in files) == sorted(
        ["csv", "png", "svg"] * 2 + ["md"]
    )
    links = set(re.findall(r"\]\(([^)]*)\)", text))
    assert links == set(files) - {"report.md"}
    assert capsys.readouterr().err == ""


def test_the_same_rows_give_the_same_bytes(make_row, make_run, tmp_path):
    rows = [
        make_row(seed=seed, accuracy=accuracy, eval_length=length, stack=stack)
        for stack in ("gla", "softmax")
        for length in (64, 128)
        for seed, accuracy in enumerate((0.1, 0.7, 0.30000000000000004))
    ]
    one = make_run("one", *rows)
    two = make_run("two", *reversed(rows))
    first = _contents(write_report([one], tmp_path / "first").parent)
    assert len(first) == 4
    assert first == _contents(write_report([one], tmp_path / "first").parent)
    assert first == _contents(write_report([two], tmp_path / "second").parent)


def test_notices_reach_stderr_and_the_report(make_row, make_run, capsys):
    run = make_run("a", make_row(), "{torn")
    text = write_report([run], None).read_text()
    where = f"{run / 'results.jsonl'}:2"
    assert capsys.readouterr().err.startswith(f"warning: {where}: line skipped")
    assert "results.jsonl:2: line skipped" in text


def test_the_checkpoint_filter_keeps_one_kind(make_row, make_run):
    run = make_run("a", make_row(), make_row(checkpoint="last"))
    kinds = [[line.checkpoint for line in load_report([run], kind).tables[0].lines]
             for kind in (None, "best", "last")]  # fmt: skip
    assert kinds == [["best", "last"], ["best"], ["last"]]
    with pytest.raises(ReportError, match="expected one of best, last"):
        load_report([run], "final")
    with pytest.raises(ReportError, match=r"no row of checkpoint 'last'.*best"):
        load_report([make_run("b", make_row())], "last")


def test_slugs_are_safe_and_different():
    group = Group("../a b:c/d+<e>|" * 20, "test", "length", 64, "data")
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,100}", slug(group))
    others = [group, group._replace(task=group.task + "|"), group._replace(data="other")]
    assert len({slug(each) for each in others}) == 3


def test_a_failed_write_leaves_the_earlier_report(tmp_path):
    write_files({"a.csv": b"old", "report.md": b"old"}, tmp_path)
    with pytest.raises(ReportError, match="cannot write"):
        write_files({"a.csv": b"new", "no/folder": b"new", "report.md": b"new"}, tmp_path)
    assert _contents(tmp_path) == {"a.csv": b"old", "report.md": b"old"}
    write_files({"a.csv": b"new"}, tmp_path)
    assert _contents(tmp_path) == {"a.csv": b"new", "report.md": b"old"}


def test_half_a_surrogate_pair_can_be_written(make_row, make_run):
    run = make_run("a", make_row(stack="a\ud800"))
    assert "a " in write_report([run], None).read_text()
