"""Accuracy against length as PNG and SVG; the same table gives the same bytes."""

import io
import math
import textwrap
import warnings

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from lra.report.aggregate import Range, Table
from lra.report.tables import printable, title

# Okabe & Ito's palette, told apart with every common colour blindness; yellow is left out because
# it is too light for lines on white, black because the reference lines use greys.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", "-.")
REFERENCE_COLOR = "#444444"
MANY_TICKS = 7
SIZE_INCHES = (8.0, 4.5)


def _literal(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return printable(text).replace("$", r"\$")


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def _positions(table: Table) -> list[float]:
    if table.group.view == "bin":
        return [float(i) for i in range(len(table.columns))]
    return [float(column.eval_length) for column in table.columns]


def _draw_reference(
    axes: Axes, x: list[float], values: tuple[Range | None, ...], style: str, label: str
) -> None:
    """A line at the reference accuracy; two where the rows of a column disagree."""
    low = [_percent(None if value is None else value.low) for value in values]
    high = [_percent(None if value is None else value.high) for value in values]
    known = {value for value in (*low, *high) if not math.isnan(value)}
    if not known:
        return
    if len(known) == 1:
        axes.axhline(known.pop(), color=REFERENCE_COLOR, linestyle=style, linewidth=1, label=label)
        return
    # A single column has no extent: a marker keeps its reference visible.
    marker = "_" if len(x) == 1 else None
    for curve, name in ((low, label), (high, None)):
        if name is not None or low != high:
            axes.plot(
                x, curve, color=REFERENCE_COLOR, linestyle=style, linewidth=1, marker=marker,
                label=name,
            )  # fmt: skip


def _draw_lines(axes: Axes, table: Table, x: list[float]) -> None:
    several = len({line.checkpoint for line in table.lines}) > 1
    # Cycles of 6, 7 and 18 give 126 different looks before one returns.
    for i, line in enumerate(table.lines):
        label = f"{line.label} ({line.checkpoint})" if several else line.label
        axes.errorbar(
            x,
            [_percent(cell.mean) for cell in line.cells],
            yerr=[0.0 if cell.se is None else 100 * cell.se for cell in line.cells],
            color=PALETTE[i % len(PALETTE)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=LINE_STYLES[i // len(PALETTE) % len(LINE_STYLES)],
            markersize=5,
            linewidth=1.5,
            capsize=3,
            # matplotlib hides labels that start with an underscore.
            label=_literal(label) if not label.startswith("_") else f" {_literal(label)}",
        )


def _label_lengths(axes: Axes, table: Table, x: list[float]) -> None:
    length = table.group.train_length
    if table.group.view == "bin":
        axes.set_xlabel("true example length (tokens)")
        for i, column in enumerate(table.columns):
            low, high = column.bin or (0, None)
            if low <= length and (high is None or length < high):
                label = f"bin of the training length ({length})"
                axes.axvspan(i - 0.5, i + 0.5, color="#EEEEEE", zorder=0, label=label)
        axes.set_xlim(-0.5, len(x) - 0.5)
    else:
        axes.set_xlabel("evaluation length (tokens)")
        axes.set_xscale("log", base=2)
        label = f"training length ({length})"
        axes.axvline(length, color="#999999", linewidth=3, alpha=0.6, zorder=0, label=label)
        axes.set_xlim(min(*x, length) / 2**0.3, max(*x, length) * 2**0.3)
    axes.minorticks_off()
    turned = len(x) > MANY_TICKS
    axes.set_xticks(
        x,
        [column.label for column in table.columns],
        rotation=45 if turned else 0,
        ha="right" if turned else "center",
        rotation_mode="anchor" if turned else "default",
    )


def _make_figure(table: Table) -> Figure:
    figure = Figure(figsize=SIZE_INCHES, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x = _positions(table)
    _draw_lines(axes, table, x)
    _draw_reference(axes, x, table.chance, "--", "chance")
    _draw_reference(axes, x, table.majority, ":", "majority")
    _label_lengths(axes, table, x)
    axes.set_ylabel("accuracy (%)")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2.0), min(high, 102.0))
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    data = textwrap.wrap(f"data: {table.group.data or 'not stated'}", 76, max_lines=2)
    heading = [*textwrap.wrap(title(table), 76), *data]
    axes.set_title("\n".join(map(_literal, heading)), fontsize=9, loc="left")
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    # The stacks first, in the order of the table, then the references.
    entries.sort(key=lambda entry: not isinstance(entry[0], ErrorbarContainer))
    labels = [textwrap.fill(str(label), 34, break_on_hyphens=False) for _, label in entries]
    handles = [handle for handle, _ in entries]
    # A long legend makes the figure taller: a line of it takes up to 0.18 inches.
    width, height = SIZE_INCHES
    rows = sum(1 + label.count("\n") for label in labels)
    figure.set_size_inches(width, max(height, 0.18 * (rows + 1)))
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def render(table: Table) -> dict[str, bytes]:
    """Draws accuracy (%) against length with error bars, the training length and references.

    Args:
        table: The table to draw; a missing cell is a gap in its line.

    Returns:
        `{"png": ..., "svg": ...}`, complete files without dates. The user's matplotlib settings
        have no effect on them.
    """
    images = {}
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "lra.report"
        # A script that the bundled font lacks shows as boxes; the tables have the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = _make_figure(table)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=metadata)
            images[kind] = buffer.getvalue()
    return images
