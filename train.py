"""Trains a model from a config file, or goes on where a run stopped.

    python train.py --config=configs/recall.py:attention=linear,size=tiny --workdir=runs/linear
    python train.py --config=configs/text.py:attention=softmax --workdir=runs/text \\
        --config.train.steps=300 --config.optim.learning_rate=3e-4

After the colon stand the config's arguments, which decide structure (each config's docstring lists
them); --config.<key>=<value> sets a value. Both are typed, and unknown keys are refused.

The workdir gets config.json, run.json (command, commit, versions, devices, parameters),
metrics.jsonl, tensorboard/ and checkpoints/ (the latest two and the best on validation). The same
command on the same workdir goes on from its latest checkpoint. Exit status: 0 done, 2 an error that
the printed line explains (LRA_TRACEBACK=1 shows its traceback).
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from lra import cli

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "config file, with arguments after a colon", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run")


def main() -> None:
    """Trains the run that the flags describe."""
    from lra.training.loop import train

    train(_CONFIG.value, Path(_WORKDIR.value or "").expanduser())


if __name__ == "__main__":
    cli.run(main, required=("config", "workdir"))
