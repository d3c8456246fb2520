"""What every attention mechanism shares: the three-part seam, projections, positions, variables."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from models.embeddings import rotate
from models.recompute import recomputed


class Buffer(nnx.Variable):
    """An array that is saved with the model and never trained (random features, for example)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """What `Attention.project` gives `Attention.mix`.

    Mechanisms with gates or several branches use a dataclass of their own; whatever else it holds,
    `value` is there and `mix` is linear in it.

    Attributes:
        query: `[B, H, L, K]`.
        key: `[B, H, S, K]`.
        value: `[B, H, S, V]`; V is K unless `key_dim` is set.
    """

    query: Float[Array, "B H L K"]
    key: Float[Array, "B H S K"]
    value: Float[Array, "B H S V"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """What `Attention.project` has to know of the tokens before the first that it is given.

    Attributes:
        position: how many they are.
        tokens: the last of them, as many as the short convolution looks back; `[B, width − 1, D]`.
    """

    position: Int[Array, ""]
    tokens: Float[Array, "B W D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """What a layer keeps of the tokens it has read, to go on after them.

    Attributes:
        past: for `Attention.project`.
        memory: of the mechanism: what its `init_state` and `step` return.
    """

    past: Past
    memory: Any


def visible(mask: Bool[Array, "B S"], length: int, causal: bool) -> Bool[Array, "B 1 L S"]:
    """The pairs (query i, key j) of which j is real and, if causal, j ≤ i. For references."""
    seen = jnp.broadcast_to(mask[:, None, None, :], (mask.shape[0], 1, length, mask.shape[1]))
    return jnp.tril(seen) if causal else seen


def unit(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """x/‖x‖ in float32 or better; 0 stays 0."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Relative to the largest entry first: squares of 1e-30 or 1e30 leave the range.
    top = jax.lax.stop_gradient(jnp.abs(wide).max(-1, keepdims=True))
    wide = wide / jnp.where(top > 0, top, 1)
    square = (wide**2).sum(-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.where(square > 0, square, 1))


class ShortConv(nnx.Module):
    """Depthwise causal convolution over positions, started at the identity plus N(0, 0.25²).

    y_t = Σ_{j<width} w_j ∘ x_{t−j}. It shows each position its predecessors, which lets a single
    attention layer compare a token with what came just before it (Fu et al. 2023, arXiv
    2212.14052; Arora et al. 2023, arXiv 2312.04927).

    Args:
        dim: channels.
        width: taps, in tokens, at least 1.
        rngs: stream `params`.
        dtype: compute type.
    """

    def __init__(self, dim: int, width: int, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        if width < 1:
            raise ValueError(f"a short convolution needs a width of at least 1 token, got {width}")
        # Row 0 is the current token. The others start large enough for what came before to be seen
        # from the first step on.
        taps = 0.25 * jax.random.normal(rngs.params(), (width, dim), jnp.float32)
        self.taps = nnx.Param(taps.at[0].set(1.0))
        self.width = width
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "B L D"], before: Float[Array, "B W D"] | None = None
    ) -> Float[Array, "B L D"]:
        """Convolves along L; `before` are the width − 1 tokens in front, zeros if not given."""
        weights = self.taps[...].astype(self.dtype)
        length = x.shape[1]
        if before is None:
            padded = jnp.pad(x, ((0, 0), (self.width - 1, 0), (0, 0)))
        else:
            padded = jnp.concatenate([before, x], axis=1)
        shifts = (self.width - 1 - j for j in range(self.width))
        delayed = [padded[:, shift : shift + length] for shift in shifts]
        return sum((d * w for d, w in zip(delayed, weights, strict=True)), jnp.zeros_like(x))


class GateProjection(nnx.Module):
    """w·x + b, whose parameters weight decay spares.

    Args:
        fan_in: width of x.
        fan_out: numbers for each position.
        bias: where b starts: a number, or one for each output.
        rank: width in between, W₂ W₁ x + b; 0 for one matrix.
        rngs: stream `params`.
        dtype: compute type of the products; the result is in float32 or better.
    """

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        *,
        bias: Any = 0.0,
        rank: int = 0,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
    ):
        init = nnx.initializers.xavier_uniform()
        widths = [fan_in, rank, fan_out] if rank else [fan_in, fan_out]
        self.maps = nnx.List(
            nnx.Param(init(rngs.params(), pair, jnp.float32)) for pair in itertools.pairwise(widths)
        )
        self.bias = nnx.Param(jnp.broadcast_to(jnp.asarray(bias, jnp.float32), (fan_out,)))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L G"]:
        """Logits of gates."""
        x = x.astype(self.dtype)
        for weights in self.maps:
            x = x @ weights[...].astype(self.dtype)
        wide = jnp.promote_types(self.dtype, jnp.float32)
        return x.astype(wide) + self.bias[...].astype(wide)


