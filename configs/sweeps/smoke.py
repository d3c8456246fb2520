"""Every mechanism for 100 steps on recall and on Text-tiny, in float32 and bfloat16: does it train?

    python -m lra.sweep configs/sweeps/smoke.py --workdir=runs/smoke --run.platform=cpu

Makes one table for each task with parameters, state, FLOPs a token, milliseconds a step and temporary
memory; a loss that is no number makes a run fail, and is named. Accuracies after 100 steps say
nothing. Recall is causal, Text bidirectional, in batches of 4 reviews. Argument: `task=recall`,
`task=text` or `task=all`, the default; `attention=a;b` for some mechanisms only (in quotes, because of
the semicolon). Text needs IMDB (`--run.data_dir=DIR`). About half a minute a run on two CPU cores.
"""

from __future__ import annotations

from configs.common import ATTENTION_DEFAULTS, choose, parse_argument
from lra.sweep import Sweep, product

_STEPS = {"train.steps": 100, "train.eval_every": 100, "run.tensorboard": False}
_TASKS = {
    "recall": {**_STEPS, "data.validation_examples": 200},
    "text": {
        **_STEPS,
        "data.validation_fraction": 0.01,
        "train.eval_examples": 0,
        "train.batch_size": 4,
    },
}


def get_sweep(arg: str | None = None) -> Sweep:
    """The sweep; `arg` is explained in the module's docstring."""
    args = parse_argument(arg, task="all", attention="")
    tasks = list(_TASKS) if args.task == "all" else [args.task]
    stacks = args.attention.split(";") if args.attention else list(ATTENTION_DEFAULTS)
    settings = []
    for task in tasks:
        settings += product(
            f"configs/{task}.py",
            args={"attention": stacks, "size": "tiny"},
            values={**choose("task", task, _TASKS), "model.dtype": ["float32", "bfloat16"]},
        )
    return Sweep(settings, split="validation")
