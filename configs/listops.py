"""ListOps: the value of nested operations on digits (a task of Long Range Arena).

    python -m lra.tasks.listops --config=short
    python train.py --config=configs/listops.py:attention=linear,size=tiny --workdir=runs/listops
    python eval.py --workdir=runs/listops

Arguments: attention (a stack), size (tiny, base). `base` is the encoder of the original code's config,
on trees of 501 to 1999 tokens; `tiny` is a small one on trees of 21 to 99 tokens (prepared as
`short`, as above), for a laptop's CPU.
"""

from __future__ import annotations

from configs import common
from configs.common import Config


def _base(config: Config) -> None:
    config.data.update({"length": 2000, "variant": "default"})
    config.model.update({"num_layers": 4, "dim": 512, "num_heads": 8})
    config.model.update({"mlp_dim": 1024, "head_dim": 1024})
    config.model.update({"pool": "cls", "positions": "sinusoidal", "dropout": 0.1})
    config.model.attention_dropout = 0.1
    config.optim.update({"schedule": "rsqrt", "learning_rate": 0.05, "warmup_steps": 1000})
    config.train.update({"steps": 5000, "batch_size": 32, "eval_every": 50})
    config.eval.bins = (750, 1000, 1250, 1500, 1750)


def _tiny(config: Config) -> None:
    config.data.update({"length": 100, "variant": "short"})
    config.model.update({"num_layers": 2, "dim": 128, "num_heads": 4})
    config.model.update({"mlp_dim": 256, "head_dim": 128})
    config.model.update({"pool": "mean", "positions": "sinusoidal", "dropout": 0.0})
    config.optim.update({"schedule": "constant", "learning_rate": 1e-3, "warmup_steps": 100})
    config.train.update({"steps": 2000, "batch_size": 32, "eval_every": 100})
    config.eval.bins = (25, 30, 40, 60)


#: What each size sets.
SIZES = {"tiny": _tiny, "base": _base}


def get_config(arg: str | None = None) -> Config:
    """The ListOps experiment; `arg` is explained in the module's docstring."""
    args = common.parse_argument(arg, attention="softmax", size="base")
    size = common.choose("size", args.size, SIZES)
    config = common.base("listops", args.attention)
    config.data.variant = "default"  # which trees: a name in lra.tasks.listops.VARIANTS
    config.data.data_seed = 0  # seed that they were prepared with; the same for every seed of a run
    size(config)
    config.eval.batch_size = 32
    return config