class SpectralLinear(nnx.Module):
    """γ W/σ(W) x: a projection whose spectral norm is a parameter (Zhai et al. 2023, arXiv 2303.06296).

    σ is estimated by power iteration; its vector is saved with the model, starts at the exact one, and
    moves on by one iteration a training step.

    Args:
        linear: the projection whose matrix is taken over.
        dtype: compute type.
    """

    def __init__(self, linear: nnx.Linear, *, dtype: Any = jnp.float32):
        kernel = linear.kernel[...]
        self.kernel = nnx.Param(kernel)
        self.gain = nnx.Param(jnp.ones((), jnp.float32))
        self.left = Buffer(jnp.linalg.svd(kernel, full_matrices=False)[0][:, 0])
        self.dtype = dtype

    def iterate(self) -> None:
        """One power iteration: u ← W Wᵀ u, normalised."""
        kernel = self.kernel[...]
        moved = kernel @ (kernel.T @ self.left[...])
        self.left[...] = moved / jnp.maximum(jnp.linalg.norm(moved), 1e-30)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L W"]:
        """Applies the projection."""
        kernel = self.kernel[...]
        left = jax.lax.stop_gradient(self.left[...])
        right = jax.lax.stop_gradient(kernel.T @ left)
        right = right / jnp.maximum(jnp.linalg.norm(right), 1e-30)
        norm = left @ kernel @ right
        return x.astype(self.dtype) @ (self.gain[...] * kernel / norm).astype(self.dtype)


def _normed_project(norm: Any, attention: Any, x: Array, mask: Array) -> Any:
    return attention.project(norm(x).astype(x.dtype), mask)


