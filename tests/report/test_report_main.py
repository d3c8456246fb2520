"""The command as users run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _report(*args: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lra.report", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        timeout=120,
        check=False,
    )


def test_tables_are_printed_and_the_last_line_names_the_report(make_row, make_run, tmp_path):
    runs = [make_run(f"s{seed}", make_row(seed=seed)) for seed in range(2)]
    done = _report(*runs, f"--out={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "90.00 ± 0.00" in done.stdout
    path = tmp_path / "out" / "report.md"
    assert done.stdout.splitlines()[-1] == f"report: {path.resolve()}"
    assert "90.00 ± 0.00" in path.read_text()


def test_default_folders(make_row, make_run, tmp_path):
    run = make_run("a", make_row())
    assert _report(run).returncode == 0
    assert (run / "report" / "report.md").is_file()
    assert _report(run, run, cwd=tmp_path).returncode == 0
    assert (tmp_path / "report" / "report.md").is_file()


def test_an_ascii_terminal_still_gets_its_table(make_row, make_run):
    done = _report(make_run("a", make_row()), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "90.00 ? 1.00" in done.stdout


def test_torn_lines_warn_but_do_not_fail(make_row, make_run):
    run = make_run("a", make_row(), '{"task": "rec')
    done = _report(run)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"warning: {run}/results.jsonl:2: line skipped: not JSON (a torn line?)"
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda run, row, tmp: [tmp / "none"], "none does not exist, expected a directory"),
        (lambda run, row, tmp: [tmp], "no results.jsonl at or below"),
        (lambda run, row, tmp: [run("a")], "every results.jsonl is empty"),
        (lambda run, row, tmp: [run("a", "{", "[]")], "no line holds a usable result row"),
        (lambda run, row, tmp: [run("a", row(), "{"), "--out=/dev/null/x"], "cannot write"),
        (lambda run, row, tmp: [run("a", row()), "--checkpoint=last"], "no row of checkpoint"),
        (lambda run, row, tmp: [run("a", row()), "--checkpoint=x"], "invalid choice"),
        (lambda run, row, tmp: [], "required: DIR"),
        (lambda run, row, tmp: [run("a", row()), "--out="], "directory name is empty"),
    ],
)
def test_an_error_is_one_line_and_writes_nothing(make_row, make_run, tmp_path, make, said):
    args = make(make_run, make_row, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = _report(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_help_names_every_option():
    done = _report("--help")
    assert done.returncode == 0
    for word in ("DIR", "--out", "--checkpoint", "report.md", "Exit status", "eval.py"):
        assert word in done.stdout


def test_a_closed_pipe_is_no_error(make_row, make_run):
    run = make_run("a", *(make_row(task=f"t{i}") for i in range(3)))
    command = f"{sys.executable} -m lra.report {run} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_printing_rows_needs_neither_matplotlib_nor_jax():
    code = "import sys, lra.report, lra.report.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    code = "import sys, lra.report.plots; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
