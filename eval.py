"""Evaluates a run that train.py made: accuracy at lengths, and by true example length.

    python eval.py --workdir=runs/linear --lengths=64,256,1024
    python eval.py --workdir=runs/text --checkpoint=last --split=validation
    python eval.py --workdir=runs/gla --lengths=1048576 --stream=4096 --examples=10

Rows go to results.jsonl in the workdir, for python -m lra.report; the same measurement made again
replaces its row, unless it is of fewer examples. The checkpoint is chosen on validation. Exit status: 0
done, 2 an error that the printed line explains (LRA_TRACEBACK=1 shows its traceback).
"""

from pathlib import Path

from absl import flags

from lra import cli

_WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run")
_LENGTHS = flags.DEFINE_list("lengths", [], "lengths in tokens; default: the config's eval.lengths")
_SPLIT = flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "which examples")
_CHECKPOINT = flags.DEFINE_enum(
    "checkpoint", "best", ["best", "last"], "best on validation, or last"
)
_EXAMPLES = flags.DEFINE_integer(
    "examples", 0, "only the first so many examples; 0 for all", lower_bound=0
)
_STREAM = flags.DEFINE_integer(
    "stream", 0, "tokens that a causal model reads at a time; 0 for all at once", lower_bound=0
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS data directory, if not the run's")
_PLATFORM = flags.DEFINE_enum("platform", None, ["cpu", "gpu", "tpu"], "device, if not the run's")
_WORKERS = flags.DEFINE_integer("workers", None, "processes that prepare batches", lower_bound=0)


def main() -> None:
    """Evaluates and prints the table."""
    from lra.errors import UserError
    from lra.evaluation.run import RESULTS_FILE, evaluate_run
    from lra.report import text_tables

    workdir = Path(_WORKDIR.value or "").expanduser()
    try:
        lengths = [int(text) for text in _LENGTHS.value]
    except ValueError:
        raise UserError(
            f"--lengths must be whole numbers, got {','.join(_LENGTHS.value)}"
        ) from None
    given = {"data_dir": _DATA_DIR.value, "platform": _PLATFORM.value, "workers": _WORKERS.value}
    rows = evaluate_run(
        workdir,
        lengths=lengths,
        split=_SPLIT.value,
        checkpoint=_CHECKPOINT.value,
        limit=_EXAMPLES.value,
        chunk=_STREAM.value,
        overrides={key: value for key, value in given.items() if value is not None},
    )
    print(text_tables(rows))
    print(f"results: {(workdir / RESULTS_FILE).resolve()}")


if __name__ == "__main__":
    cli.run(main, required=("workdir",))
