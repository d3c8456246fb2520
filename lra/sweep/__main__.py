"""Command line: `python -m lra.sweep FILE[:arg] --workdir=DIR`."""

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lra import provenance
from lra.arguments import Parser, at_least, folder
from lra.errors import UserError, user_errors
from lra.lock import lock
from lra.signals import StopRequest
from lra.sweep.driver import Driver
from lra.sweep.grid import Sweep
from lra.sweep.plan import Run, check_tasks, expand, file_digest, is_search, load_sweep, planned

DESCRIPTION = """\
Runs every run of a sweep file, and writes the report of their results.

With several learning rates each setting is first trained at every rate with the first seed, or as
many as the file says; the rate that is best on validation is run with all seeds, and only those runs
are tested. Finished runs are skipped, interrupted ones go on where they were, so the same command
goes on after whatever ended it. A run that ends with status 2 has said what is wrong and is not tried
again."""

EPILOG = """\
--run.KEY=VALUE sets a key under `run` in every run: --run.data_dir=DIR, --run.platform=gpu.

Each run has a folder in DIR with its log, log.txt. DIR/sweep.json has the state of every run and
what each learning rate was chosen from; DIR/report is what python -m lra.report DIR writes.

Exit status: 0 every run is done; 1 runs failed, which the summary names; 2 an error, told in one
line; 130 or 143 stopped by Ctrl-C or SIGTERM, runs saved.

Example:
  python -m lra.sweep configs/sweeps/quickstart.py --workdir=runs/quickstart --jobs=2"""


def _parser() -> Parser:
    parser = Parser("python -m lra.sweep", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("file", metavar="FILE[:arg]", help="sweep file with get_sweep(arg), as configs/sweeps/*.py")
    add(
        "--workdir", metavar="DIR", type=folder, help="folder of the sweep, needed unless --dry_run"
    )
    add("--dry_run", action="store_true", help="print the runs and their number, run nothing")
    add("--jobs", type=at_least(1), help="runs at once (default: 1; on a cluster 100)")
    add(
        "--retries",
        type=at_least(0),
        default=1,
        help="further tries of a run that crashed (default: 1)",
    )
    add("--cluster", choices=("slurm", "local", "debug"), help="run through submitit")
    for name in ("partition", "account", "qos", "constraint"):
        add(f"--{name}", help=f"SLURM {name}")
    for name, least, what in (
        ("gpus_per_node", 0, "GPUs of a job"),
        ("cpus_per_task", 1, "CPU cores of a job"),
        ("mem_gb", 1, "memory of a job, GB"),
        (
            "timeout_min",
            15,
            "time limit of a job, minutes; out of time it saves and is queued again",
        ),
    ):
        add(f"--{name}", type=at_least(least), help=what)
    return parser


def _extra(rest: Sequence[str]) -> dict[str, str]:
    """`--run.KEY=VALUE` of the command line."""
    extra = {}
    for word in rest:
        match = re.fullmatch(r"--(run\.\w+)=(.*)", word)
        if match is None:
            raise UserError(f"unexpected argument {word!r}; see python -m lra.sweep --help")
        extra[match[1]] = match[2]
        if match[1] in ("run.data_dir", "run.release_dir"):
            # Runs start in the repository's root, wherever the sweep does.
            extra[match[1]] = str(Path(match[2]).expanduser().resolve())
    return extra


def _executor(args: argparse.Namespace, workdir: Path) -> Any:
    names = ("gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")
    slurm = ("partition", "account", "qos", "constraint")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    given |= {f"slurm_{name}": getattr(args, name) for name in slurm if getattr(args, name)}
    if args.cluster is None:
        if given:
            flag = next(iter(given)).removeprefix("slurm_")
            raise UserError(f"--{flag} has a meaning only with --cluster")
        from lra.sweep.local import LocalExecutor

        return LocalExecutor(args.jobs or 1)
    from lra.sweep.cluster import ClusterExecutor

    if args.cluster == "slurm":
        if args.timeout_min is None:
            raise UserError(
                "--cluster=slurm needs --timeout_min, the time limit of a job in minutes"
            )
        given["slurm_signal_delay_s"] = 120
        # A run may be handed in again as often as it takes.
        given["slurm_max_num_timeout"] = 10_000
    given = {"name": "lra", "timeout_min": 60 * 24 * 30, **given}
    return ClusterExecutor(workdir / "cluster", args.cluster, args.jobs or 100, given)


def _dry_run(
    groups: Sequence[Sequence[Run]], sweep: Sweep, args: argparse.Namespace, extra: dict[str, str]
) -> None:
    """Prints the commands of all runs, and how many of them it comes to."""
    workdir = args.workdir or Path("DIR")
    runs = [run for group in groups for run in group]
    for run in runs:
        print(shlex.join(["python", *run.train_command(workdir / run.name, extra)]))
    print(f"{len(groups)} settings, {planned(sweep, groups)} runs", end="")
    if any(is_search(group) for group in groups):
        print(
            f" of these {len(runs)}: every rate with {sweep.search_seeds} seed(s), and the best of them "
            f"on validation with all of {len(sweep.seeds)}",
            end="",
        )
    print()


def _main(argv: Sequence[str] | None) -> int:
    args, rest = _parser().parse_known_args(argv)
    extra = _extra(rest)
    sweep = load_sweep(args.file)
    groups = expand(sweep, extra)
    if args.dry_run:
        _dry_run(groups, sweep, args, extra)
        return 0
    if args.workdir is None:
        raise UserError("--workdir is required; see python -m lra.sweep --help")
    workdir = args.workdir.expanduser()
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file; name a directory")
    check_tasks(groups, extra)
    with user_errors():
        workdir.mkdir(parents=True, exist_ok=True)
    with lock(workdir / "sweep.lock", f"the sweep in {workdir}"):
        facts = {
            "file": args.file,
            "file_sha256": file_digest(args.file),
            "command": provenance.command(),
            "commit": provenance.commit(),
            "versions": provenance.versions(),
        }
        driver = Driver(sweep, groups, workdir, extra, args.retries, facts)
        executor = _executor(args, workdir)
        with StopRequest() as stop:
            try:
                driver.run(executor, stop)
            finally:
                executor.close()
        if stop.signal and driver.unfinished:
            name = signal.Signals(stop.signal).name
            print(
                f"stopped by {name}, {driver.unfinished} runs left; the same command goes on",
                file=sys.stderr,
            )
            return 128 + stop.signal
        _report(workdir)
        print(driver.summary())
    return 1 if driver.failed or driver.unfinished else 0


def _report(workdir: Path) -> None:
    """Writes and prints the report."""
    from lra.report.__main__ import main as report

    report([str(workdir)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: arguments without the program's name; None for `sys.argv[1:]`.

    Returns:
        The exit status; see the command's help.
    """
    try:
        return _main(argv)
    except (UserError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
