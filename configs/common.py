"""What all experiment configs share: the base config, the argument string, mechanisms' defaults.

A config file's `get_config(arg)` gets the text after the colon of `--config=configs/x.py:…`.
The argument decides structure (which sizes, which mechanism); dotted flags decide values.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from lra.names import suggest

#: A ConfigDict whose keys a type checker cannot know.
Config = Any

#: Keywords of each mechanism that a config can set, as `config.attention.<name>.<keyword>`.
ATTENTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "softmax": {
        "scale": "none",  # of the logits: none, fixed, learned, ssmax, log_base, adaptive
        "temperature": 1.0,  # divides the logits, with scale fixed
        "log_base": 0.0,  # with scale log_base: the length, in keys, of factor 1; 0: the training length
        "sink": False,  # a learned logit that takes weight and gives nothing
        "sigma_reparam": False,  # spectral norms of the q and k projections as parameters
    },
    "ssmax": {"sink": False, "sigma_reparam": False},
    "linear": {
        "feature_map": "elu",  # elu, relu, relu2, exp
        "normalise": True,  # False: no denominator, an RMS norm of each head's output instead
        "chunk_size": 128,  # tokens of a chunk in the causal form; speed only
    },
    "taylor": {
        "feature_dim": 16,  # width of q and k of each head
        "normalise": True,
        "chunk_size": 128,
    },
    "hedgehog": {"normalise": True, "chunk_size": 128},
    "performer": {
        "num_features": 0,  # random features of each head; 0: K ln K
        "kernel": "softmax",  # softmax (FAVOR+), or relu (the original LRA code's)
        "redraw_interval": 1000,  # training steps between new random features; 0: never
        "chunk_size": 128,
    },
    "rfa": {
        "num_features": 0,  # random directions of each head; 0: K
        "feature_map": "sincos",  # sincos, arccos
        "gate": False,
        "redraw_interval": 0,
        "chunk_size": 128,
    },
    "gla": {
        "gate_start": "paper",  # paper: forgets in 23 tokens; spread: from 1 to the training length
        "gate_rank": 16,
        "gate_divisor": 16.0,
        "output_gate": True,  # swish(W x) on the output; q and k are then half as wide as v
        "chunk_size": 16,
    },
    "retnet": {"output_gate": True, "chunk_size": 64},
    "lightning": {"output_gate": True, "chunk_size": 64},
    "mamba2": {"output_gate": True, "chunk_size": 64},
    "deltanet": {
        "beta_max": 1.0,  # 1, or 2 for negative eigenvalues
        "output_gate": False,
        "chunk_size": 64,
    },
    "gated_deltanet": {
        "beta_max": 1.0,
        "output_gate": True,
        "chunk_size": 64,
    },
}


def parse_argument(text: str | None, **defaults: Any) -> Config:
    """Reads `key=value,key=value`.

    Args:
        text: the argument string, or None.
        **defaults: the keys there are, with their defaults; a value is read as its default's type.

    Returns:
        Every key, as given or at its default.

    Raises:
        ValueError: for a key there is not (the nearest is named), a key given twice, a part without
            `=`, or a value that is not of the key's type.
    """
    values = dict(defaults)
    seen = set()
    for part in filter(None, (text or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"the config argument {part!r} is not of the form key=value")
        if key not in defaults:
            hint = suggest(key, defaults)
            raise ValueError(
                f"the config has no argument {key!r}; it has: {', '.join(defaults)}.{hint}"
            )
        if key in seen:
            raise ValueError(f"the config argument {key!r} is given twice")
        seen.add(key)
        kind = type(defaults[key])
        if kind is bool:
            if value.lower() not in ("true", "false"):
                raise ValueError(f"the config argument {key} must be true or false, got {value!r}")
            values[key] = value.lower() == "true"
            continue
        try:
            values[key] = kind(value)
        except ValueError:
            raise ValueError(
                f"the config argument {key} must be of type {kind.__name__}, got {value!r}"
            ) from None
    return ConfigDict(values)


def choose(what: str, name: str, table: dict[str, Any]) -> Any:
    """The entry of a table by name.

    Raises:
        ValueError: for a name the table does not have; the message lists those it has.
    """
    if name not in table:
        hint = suggest(name, table)
        raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(table)}.{hint}")
    return table[name]


def base(task: str, attention: str) -> Config:
    """Every key with its default. Task configs overwrite what differs.

    Args:
        task: a name in `lra.tasks.TASKS`.
        attention: the stack of mechanisms, see `models.attention.stack`.
    """
    config: Config = ConfigDict()
    config.task = task
    config.seed = 0  # the one root seed: data order, initialisation, dropout, generated examples
    config.init_from = ""  # a workdir whose best checkpoint's parameters a new run starts from

    config.data = ConfigDict(
        {"length": 1024}
    )  # tokens of an example; the task's own keys stand beside

    config.model = ConfigDict()
    config.model.attention = attention  # mechanisms of the layers: "softmax", "3xlinear/softmax"
    config.model.num_layers = 4
    config.model.dim = 256  # width of the residual stream
    config.model.num_heads = 4
    config.model.qkv_dim = 0  # width of q, k, v over all heads; 0: dim
    config.model.mlp_dim = 1024  # width inside the MLP; 0: no MLP
    config.model.head_dim = 1024  # hidden width of the classify and match heads; 0: none
    config.model.match = "concat"  # how the match head joins two documents: concat, nli
    config.model.positions = "sinusoidal"  # none, sinusoidal, learned, rotary
    config.model.pool = "cls"  # cls, mean, max, last; not used by tag tasks
    config.model.causal = False  # positions see only what came before them
    config.model.short_conv = 0  # taps of a causal convolution in front of q, k, v; 0: none
    config.model.dropout = 0.1  # embeddings and both branches of a layer
    config.model.attention_dropout = 0.0  # attention weights, in layers whose mechanism has weights
    config.model.dtype = "float32"  # compute type: float32, bfloat16, float64

    config.attention = ConfigDict(ATTENTION_DEFAULTS)

    config.optim = ConfigDict()
    config.optim.learning_rate = 1e-3  # base of the schedule
    config.optim.schedule = "cosine"  # constant, rsqrt, cosine
    config.optim.warmup_steps = 100  # linear from 0
    config.optim.schedule_steps = (
        0  # length of the cosine after warm-up, in steps; 0: the rest of train.steps
    )
    config.optim.weight_decay = (
        0.1  # decoupled, times the rate; not on biases, norms, positions, gates
    )
    config.optim.b1 = 0.9
    config.optim.b2 = 0.98
    config.optim.eps = 1e-9
    config.optim.clip_norm = 0.0  # largest global norm of the gradient; 0: no clipping

    config.train = ConfigDict()
    config.train.steps = 5000  # optimizer steps
    config.train.batch_size = 32  # examples of a step, over all devices
    config.train.accumulate = 1  # parts a batch is split into, to save memory
    config.train.eval_every = 100  # steps between evaluations on validation, each with a checkpoint
    config.train.eval_examples = 0  # first examples of validation that these use; 0: all
    config.train.save_every = 0  # steps between further checkpoints without evaluation; 0: none

    config.eval = ConfigDict()
    config.eval.batch_size = (
        32  # examples at data.length; fewer at greater lengths, so that tokens stay
    )
    config.eval.lengths = ()  # lengths, in tokens, that eval.py tests; (): data.length
    config.eval.bins = ()  # edges, in tokens, of bins by true example length; (): no bins

    config.run = ConfigDict()  # nothing here changes results
    config.run.data_dir = ""  # TFDS data directory; "": TFDS's own default
    config.run.release_dir = ""  # the unpacked LRA release
    config.run.workers = 0  # processes that prepare batches; 0: in this process
    config.run.platform = ""  # cpu, gpu or tpu, which must be there; "": what JAX finds
    config.run.log_every = 10  # steps between lines of metrics
    config.run.tensorboard = True  # scalars for TensorBoard beside metrics.jsonl
    return config
