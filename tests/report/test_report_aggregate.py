"""Means, standard errors, columns and groups against values worked out by hand."""

import math

import pytest

from lra.report.aggregate import Range, bin_label, make_tables
from lra.report.rows import parse_row


@pytest.fixture
def tables(make_row):
    return lambda *changes: make_tables(parse_row(make_row(**change)) for change in changes)


def test_mean_and_standard_error_over_seeds(tables):
    # Deviations from 0.8 are -0.1, 0, 0.1: variance 0.02 / 2, sd 0.1, divided by sqrt(3).
    (table,) = tables(*({"seed": s, "accuracy": a} for s, a in [(5, 0.9), (0, 0.7), (1, 0.8)]))
    (cell,) = table.lines[0].cells
    assert cell.mean == pytest.approx(0.8, abs=1e-15)
    assert cell.se == pytest.approx(0.1 / math.sqrt(3), abs=1e-15)
    assert (cell.se_over, cell.seeds, cell.n) == ("seeds", (0, 1, 5), Range(1000, 1000))
    assert any("over seeds" in note for note in table.notes)
    assert not any("one seed" in note for note in table.notes)


def test_a_single_seed_uses_its_standard_error_over_examples(tables):
    (table,) = tables({"accuracy": 0.9, "accuracy_se": 0.03})
    (cell,) = table.lines[0].cells
    assert (cell.mean, cell.se, cell.se_over) == (0.9, 0.03, "examples")
    assert "† one seed: ± is the standard error over test examples" in table.notes


def test_an_unknown_standard_error_stays_unknown(tables):
    (table,) = tables({"accuracy_se": None})
    assert (table.lines[0].cells[0].se, table.lines[0].cells[0].se_over) == (None, "none")
    assert any(note.startswith("± unknown") for note in table.notes)


def test_missing_rows_and_empty_bins_are_missing(tables):
    (table,) = tables(
        {"stack": "gla", "eval_length": 64},
        {"stack": "gla", "eval_length": 128, "n": 0, "accuracy": None},
        {"stack": "softmax", "eval_length": 256},
    )
    gla, softmax = table.lines
    assert [cell.mean for cell in gla.cells] == [0.9, None, None]
    assert [cell.mean for cell in softmax.cells] == [None, None, 0.9]
    assert gla.cells[1].n == Range(0, 0)
    assert gla.cells[2].n is None
    assert any(note.startswith("missing:") for note in table.notes)


def test_a_seed_without_a_value_does_not_enter_the_mean(tables):
    (table,) = tables(
        {"seed": 0, "accuracy": 0.5, "accuracy_se": 0.02},
        {"seed": 1, "accuracy": None},
        {"seed": 1, "eval_length": 128},
    )
    cell = table.lines[0].cells[0]
    assert (cell.mean, cell.se, cell.seeds) == (0.5, 0.02, (0,))
    assert table.lines[0].seeds == (0, 1)


def test_chance_and_majority_are_ranges_over_a_column(tables):
    (table,) = tables(
        {"seed": 0, "chance": 0.1, "majority": None},
        {"seed": 1, "chance": 0.2, "majority": None},
        {"seed": 0, "eval_length": 128, "chance": 0.1, "majority": 0.3},
    )
    assert table.chance == (Range(0.1, 0.2), Range(0.1, 0.1))
    assert table.majority == (None, Range(0.3, 0.3))


@pytest.mark.parametrize(
    "change",
    [
        {"task": "trace"},
        {"split": "validation"},
        {"train_length": 128},
        {"data": "16 pairs"},
        {"view": "bin", "bin": [1, 65]},
    ],
)
def test_what_cannot_be_compared_gets_its_own_table(tables, change):
    assert len(tables({}, change)) == 2


def test_tables_are_ordered_with_lengths_before_bins(tables):
    binned = {"view": "bin", "bin": [1, 65]}
    made = tables({"task": "trace"}, {"train_length": 128}, binned, {"train_length": 9}, {})
    assert [(t.group.task, t.group.train_length, t.group.view) for t in made] == [
        ("recall", 9, "length"),
        ("recall", 64, "length"),
        ("recall", 64, "bin"),
        ("recall", 128, "length"),
        ("trace", 64, "length"),
    ]


def test_checkpoint_kinds_are_lines_of_their_own(tables):
    (table,) = tables({"checkpoint": "last", "accuracy": 0.1}, {"checkpoint": "best"})
    assert [(line.checkpoint, line.cells[0].mean) for line in table.lines] == [
        ("best", 0.9),
        ("last", 0.1),
    ]


def test_configurations_of_one_stack_are_told_apart(tables):
    (table,) = tables(
        {"config_hash": "aaaaaa1aaaaa"}, {"config_hash": "aaaaaa2aaaaa"}, {"stack": "gla"}
    )
    assert [line.label for line in table.lines] == [
        "gla",
        "softmax [aaaaaa1]",
        "softmax [aaaaaa2]",
    ]
    assert any(note.startswith("softmax has 2 configurations") for note in table.notes)


def test_columns_are_ordered_by_length_and_bins_by_bounds(tables):
    (table,) = tables(*({"eval_length": length} for length in (1024, 64, 256)))
    assert [column.label for column in table.columns] == ["64", "256", "1024"]
    bounds = ([1024, None], [256, None], [256, 512], [512, 1024])
    (table,) = tables(*({"view": "bin", "bin": each} for each in bounds))
    assert [column.label for column in table.columns] == ["256-511", "256+", "512-1023", "1024+"]
    (table,) = tables(*({"view": "bin", "bin": [1, 9], "eval_length": n} for n in (64, 32)))
    assert [column.label for column in table.columns] == ["1-8 at 32", "1-8 at 64"]


def test_bin_labels_name_the_lengths_inside():
    assert (bin_label(256, 512), bin_label(7, 8), bin_label(1, None)) == ("256-511", "7", "1+")


def test_mixed_commits_and_versions_are_flagged(tables):
    (table,) = tables({"seed": 0}, {"seed": 1})
    assert table.provenance.mixed == ()
    (table,) = tables(
        {"seed": 0, "commit": "abc", "versions": {"jax": "1", "flax": "2"}},
        {"seed": 1, "commit": None, "versions": {"jax": "1"}},
    )
    assert table.provenance.commits == {"abc": 1, "unknown": 1}
    assert table.provenance.versions == {"flax": ("2", "unknown"), "jax": ("1",)}
    assert table.provenance.mixed == (
        "mixed: rows of different commits",
        "mixed: rows of different flax versions",
    )


def test_different_numbers_of_examples_are_noted(tables):
    (table,) = tables({"seed": 0, "n": 900}, {"seed": 1, "n": 1000})
    assert table.examples == (Range(900, 1000),)
    assert any("test examples differs" in note for note in table.notes)
