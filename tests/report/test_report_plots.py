"""What a plot shows; how it looks is judged by eye."""

import math

import pytest

from lra.report.aggregate import make_tables
from lra.report.plots import _make_figure, render
from lra.report.rows import parse_row


@pytest.fixture
def table(make_row):
    def make(*changes):
        (made,) = make_tables(parse_row(make_row(**change)) for change in changes)
        return made

    return make


def _labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_lengths_stand_on_a_log_axis_with_errors_and_gaps(table):
    figure = _make_figure(
        table(
            {"eval_length": 64, "accuracy": 0.9, "accuracy_se": 0.01},
            {"eval_length": 96, "accuracy": None},
            {"eval_length": 256, "accuracy": 0.5, "accuracy_se": 0.05},
        )
    )
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "96", "256"]
    assert axes.get_xlabel() == "evaluation length (tokens)"
    assert axes.get_ylabel() == "accuracy (%)"
    (container,) = axes.containers
    y = list(container[0].get_ydata())
    assert (y[0], y[2]) == (90.0, 50.0)
    assert math.isnan(y[1])
    segments = container[2][0].get_segments()
    assert [tuple(point[1] for point in segments[i]) for i in (0, -1)] == [
        pytest.approx((89, 91)),
        pytest.approx((45, 55)),
    ]
    assert _labels(figure) == ["softmax", "chance", "majority", "training length (64)"]


def test_the_training_length_is_marked_even_outside_the_data(table):
    figure = _make_figure(table({"train_length": 512, "eval_length": 64}))
    (axes,) = figure.axes
    (marker,) = (line for line in axes.lines if "training length" in str(line.get_label()))
    assert list(marker.get_xdata()) == [512, 512]
    low, high = axes.get_xlim()
    assert low < 64
    assert high > 512


def test_reference_lines_are_dashed_and_dotted(table):
    figure = _make_figure(table({"chance": 0.1, "majority": 0.3}))
    styles = {line.get_label(): line for line in figure.axes[0].lines}
    assert styles["chance"].get_linestyle() == "--"
    assert styles["majority"].get_linestyle() == ":"
    assert set(styles["chance"].get_ydata()) == {10.0}
    assert set(styles["majority"].get_ydata()) == {30.0}
    assert "majority" not in _labels(_make_figure(table({"majority": None})))


def test_a_reference_that_varies_follows_the_columns(table):
    figure = _make_figure(
        table(
            {"chance": 0.1},
            {"chance": 0.2, "eval_length": 128},
            {"chance": 0.4, "eval_length": 128, "seed": 1},
        )
    )
    curves = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert [10.0, 20.0] in curves
    assert [10.0, 40.0] in curves
    assert _labels(figure).count("chance") == 1


def test_bins_are_ticks_and_the_training_bin_is_shaded(table):
    bounds = ([1, 256], [256, 512], [512, None])
    figure = _make_figure(table(*({"view": "bin", "bin": b, "train_length": 300} for b in bounds)))
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1-255", "256-511", "512+"]
    (span,) = axes.patches
    assert "bin of the training length (300)" in _labels(figure)
    assert span.get_extents().transformed(axes.transData.inverted()).x0 == pytest.approx(0.5)


def test_many_lines_look_different(table):
    figure = _make_figure(table(*({"stack": f"s{i:02}"} for i in range(40))))
    data = [container[0] for container in figure.axes[0].containers]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in data}
    assert len(looks) == 40
    figure.canvas.draw()
    assert figure.legends[0].get_window_extent().y0 >= 0


def test_the_checkpoint_is_in_the_label_only_where_kinds_differ(table):
    assert "softmax" in _labels(_make_figure(table({})))
    labels = _labels(_make_figure(table({}, {"checkpoint": "last"})))
    assert {"softmax (best)", "softmax (last)"} <= set(labels)


def test_images_are_reproducible_and_undated(table):
    changes = [{"stack": "gla"}, {"stack": "softmax", "eval_length": 256}]
    first, second = render(table(*changes)), render(table(*reversed(changes)))
    assert first == second
    assert first["png"].startswith(b"\x89PNG")
    assert b"<dc:date>" not in first["svg"]
    assert b"tIME" not in first["png"]


@pytest.mark.parametrize("stack", ["$x^{", "_hidden", "注意", "a\nb", "<&>"])
def test_any_name_can_be_drawn(table, stack):
    images = render(table({"stack": stack, "task": stack, "data": stack * 100}))
    assert b"</svg>" in images["svg"]
    assert len(_labels(_make_figure(table({"stack": stack})))) == 4
