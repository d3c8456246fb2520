"""AdamW, its schedules, and which parameters decay."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lra.config import Config

#: Names of the parameters that weight decay pulls to zero: matrices of dense layers and token
#: vectors. Everything else (biases, norms, positions, CLS, convolutions, gates, decays) is spared.
DECAYED = ("kernel", "embedding")


def make_schedule(optim: Config) -> optax.Schedule:
    """The learning rate of step t = 1, 2, … as a function of t − 1 (optax counts from 0).

    With base b and warm-up w (at least 1 step):
    constant b·min(1, t/w); rsqrt b·min(1, t/w)/√max(t, w); cosine b·min(1, t/w)·½(1 + cos πp) with
    p = (t − w)/schedule_steps between 0 and 1.

    Args:
        optim: `config.optim`.

    Raises:
        ValueError: for an unknown schedule.
    """
    base, warmup = optim.learning_rate, max(optim.warmup_steps, 1)
    cycle = max(optim.schedule_steps, 1)
    shapes = {
        "constant": lambda t: 1.0,
        "rsqrt": lambda t: jax.lax.rsqrt(jnp.maximum(t, warmup)),
        "cosine": lambda t: 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((t - warmup) / cycle, 0, 1))),
    }
    if optim.schedule not in shapes:
        raise ValueError(
            f"optim.schedule must be one of {', '.join(shapes)}; got {optim.schedule!r}"
        )
    shape = shapes[optim.schedule]

    def schedule(count: Any) -> jax.Array:
        t = jnp.asarray(count, jnp.float32) + 1
        return base * jnp.minimum(1.0, t / warmup) * shape(t)

    return schedule


def decay_mask(params: Any) -> Any:
    """True for the parameters that decay; the tree of `params`."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        return str(getattr(path[-1], "key", path[-1])) in DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(optim: Config) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): decoupled decay, scaled by the rate.

    Args:
        optim: `config.optim`.

    Raises:
        ValueError: for an unknown schedule.
    """
    adamw = optax.adamw(
        make_schedule(optim),
        b1=optim.b1,
        b2=optim.b2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decay_mask,
    )
    if not optim.clip_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(optim.clip_norm), adamw)
