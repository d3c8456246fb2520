"""Text: the sentiment of IMDB reviews from their bytes (a task of Long Range Arena).

    python train.py --config=configs/text.py:attention=linear,size=tiny --workdir=runs/text
    python eval.py --workdir=runs/text

Arguments: attention (a stack), size (tiny, base). `base` is the encoder of the original code's config,
with its 1000 bytes and schedule; `tiny` learns on a laptop's CPU within half an hour.
"""

from __future__ import annotations

from configs import common
from configs.common import Config


def _base(config: Config) -> None:
    config.data.length = 1000
    config.model.update({"num_layers": 4, "dim": 256, "num_heads": 4})
    config.model.update({"mlp_dim": 1024, "head_dim": 1024})
    config.model.update({"pool": "cls", "positions": "sinusoidal", "dropout": 0.1})
    config.model.attention_dropout = 0.1
    config.optim.update({"schedule": "rsqrt", "learning_rate": 0.05, "warmup_steps": 8000})
    config.train.update({"steps": 20_000, "batch_size": 32, "eval_every": 100})


def _tiny(config: Config) -> None:
    config.data.length = 1024
    config.model.update({"num_layers": 2, "dim": 128, "num_heads": 4})
    config.model.update({"mlp_dim": 256, "head_dim": 128})
    config.model.update({"pool": "mean", "positions": "none", "short_conv": 4, "dropout": 0.0})
    config.optim.update({"schedule": "constant", "learning_rate": 1e-3, "warmup_steps": 100})
    config.train.update({"steps": 1500, "batch_size": 16, "eval_every": 150, "eval_examples": 1000})


#: What each size sets.
SIZES = {"tiny": _tiny, "base": _base}


def get_config(arg: str | None = None) -> Config:
    """The Text experiment; `arg` is explained in the module's docstring."""
    args = common.parse_argument(arg, attention="softmax", size="base")
    size = common.choose("size", args.size, SIZES)
    config = common.base("text", args.attention)
    config.data.validation_fraction = 0.1  # share of the published train split held out
    config.data.holdout_seed = 0  # decides which; the same for every seed of a run
    size(config)
    config.eval.batch_size = 32
    config.eval.bins = (256, 512, 1024, 2048)
    return config
