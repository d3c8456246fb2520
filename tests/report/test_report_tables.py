"""Text, Markdown and CSV of a table."""

import csv
import io
import json

import pytest

from lra.report import text_tables
from lra.report.aggregate import make_tables
from lra.report.rows import parse_row
from lra.report.tables import escape, format_csv, format_markdown


@pytest.fixture
def table(make_row):
    def make(*changes):
        (made,) = make_tables(parse_row(make_row(**change)) for change in changes)
        return made

    return make


def _line(text: str, start: str, table: int = 0) -> list[str]:
    """Cells of a line of the results (table 0) or of the costs (table 1)."""
    line = [line for line in text.splitlines() if line.startswith(start)][table]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_text_table_shows_every_cell(make_row):
    text = text_tables(
        [
            make_row(seed=0, accuracy=0.7, eval_length=64),
            make_row(seed=1, accuracy=0.9, eval_length=64),
            make_row(seed=1, accuracy=0.5, accuracy_se=0.02, eval_length=128, majority=None),
            make_row(
                stack="gla",
                params=7,
                eval_length=64,
                majority=0.3,
                state_floats=1024,
                mixing_flops=2560.0,
                step_ms=3.21,
            ),
        ]
    )
    assert _line(text, "stack") == [
        *("stack", "checkpoint", "64", "128", "parameters", "n seeds", "seeds"),
    ]
    # The two accuracies 0.7 and 0.9 have sd 0.1 * sqrt(2), hence a standard error of 0.1.
    assert _line(text, "softmax") == [
        *("softmax", "best", "80.00 ± 10.00", "50.00 ± 2.00† (1 of 2 seeds)"),
        *("91,234", "2", "0, 1"),
    ]
    assert _line(text, "gla") == [
        "gla",
        "best",
        "90.00 ± 1.00†",
        "missing",
        "7",
        "1",
        "0",
    ]
    assert _line(text, "chance") == ["chance", "-", "12.50", "12.50", *["-"] * 3]
    assert _line(text, "majority") == [
        *("majority", "-", "20.00 to 30.00", "missing", *["-"] * 3),
    ]
    assert _line(text, "test examples")[2:4] == ["1,000", "1,000"]
    assert _line(text, "stack", 1) == [
        *("stack", "parameters", "state", "mixing FLOPs/token", "ms/step", "temporary MB"),
    ]
    assert _line(text, "softmax", 1) == ["softmax", "91,234", *["missing"] * 4]
    assert _line(text, "gla", 1) == ["gla", "7", "1,024", "2,560", "3.2", "missing"]
    assert "commits: abc123 (4 rows)" in text
    assert "versions: jax 0.10.2" in text


def test_text_tables_of_no_rows_is_empty():
    assert text_tables([]) == ""


def test_text_tables_refuses_a_row_that_lacks_a_key(make_row):
    row = make_row()
    del row["chance"]
    with pytest.raises(ValueError, match="chance"):
        text_tables([row])


def test_text_columns_are_aligned(make_row):
    text = text_tables([make_row(), make_row(stack="a-much-longer-stack", seed=12)])
    start = text.splitlines().index("-" * max(map(len, text.splitlines()[3:9])))
    body = text.splitlines()[start - 1 : start + 6]
    ends = {line.index(cell) + len(cell) for line, cell in zip(
        body[2:4], ["90.00 ± 1.00†"] * 2, strict=True)}  # fmt: skip
    assert len(ends) == 1
    assert len({len(line) for line in body}) == 1


def test_values_cannot_drive_a_terminal(make_row):
    text = text_tables([make_row(stack="a\x1b[31m\nb", data="c\rd")])
    assert "\x1b" not in text
    assert "\r" not in text
    assert any(line.startswith("a [31m b ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("raw", "escaped"),
    [
        ("a|b", "a&#124;b"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("x*y_z", r"x\*y\_z"),
        ("[l](u)", r"\[l\](u)"),
        ("`c` ~s~ $m$", r"\`c\` \~s\~ \$m\$"),
        ("back\\slash", "back&#92;slash"),
        ("two\nlines", "two lines"),
        ("3xgla/softmax.2:gla.6+linear", "3xgla/softmax.2:gla.6+linear"),
    ],
)
def test_markdown_escapes(raw, escaped):
    assert escape(raw) == escaped


def test_markdown_table_keeps_its_shape_whatever_the_values(table):
    text = format_markdown(
        table({"stack": "a|b <i>", "task": "x|y", "data": "</details>|", "command": "c ```\n|"}),
        "slug",
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 6 + 3
    assert {line.count("|") for line in rows} == {7}
    assert "<i>" not in text
    assert text.count("</details>") == 1
    assert "\n````\nc ``` |\n````\n" in text
    assert "![" in text
    assert "](slug.png)" in text


def test_markdown_lists_provenance_and_flags_mixtures(table):
    text = format_markdown(
        table({"seed": 0, "commit": "aaa", "command": "c1"}, {"seed": 1, "commit": "bbb"}), "s"
    )
    assert "- mixed: rows of different commits\n" in text
    assert "- commits: aaa (1 rows), bbb (1 rows)\n" in text
    assert "\nc1\npython eval.py --workdir=runs/a\n" in text


def _read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_is_long_and_exact(table):
    accuracies = (0.1234567890123, 1 / 3)
    made = table(
        *({"seed": s, "accuracy": a, "stack": 'x,"y'} for s, a in enumerate(accuracies)),
        {"stack": "gla", "eval_length": 128, "state_floats": 64, "step_ms": 3.5, "loss": None},
    )
    rows = _read(format_csv(made))
    assert [(row["stack"], row["eval_length"]) for row in rows] == [
        *(("gla", "64"), ("gla", "128"), ('x,"y', "64"), ('x,"y', "128")),
    ]
    assert (rows[0]["mean"], rows[0]["n_seeds"], rows[0]["seeds"]) == ("nan", "0", "none")
    assert (rows[1]["se_over"], rows[1]["step_ms"], rows[1]["loss"]) == ("examples", "3.5", "nan")
    # The state is that at the training length, 64, of which there is no row.
    assert rows[1]["state_floats"] == "nan"
    cell = made.lines[1].cells[0]
    assert (float(rows[2]["mean"]), float(rows[2]["se"])) == (cell.mean, cell.se)
    assert float(rows[2]["mean"]) == pytest.approx(sum(accuracies) / 2, abs=1e-16)
    assert (rows[2]["seeds"], rows[2]["n"], rows[2]["chance"]) == ("0 1", "1000", "0.125")
    assert all(value != "" for row in rows for value in row.values())


def test_csv_states_bins(table):
    made = table(*({"view": "bin", "bin": each} for each in ([1, 256], [256, None])))
    assert [(row["bin_low"], row["bin_high"]) for row in _read(format_csv(made))] == [
        *(("1", "256"), ("256", "inf")),
    ]


def test_rows_survive_json(make_row):
    row = make_row()
    assert text_tables([json.loads(json.dumps(row))]) == text_tables([row])
