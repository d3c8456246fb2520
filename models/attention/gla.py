"""Gated Linear Attention (Yang et al. 2024, arXiv 2312.06635)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.attention.base import GateProjection
from models.attention.recurrent import Recurrent, RecurrentFeatures

GATE_STARTS = ("paper", "spread")


class GLA(Recurrent):
    """Gated Linear Attention (Yang et al. 2024, arXiv 2312.06635): a gate for each key channel.

    log α = log σ(W₂ W₁ x + b)/`gate_divisor`, W₁ of `gate_rank` columns. `gate_start` "paper" has b = 0,
    which forgets within 1/(1 − σ(0)^(1/16)) = 23 tokens; "spread" starts the channels of each head at
    time constants of 1 to `max_length` tokens, evenly in the logarithm.

    Args:
        gate_rank: see above.
        gate_divisor: see above.
        gate_start: see above.
        **common: the arguments of `Recurrent` and `Attention`.

    Raises:
        ValueError: for an unknown start, values out of range, and as `Recurrent`.
    """

    def __init__(
        self,
        *,
        chunk_size: int = 16,
        gate_rank: int = 16,
        gate_divisor: float = 16.0,
        gate_start: str = "paper",
        **common: Any,
    ):
        super().__init__(chunk_size=chunk_size, **common)
        if gate_start not in GATE_STARTS:
            raise ValueError(
                f"gate_start must be one of {', '.join(GATE_STARTS)}; got {gate_start!r}"
            )
        if gate_rank < 1 or not gate_divisor > 0:
            raise ValueError(
                f"gate_rank must be at least 1 and gate_divisor above 0, got {gate_rank} and {gate_divisor}"
            )
        self.gate_divisor = float(gate_divisor)
        bias: Any = 0.0
        if gate_start == "spread":
            share = (np.arange(self.key_dim) + 0.5) / self.key_dim
            tokens = common["max_length"] ** share
            # σ(b)^(1/divisor) = e^(−1/T).
            bias = np.tile(-np.log(np.expm1(self.gate_divisor / tokens)), self.num_heads)

        def projection() -> GateProjection:
            return GateProjection(
                common["dim"],
                self.num_heads * self.key_dim,
                bias=bias,
                rank=gate_rank,
                rngs=common["rngs"],
                dtype=self.dtype,
            )

        self.gate = projection()
        self.gate_back = None if self.causal else projection()

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Any]:
        """See `Recurrent.gate_logits`."""
        back = None if self.gate_back is None else self.split_heads(self.gate_back(x))
        return {"gate": self.split_heads(self.gate(x)), "gate_back": back}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """See `Recurrent.log_gate`."""
        del features
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return jax.nn.log_sigmoid(wide) / self.gate_divisor
