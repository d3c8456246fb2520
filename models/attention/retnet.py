"""Fixed decays: RetNet (Sun et al. 2023, arXiv 2307.08621), Lightning (Qin et al. 2024, arXiv 2401.04658)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.attention.recurrent import Recurrent, RecurrentFeatures


class RetNet(Recurrent):
    """Fixed decays γ_h = 1 − 2^(−5−h) (Sun et al. 2023, arXiv 2307.08621).

    Use `model.positions=rotary` for the rotation of queries and keys that the paper has. Arguments are
    those of `Recurrent` and `Attention`.
    """

    def head_decays(self) -> np.ndarray:
        """log γ of each head."""
        return np.log1p(-(2.0 ** (-5 - np.arange(self.num_heads))))

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`."""
        del logits
        dtype = jnp.promote_types(features.value.dtype, jnp.float32)
        decays = jnp.asarray(self.head_decays(), dtype)[None, :, None, None]
        return jnp.broadcast_to(decays, (*features.value.shape[:3], 1))


class Lightning(RetNet):
    """Fixed decays log γ_h = −(8/H)(1 − l/L) h of head h = 1 … H in layer l of L.

    Qin et al. 2024 (arXiv 2401.04658, Lightning Attention-2): upper layers remember for longer.
    Arguments are those of `Recurrent` and `Attention`.
    """

    def head_decays(self) -> np.ndarray:
        """log γ of each head."""
        heads = np.arange(1, self.num_heads + 1)
        return -8.0 / self.num_heads * (1 - self.depth) * heads