class Attention(nnx.Module):
    """Base of the mechanisms: `finish(mix(project(x)))`.

    `project` and `finish` hold the learned parts. `mix` is pure, linear in `features.value`, and
    applies the same matrix A to every value channel, o_i = Σ_j A_ij v_j, so that one
    vector-Jacobian product measures any mechanism.

    A mechanism subclasses this, implements `mix` and its reference `weights`, and extends `project`
    or `finish` where it needs more than query, key and value. `mix` must give the positions that
    `mask` marks as real the same output whatever the padding holds.

    One whose causal form keeps a state of fixed size implements `init_state` and `step` as well, and
    has `stream` from them. What it does in `adapt` it must be able to do chunk by chunk.

    Args:
        dim: model width D.
        num_heads: H; must divide `qkv_dim`.
        max_length: the longest sequence, in tokens, that the model is trained on.
        causal: whether position i may use only positions up to i.
        rngs: stream `params`.
        dtype: type of the projections; sums, normalisers and softmax accumulate in
            `promote_types(dtype, float32)`.
        qkv_dim: width of queries, keys and values over all heads; 0 means `dim`.
        key_dim: width of queries and keys of each head, where it differs from the values'; 0 for that.
        dropout: rate at which attention weights are dropped, for mechanisms that have weights.
        rotary: rotates queries and keys by their position before anything else touches them.
        short_conv: taps of a causal convolution in front of the projections; 0 for none.
        depth: share of the model's layers that lie below this one, in [0, 1).

    Raises:
        ValueError: for widths that do not divide, or a dropout rate that cannot be honoured.
    """

    #: Whether the mechanism forms weights that dropout can drop.
    has_weights: ClassVar[bool] = False
    #: Training steps between calls of `redraw`; 0 for never.
    redraw_interval: int = 0

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        max_length: int,
        causal: bool,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        qkv_dim: int = 0,
        key_dim: int = 0,
        dropout: float = 0.0,
        rotary: bool = False,
        short_conv: int = 0,
        depth: float = 0.0,
    ):
        name = type(self).__name__
        width = qkv_dim or dim
        if dim < 1 or num_heads < 1 or max_length < 1:
            raise ValueError(
                f"dim, num_heads and max_length must be at least 1, got {dim}, {num_heads} and {max_length}"
            )
        if width < 1 or width % num_heads:
            raise ValueError(
                f"num_heads must divide the width of q, k, v: got {num_heads} and {width}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"attention dropout must be at least 0 and less than 1, got {dropout}")
        if dropout and not self.has_weights:
            raise ValueError(
                f"{name} has no attention weights to drop: dropout must be 0, got {dropout}"
            )
        if key_dim < 0:
            raise ValueError(f"key_dim must be 0 (the values' width) or a width, got {key_dim}")
        key_dim = key_dim or width // num_heads
        if rotary and key_dim % 2:
            raise ValueError(f"rotary positions need an even head width, got {key_dim}")
        if short_conv < 0:
            raise ValueError(f"short_conv must be 0 (none) or a width in tokens, got {short_conv}")
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.key_dim = key_dim
        self.causal = causal
        self.dropout = dropout
        self.rotary = rotary
        self.depth = depth
        self.dtype = dtype

        def dense(fan_in: int, fan_out: int) -> nnx.Linear:
            return nnx.Linear(
                fan_in,
                fan_out,
                use_bias=False,
                dtype=dtype,
                kernel_init=nnx.initializers.xavier_uniform(),
                rngs=rngs,
            )

        self.short_conv = ShortConv(dim, short_conv, rngs=rngs, dtype=dtype) if short_conv else None
        self.query: Any = dense(dim, num_heads * key_dim)
        self.key: Any = dense(dim, num_heads * key_dim)
        self.value = dense(dim, width)
        self.out = dense(width, dim)

    def split_heads(self, x: Float[Array, "B L W"]) -> Float[Array, "B H L K"]:
        """`[B, L, H·K]` to `[B, H, L, K]`."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.num_heads, -1).transpose(0, 2, 1, 3)

    def merge_heads(self, x: Float[Array, "B H L K"]) -> Float[Array, "B L W"]:
        """`[B, H, L, K]` to `[B, L, H·K]`."""
        batch, heads, length, width = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)

    def real_tokens(self, x: Float[Array, "B L D"], mask: Bool[Array, "B L"]) -> Array:
        """x in the compute type. Whatever a pad holds, NaN included, ends here: it becomes 0."""
        return jnp.where(mask[..., None], x, 0).astype(self.dtype)

    def project(
        self, x: Float[Array, "B L D"], mask: Bool[Array, "B L"], past: Past | None = None
    ) -> Any:
        """Learned projections of the tokens, each by itself but for a short convolution.

        Args:
            x: tokens' vectors.
            mask: True for a real token.
            past: what came before the first of them; None for nothing.

        Returns:
            `Features`.
        """
        x = self.real_tokens(x, mask)
        if self.short_conv is not None:
            x = self.short_conv(x, None if past is None else past.tokens)
        query, key, value = (self.split_heads(p(x)) for p in (self.query, self.key, self.value))
        if self.rotary:
            start = 0 if past is None else past.position
            query, key = rotate(query, start), rotate(key, start)
        return Features(query=query, key=key, value=value)

    def adapt(self, features: Any, mask: Bool[Array, "B S"]) -> Any:
        """What a mechanism does to its features in inference only; none by default."""
        del mask
        return features

    def redraw(self, key: Key[Array, ""]) -> None:
        """Replaces the layer's `Buffer`s, every `redraw_interval` training steps.

        Args:
            key: of the interval: `fold_in(key of the run and layer, step // redraw_interval)`.
        """
        raise NotImplementedError(f"{type(self).__name__} has nothing to redraw")

    def state_floats(self, length: int) -> int:
        """Numbers that stand for the keys and values of `length` tokens, over all heads.

        What a causal layer keeps to go on after them: a state of fixed size, or a cache that grows.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement state_floats")

    def mixing_flops(self, length: int) -> float:
        """Floating-point operations of `mix` for each of `length` tokens, 2 for a multiply-add.

        Projections are left out: they are the same for all mechanisms and stand in the parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement mixing_flops")

    def mix(
        self,
        features: Any,
        mask: Bool[Array, "B S"],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B H L K"]:
        """o_i = Σ_j A_ij v_j over real positions j. Pure; linear in `features.value`.

        Args:
            features: what `project` returned.
            mask: `[B, S]`, True for a real token. A row of pads alone gives zeros.
            dropout_key: drops attention weights where given.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement mix")

    def weights(self, features: Any, mask: Bool[Array, "B S"]) -> Float[Array, "B H L S"]:
        """The matrix A, written down as the formula says: the reference that `mix` is tested against.

        O(L²) memory and no care for range: for tests and for looking at short sequences. Without
        dropout. Rows of pads may hold anything finite.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement weights")

    def init_state(self, batch: int) -> Any:
        """The state before the first token, for `step`.

        Raises:
            ValueError: if the layer has no causal form with a state of fixed size.
        """
        del batch
        raise ValueError(f"{type(self).__name__} keeps every token, not a state of fixed size")

    def step(
        self, state: Any, features: Any, mask: Bool[Array, "B L"]
    ) -> tuple[Any, Float[Array, "B H L K"]]:
        """The next L ≥ 1 tokens, given the state the ones before them left.

        Returns:
            The state after them, and `mix`'s output for them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement step")

    def finish(self, mixed: Float[Array, "B H L K"], features: Any) -> Float[Array, "B L D"]:
        """Output projection; mechanisms with an output norm or gate extend it."""
        del features
        return self.out(self.merge_heads(mixed.astype(self.dtype)))

    def __call__(
        self,
        x: Float[Array, "B L D"],
        *,
        mask: Bool[Array, "B L"],
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
        norm: nnx.Module | None = None,
    ) -> Float[Array, "B L D"]:
        """One attention layer over a batch.

        Args:
            x: tokens' vectors.
            mask: True for a real token, False for padding.
            deterministic: False trains with attention dropout, which then needs `rngs`.
            rngs: stream `dropout`.
            norm: applied to x first; its result is not stored for the backward pass.

        Raises:
            ValueError: if dropout is on and `rngs` is missing.
        """
        key = None
        if self.dropout and not deterministic:
            if rngs is None:
                raise ValueError("attention dropout needs rngs when deterministic is False")
            key = rngs.dropout()
        if norm is None:
            features = self.project(x, mask)
        else:
            features = recomputed(_normed_project, (norm, self), x, mask)
        if deterministic:
            features = self.adapt(features, mask)
        return self.finish(self.mix(features, mask, key), features)

    def init_stream(self, batch: int) -> LayerState:
        """The layer's state before the first token, for `stream`.

        Raises:
            ValueError: if the mechanism has no causal state of fixed size.
        """
        memory = self.init_state(batch)
        width = self.short_conv.width - 1 if self.short_conv is not None else 0
        tokens = jnp.zeros((batch, width, self.out.out_features), self.dtype)
        return LayerState(Past(jnp.zeros((), jnp.int32), tokens), memory)

    def stream(
        self,
        state: LayerState,
        x: Float[Array, "B L D"],
        *,
        mask: Bool[Array, "B L"],
        norm: nnx.Module | None = None,
    ) -> tuple[LayerState, Float[Array, "B L D"]]:
        """The layer over the next L ≥ 1 tokens, in inference, given the state that those before left.

        Args:
            state: from `init_stream` or the call before.
            x: tokens' vectors.
            mask: True for a real token.
            norm: applied to x first.

        Returns:
            The state after them, and what `__call__` over everything would give at those of these
            positions that are real.
        """
        if norm is not None:
            x = norm(x).astype(x.dtype)  # pyright: ignore[reportCallIssue]
        features = self.adapt(self.project(x, mask, state.past), mask)
        memory, mixed = self.step(state.memory, features, mask)
        tokens = jnp.concatenate([state.past.tokens, self.real_tokens(x, mask)], axis=1)
        tokens = tokens[:, tokens.shape[1] - state.past.tokens.shape[1] :]
        past = Past(state.past.position + x.shape[1], tokens)
        return LayerState(past, memory), self.finish(mixed, features)
