"""Keys derived from the one root seed, by name."""

from __future__ import annotations

import zlib

import jax
from jaxtyping import Array, Key


def named_key(seed: int, name: str) -> Key[Array, ""]:
    """The key of one use of randomness ("params", "dropout", …).

    Args:
        seed: `config.seed`.
        name: what the key is for; another name gives an unrelated key.
    """
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
