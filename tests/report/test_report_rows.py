"""The check of single rows."""

import pytest

from lra.report.rows import NEEDED, parse_row


def test_a_valid_row_keeps_its_values_and_ignores_unknown_keys(make_row):
    row = parse_row(make_row(surprise=[1, 2]), "f:3")
    assert (row.task, row.seed, row.accuracy, row.params) == ("recall", 0, 0.9, 91234)
    assert row.versions == (("jax", "0.10.2"),)
    assert (row.source, row.file) == ("f:3", "f")


def test_whole_numbers_become_fractions(make_row):
    row = parse_row(make_row(accuracy=1, accuracy_se=0, chance=0, majority=1, loss=0))
    values = (row.accuracy, row.accuracy_se, row.chance, row.majority, row.loss)
    assert [repr(value) for value in values] == ["1.0", "0.0", "0.0", "1.0", "0.0"]


@pytest.mark.parametrize("key", NEEDED)
def test_every_needed_key_is_missed_by_name(make_row, key):
    record = make_row()
    del record[key]
    with pytest.raises(ValueError, match=f"lacks the needed key.*{key}"):
        parse_row(record)


@pytest.mark.parametrize("key", ["loss", "labels", "versions", "commit", "command"])
def test_the_other_keys_may_be_absent(make_row, key):
    record = make_row()
    del record[key]
    assert parse_row(record).accuracy == 0.9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", ""),
        ("stack", None),
        ("view", "other"),
        ("train_length", "64"),
        ("eval_length", 0),
        ("n", -1),
        ("params", 10**400),
        ("seed", True),
        ("step", 1.5),
        ("checkpoint", "middle"),
        ("accuracy", 1.5),
        ("accuracy", float("nan")),
        ("accuracy", 10**400),
        ("accuracy_se", "x"),
        ("accuracy_se", -0.1),
        ("chance", float("inf")),
        ("data", 3),
    ],
)
def test_an_unacceptable_value_is_named_with_what_is_expected(make_row, key, value):
    with pytest.raises(ValueError, match=f"^{key} is .*, expected"):
        parse_row(make_row(**{key: value}))


def test_accuracy_without_examples_is_refused(make_row):
    with pytest.raises(ValueError, match="n = 0"):
        parse_row(make_row(n=0))
    assert parse_row(make_row(n=0, accuracy=None)).accuracy is None


@pytest.mark.parametrize("bounds", [None, [256], [256, 256], [-1, 4], ["a", 4], "ab"])
def test_a_bin_needs_two_ordered_bounds(make_row, bounds):
    with pytest.raises(ValueError, match="bin is"):
        parse_row(make_row(view="bin", bin=bounds))


def test_a_bin_may_be_open(make_row):
    assert parse_row(make_row(view="bin", bin=[1024, None])).bin == (1024, None)


@pytest.mark.parametrize("record", [[], 3, "text", None])
def test_only_an_object_is_a_row(record):
    with pytest.raises(ValueError, match="JSON object"):
        parse_row(record)
