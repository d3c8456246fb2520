"""Command line: `python -m lra.report DIR [DIR...] [--out=DIR] [--checkpoint=best|last]`."""

import io
import os
import sys
from collections.abc import Sequence

from lra.arguments import Parser, folder
from lra.report.rows import CHECKPOINTS, ReportError
from lra.report.sweeps import choice_grid, missing_grid
from lra.report.tables import aligned, format_text, printable
from lra.report.write import default_out, load_report, make_files, warn, write_files

DESCRIPTION = """\
Turns result rows into tables and plots of accuracy against length.

Reads every results.jsonl at or below each DIR (a DIR may be a run itself; a file that two DIRs
lead to counts once). Rows are compared within one table when task, split, view, train length and
data variant are the same; a cell is the mean over seeds ± its standard error, or, with one seed,
± the standard error over test examples."""

EPILOG = """\
Writes to OUT: report.md with all tables, notes, provenance and plots; for every table a CSV in
long form (fractions at full precision), a PNG and an SVG. Prints the tables and, as the last
line, the path of report.md. Lines that cannot be used are warned about on stderr as file:line.

Exit status: 0 a report was written; 2 an error, told in one line on stderr.

Example:
  python eval.py --workdir=runs/recall-softmax-0
  python -m lra.report runs --checkpoint=best --out=reports/recall"""


def _parser() -> Parser:
    parser = Parser("python -m lra.report", DESCRIPTION, EPILOG)
    parser.add_argument(
        "dirs", metavar="DIR", nargs="+", type=folder, help="folder to search for results.jsonl"
    )
    parser.add_argument(
        "--out",
        metavar="OUT",
        type=folder,
        help="folder to write to (default: DIR/report for one DIR, ./report for several)",
    )
    parser.add_argument(
        "--checkpoint",
        choices=CHECKPOINTS,
        help="use only rows of this kind of checkpoint (default: both, in rows of their own)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments without the program's name; None for `sys.argv[1:]`.

    Returns:
        The exit status: 0, or 2 after an error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks "±" shows "?" instead of failing after the work is done.
        sys.stdout.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        report = load_report(args.dirs, args.checkpoint)
        path = write_files(make_files(report), args.out or default_out(args.dirs))
    except ReportError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; an earlier report is as it was", file=sys.stderr)
        return 130
    warn(report.notices)
    try:
        print("\n".join(map(format_text, report.tables)))
        for title, grid in (
            ("learning rates, chosen on validation", choice_grid(report.plans.choices)),
            ("runs without a result", missing_grid(report.plans)),
        ):
            if len(grid) > 1:
                print(f"{title}:\n{aligned(grid)}\n")
        print(f"report: {path}", flush=True)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; the report itself is written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
