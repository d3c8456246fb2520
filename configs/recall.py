"""Multi-query associative recall (MQAR): keys and values, then queries for some of the keys.

    python train.py --config=configs/recall.py:attention=softmax --workdir=runs/recall
    python eval.py --workdir=runs/recall --lengths=64,128,256,512,1024

Arguments: attention (a stack), size (tiny, small).
"""

from __future__ import annotations

from configs import common
from configs.common import Config

#: Width, heads and MLP of the two-layer models.
SIZES = {
    "tiny": {"dim": 64, "num_heads": 2, "mlp_dim": 0},
    "small": {"dim": 128, "num_heads": 2, "mlp_dim": 256},
}


def get_config(arg: str | None = None) -> Config:
    """The recall experiment; `arg` is explained in the module's docstring."""
    args = common.parse_argument(arg, attention="softmax", size="tiny")
    size = common.choose("size", args.size, SIZES)
    config = common.base("recall", args.attention)

    config.data.length = 64
    config.data.vocab_size = 256  # keys are its lower half, values its upper
    config.data.num_pairs = 8  # pairs to remember, and queries
    config.data.filler = "random"  # what stands between queries: random tokens, or zeros
    config.data.power = 0.01  # a of the slots' distribution i^(a-1); 1 is uniform
    config.data.train_examples = 100_000
    config.data.validation_examples = 1000
    config.data.test_examples = 1000

    config.model.update(size)
    config.model.num_layers = 2
    config.model.head_dim = 0
    config.model.positions = "none"
    config.model.causal = True
    config.model.short_conv = 3
    config.model.dropout = 0.0

    config.optim.learning_rate = 1e-2
    config.optim.warmup_steps = 50
    config.optim.clip_norm = 1.0

    config.train.steps = 600
    config.train.batch_size = 64
    config.train.eval_every = 200
    config.eval.batch_size = 250
    return config
