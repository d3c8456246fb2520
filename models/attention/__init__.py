"""Attention mechanisms: the registry, and the way to build one by name.

A new mechanism is three edits: its file, a line in `ATTENTION`, an entry in
`configs.common.ATTENTION_DEFAULTS`. The contract tests iterate over `ATTENTION`.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import jax.numpy as jnp
from flax import nnx

from models.attention.base import Attention, Buffer, Features, LayerState
from models.attention.deltanet import DeltaNet, GatedDeltaNet
from models.attention.gla import GLA
from models.attention.linear import Hedgehog, Linear, Taylor
from models.attention.mamba2 import Mamba2
from models.attention.performer import Performer
from models.attention.retnet import Lightning, RetNet
from models.attention.rfa import RFA
from models.attention.softmax import Softmax, SSMax

ATTENTION: dict[str, type[Attention]] = {
    "softmax": Softmax,
    "ssmax": SSMax,
    "linear": Linear,
    "taylor": Taylor,
    "hedgehog": Hedgehog,
    "performer": Performer,
    "rfa": RFA,
    "gla": GLA,
    "retnet": RetNet,
    "lightning": Lightning,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
}

__all__ = [
    "ATTENTION",
    "Attention",
    "Buffer",
    "Features",
    "LayerState",
    "build",
    "keywords",
    "unknown_name",
]


def unknown_name(name: str) -> str:
    """The message for a mechanism that the registry does not have."""
    near = difflib.get_close_matches(name, ATTENTION, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown attention mechanism {name!r}; there are: {', '.join(ATTENTION)}.{hint}"


def keywords(name: str) -> list[str]:
    """The constructor's keywords of a mechanism, its own and the common ones."""
    names: dict[str, None] = {}
    for cls in ATTENTION[name].__mro__[:-1]:
        init = cls.__dict__.get("__init__")
        for parameter in inspect.signature(init).parameters.values() if init else ():
            if parameter.kind is parameter.KEYWORD_ONLY:
                names[parameter.name] = None
        if cls is Attention:
            break
    return list(names)


def build(
    name: str,
    *,
    dim: int,
    num_heads: int,
    max_length: int,
    causal: bool,
    rngs: nnx.Rngs,
    dtype: Any = jnp.float32,
    **own: Any,
) -> Attention:
    """Makes an attention layer by the name of its mechanism.

    Args:
        name: a key of `ATTENTION`.
        dim: model width.
        num_heads: heads.
        max_length: longest training sequence, in tokens.
        causal: whether positions see only what came before them.
        rngs: stream `params`.
        dtype: compute type.
        **own: the mechanism's own keywords, and the optional ones of `Attention`.

    Raises:
        ValueError: for an unknown name or a value that the mechanism refuses.
        TypeError: for a keyword the mechanism does not have; the message lists those it has.
    """
    if name not in ATTENTION:
        raise ValueError(unknown_name(name))
    accepted = keywords(name)
    for keyword in own:
        if keyword not in accepted:
            raise TypeError(
                f"attention mechanism {name!r} has no keyword {keyword!r}; it has: {', '.join(accepted)}"
            )
    return ATTENTION[name](
        dim=dim,
        num_heads=num_heads,
        max_length=max_length,
        causal=causal,
        rngs=rngs,
        dtype=dtype,
        **own,
    )
