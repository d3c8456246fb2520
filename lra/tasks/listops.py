"""ListOps: the task, and the command that prepares its data.

    python -m lra.tasks.listops --config=default

What users of the task need is importable from here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lra.arguments import Parser, at_least
from lra.errors import UserError
from lra.tasks.listops_files import prepare
from lra.tasks.listops_task import ListOps, root_operator_baseline, statistics
from lra.tasks.listops_trees import TOKENS, VARIANTS, VERSION, Variant, decode, encode

__all__ = [
    "TOKENS",
    "VARIANTS",
    "VERSION",
    "ListOps",
    "Variant",
    "decode",
    "encode",
    "main",
    "prepare",
    "root_operator_baseline",
    "statistics",
]

_DESCRIPTION = """\
Generates ListOps trees and writes them as a TFDS data set (array_record, no TensorFlow needed) to
DATA_DIR/listops/CONFIG/VERSION. Interrupted, it goes on where it was; what is there already is not
generated again. The data depend on CONFIG and SEED alone. Prints for every split the number of trees,
quantiles of lengths, shares of labels and the accuracy of baselines.

Configs:
"""

_EPILOG = """\
Exit status: 0 the data set is there; 2 an error, told in one line on stderr; 130 interrupted.

Example:
  python -m lra.tasks.listops --config=short
  python train.py --config=configs/listops.py:size=tiny --workdir=runs/listops"""


def _parser() -> Parser:
    configs = "\n".join(
        f"  {v.name:9}{v.min_length + 1} to {v.max_length - 1} tokens, depth at most {v.max_depth}, "
        f"at most {v.max_args} arguments; {v.train}/{v.validation}/{v.test} trees"
        for v in VARIANTS.values()
    )
    parser = Parser("python -m lra.tasks.listops", _DESCRIPTION + configs, _EPILOG)
    parser.add_argument(
        "--config", required=True, choices=list(VARIANTS), help="which trees, and how many"
    )
    parser.add_argument(
        "--data_dir",
        help="TFDS data directory (default: TFDS's own, TFDS_DATA_DIR or ~/tensorflow_datasets)",
    )
    parser.add_argument(
        "--workers",
        type=at_least(0),
        default=2,
        help="processes that generate; 0: this one (default: 2)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="root seed of the trees (default: 0)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments without the program's name; None for `sys.argv[1:]`.

    Returns:
        The exit status: 0, 2 after an error, 130 after an interruption.
    """
    args = _parser().parse_args(argv)
    try:
        directory = prepare(args.config, args.data_dir or None, args.workers, args.seed)
        task = ListOps(1, data_dir=args.data_dir or None, variant=args.config, data_seed=args.seed)
        table = statistics(task)
    except (OSError, ValueError, RuntimeError, UserError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"{table}\n{directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
