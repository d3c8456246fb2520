"""Attention by a recurrence o_t = S_tᵀ q_t: what gated, decaying and delta-rule layers share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from models.attention import decay
from models.attention.base import Attention, Features, Past
from models.attention.kernel import HeadNorm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentFeatures(Features):
    """`Features` with what a recurrence needs beside them; what a mechanism lacks is None.

    Attributes:
        gate: logits of the gates of the forward scan, `[B, H, L, G]`.
        gate_back: those of the backward scan of a bidirectional layer.
        beta: logits of the delta rule's strengths, `[B, H, L]`.
        swish: what the output gate is made of, `[B, H, L, V]`.
    """

    gate: Float[Array, "B H L G"] | None = None
    gate_back: Float[Array, "B H L G"] | None = None
    beta: Float[Array, "B H L"] | None = None
    swish: Float[Array, "B H L V"] | None = None


class Recurrent(Attention):
    """Base of the recurrences o_t = S_tᵀ q_t without a denominator.

    Bidirectional layers run the recurrence both ways, with queries, keys and values shared and gates of
    their own, and add: forward + backward − the position itself, which both have seen. The sum goes
    through an RMS norm of each head and, with `output_gate`, is multiplied by swish(W x).

    Args:
        chunk_size: tokens of a chunk; affects speed and memory, not results.
        output_gate: see above.
        **common: the arguments of `Attention`.

    Raises:
        ValueError: for a chunk size below 1, and as `Attention`.
    """

    def __init__(self, *, chunk_size: int = 64, output_gate: bool = True, **common: Any):
        if not common.get("key_dim") and output_gate:
            # Half as wide as values: with the gate's matrix, as many parameters as softmax attention.
            width = (common.get("qkv_dim") or common["dim"]) // max(common["num_heads"], 1)
            common["key_dim"] = max(width // 2, 1)
        super().__init__(**common)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
        self.chunk_size = chunk_size
        self.head_norm = HeadNorm(self.head_dim)
        self.swish = (
            nnx.Linear(
                common["dim"],
                self.num_heads * self.head_dim,
                use_bias=False,
                dtype=self.dtype,
                kernel_init=nnx.initializers.xavier_uniform(),
                rngs=common["rngs"],
            )
            if output_gate
            else None
        )

    def gate_logits(self, x: Float[Array, "B L D"]) -> dict[str, Float[Array, "B H L ..."] | None]:
        """Gates and strengths that depend on the tokens: fields of `RecurrentFeatures`."""
        del x
        return {}

    def log_gate(self, features: RecurrentFeatures, logits: Any) -> Float[Array, "B H L G"]:
        """log α of each position from `features.gate` or `features.gate_back`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement log_gate")

    def sides(self, features: RecurrentFeatures) -> tuple[Array, Array]:
        """Queries and keys as the recurrence uses them, in float32 or better."""
        dtype = jnp.promote_types(features.query.dtype, jnp.float32)
        return features.query.astype(dtype) * self.key_dim**-0.5, features.key.astype(dtype)

    def scan(
        self, state: Array, features: RecurrentFeatures, mask: Bool[Array, "B L"]
    ) -> tuple[Array, Array]:
        """The recurrence from a state on; in a bidirectional layer the sum of both ways."""
        query, key = self.sides(features)
        gate, back = self.log_gates(features)
        return decay.gated(
            state, query, key, features.value, gate, mask,
            chunk_size=self.chunk_size, log_gate_back=back,
        )  # fmt: skip

    def log_gates(self, features: RecurrentFeatures) -> tuple[Array, Array | None]:
        """log α of the way forward, and of the way back where there is one."""
        forward = self.log_gate(features, features.gate)
        return forward, None if self.causal else self.log_gate(features, features.gate_back)

    def own_weight(self, features: RecurrentFeatures) -> Float[Array, "B H L"]:
        """A_ii, the weight of a position for itself."""
        query, key = self.sides(features)
        return (query * key).sum(-1)

    def project(
        self, x: Float[Array, "B L D"], mask: Bool[Array, "B L"], past: Past | None = None
    ) -> RecurrentFeatures:
        """See `Attention.project`."""
        plain = super().project(x, mask, past)
        x = self.real_tokens(x, mask)
        swish = None if self.swish is None else self.split_heads(self.swish(x))
        return RecurrentFeatures(
            plain.query, plain.key, plain.value, swish=swish, **self.gate_logits(x)
        )

    def init_state(self, batch: int) -> Float[Array, "B H K V"]:
        """The state before the first token, for `step`.

        Raises:
            ValueError: if the layer is bidirectional: it has no recurrent form.
        """
        if not self.causal:
            raise ValueError(
                "a bidirectional layer has no recurrent form: build it with causal=True"
            )
        return self._zeros(batch)

    def _zeros(self, batch: int) -> Array:
        dtype = jnp.promote_types(self.dtype, jnp.float32)
        return jnp.zeros((batch, self.num_heads, self.key_dim, self.head_dim), dtype)

    def step(
        self, state: Array, features: RecurrentFeatures, mask: Bool[Array, "B L"]
    ) -> tuple[Array, Float[Array, "B H L K"]]:
        """The next L ≥ 1 tokens, given the state the ones before them left.

        Returns:
            The state after them, and `mix`'s output for them.
        """
        state, out = self.scan(state, features, mask)
        return state, out.astype(features.value.dtype)

    def mix(
        self,
        features: RecurrentFeatures,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """See `Attention.mix`; there are no weights to drop, `dropout_key` is not used."""
        del dropout_key
        start = self._zeros(features.value.shape[0])
        if self.causal:
            return self.step(start, features, mask)[1]
        both = self.scan(start, features, mask)[1]
        own = self.own_weight(features)[..., None] * features.value
        out = both - jnp.where(mask[:, None, :, None], own, 0)
        return out.astype(features.value.dtype)

    def weights(
        self, features: RecurrentFeatures, mask: Bool[Array, "B S"]
    ) -> Float[Array, "B H L S"]:
        """See `Attention.weights`: the recurrence token by token, with the unit vectors as values."""
        forward = self.rows(features, features.gate, mask)
        if self.causal:
            return forward
        flipped = jax.tree.map(lambda a: jnp.flip(a, axis=2), features)
        backward = self.rows(flipped, flipped.gate_back, jnp.flip(mask, axis=1))
        backward = jnp.flip(backward, axis=(2, 3))
        length = features.value.shape[2]
        return forward + jnp.where(jnp.eye(length, dtype=bool), 0, backward)

    def rows(
        self, features: RecurrentFeatures, logits: Any, mask: Bool[Array, "B S"]
    ) -> Float[Array, "B H L S"]:
        """The weights of the forward recurrence, by the recurrence itself."""
        query, key = self.sides(features)
        gate = jnp.broadcast_to(self.log_gate(features, logits), key.shape)
        beta = self.strength(features)

        def one(state: Array, now: Any) -> tuple[Array, Array]:
            q, k, g, b, unit_vector, real = now
            decayed = jnp.exp(g)[..., None] * state
            if b is None:
                target = jnp.broadcast_to(unit_vector, (*k.shape[:-1], unit_vector.shape[-1]))
            else:
                told = jnp.einsum("bhks,bhk->bhs", decayed, k)
                target = b[..., None] * (unit_vector - told)
            after = decayed + k[..., None] * target[:, :, None]
            state = jnp.where(real[:, None, None, None], after, state)
            return state, jnp.einsum("bhks,bhk->bhs", state, q)

        batch, heads, length, width = key.shape
        time = [jnp.moveaxis(a, 2, 0) for a in (query, key, gate)]
        strengths = None if beta is None else jnp.moveaxis(beta, 2, 0)
        start = jnp.zeros((batch, heads, width, length), query.dtype)
        xs: Any = (*time, strengths, jnp.eye(length, dtype=query.dtype), mask.T)
        return jnp.moveaxis(jax.lax.scan(one, start, xs)[1], 0, 2)

    def strength(self, features: RecurrentFeatures) -> Float[Array, "B H L"] | None:
        """β of the delta rule; None for a plain outer product."""
        del features
        return None

    def finish(self, mixed: Float[Array, "B H L K"], features: Any) -> Float[Array, "B L D"]:
        """See `Attention.finish`."""
        mixed = self.head_norm(mixed)
        if features.swish is not None:
            mixed = mixed * jax.nn.silu(features.swish)
        return super().finish(mixed, features)

    def state_floats(self, length: int) -> int:
        """See `Attention.state_floats`."""
        del length
        return self.num_heads * self.key_dim * self.head_dim

    #: Operations for each number of the state and token.
    flops_per_state = 5.0

    def mixing_flops(self, length: int) -> float:
        """See `Attention.mixing_flops`; both directions of a bidirectional layer count."""
        return (1 if self.causal else 2) * self.flops_per_state * self.state_floats(length)
