"""The transformer that every mechanism plugs into."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.attention import ATTENTION, Attention, LayerState, build
from models.attention.stack import parse_stack
from models.dropout import Dropout
from models.embeddings import Embedding
from models.heads import POOLS, Head, Pooled, pool, pool_more
from models.recompute import recomputed

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}


def layer_norm(dim: int, rngs: nnx.Rngs, dtype: Any) -> nnx.LayerNorm:
    """LayerNorm whose statistics are in float32 or better whatever the compute type."""
    return nnx.LayerNorm(
        dim, dtype=jnp.promote_types(dtype, jnp.float32), use_fast_variance=False, rngs=rngs
    )


class MLP(nnx.Module):
    """Dense(hidden) – gelu – dropout – Dense(dim).

    Args:
        dim: model width.
        hidden: width in between.
        dropout: rate after the gelu.
        rngs: stream `params`.
        dtype: compute type.
    """

    def __init__(self, dim: int, hidden: int, *, dropout: float, rngs: nnx.Rngs, dtype: Any):
        init = nnx.initializers.xavier_uniform()
        self.up = nnx.Linear(dim, hidden, dtype=dtype, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, dtype=dtype, kernel_init=init, rngs=rngs)
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        *,
        norm: nnx.Module,
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B L D"]:
        """Applies `norm`, then the MLP, to each position. Of both, x and Dense(hidden) are stored."""
        hidden = recomputed(_normed, (norm, self.up), x)
        if self.dropout.rate and not deterministic:
            hidden = recomputed(_gelu, (), hidden)
            return self.down(self.dropout(hidden, deterministic=False, rngs=rngs))
        return recomputed(_gelu_dense, (self.down,), hidden)


def _normed(norm: Any, dense: Any, x: Array) -> Array:
    return dense(norm(x).astype(x.dtype))


def _gelu(x: Array) -> Array:
    return nnx.gelu(x)


def _gelu_dense(dense: Any, x: Array) -> Array:
    return dense(nnx.gelu(x))


class Block(nnx.Module):
    """Pre-LN: x + dropout(attention(LN(x))), then x + dropout(MLP(LN(x))).

    Args:
        attention: the mechanism of this layer.
        dim: model width.
        mlp_dim: width inside the MLP; 0 leaves the MLP out.
        dropout: rate on both branches and inside the MLP.
        rngs: stream `params`.
        dtype: compute type.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        dim: int,
        mlp_dim: int,
        dropout: float,
        rngs: nnx.Rngs,
        dtype: Any,
    ):
        self.attention_norm = layer_norm(dim, rngs, dtype)
        self.attention = attention
        self.mlp_norm = layer_norm(dim, rngs, dtype) if mlp_dim else None
        self.mlp = MLP(dim, mlp_dim, dropout=dropout, rngs=rngs, dtype=dtype) if mlp_dim else None
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        *,
        mask: Bool[Array, "B L"],
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B L D"]:
        """One layer over a batch; `mask` True marks real tokens."""
        mode = {"deterministic": deterministic, "rngs": rngs}
        x = x + self.dropout(self.attention(x, mask=mask, norm=self.attention_norm, **mode), **mode)
        return self._mlp_branch(x, **mode)

    def stream(
        self, state: LayerState, x: Float[Array, "B L D"], *, mask: Bool[Array, "B L"]
    ) -> tuple[LayerState, Float[Array, "B L D"]]:
        """The layer over the next tokens; see `Attention.stream`."""
        state, mixed = self.attention.stream(state, x, mask=mask, norm=self.attention_norm)
        return state, self._mlp_branch(x + mixed, deterministic=True)

    def _mlp_branch(self, x: Array, **mode: Any) -> Array:
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.dropout(self.mlp(x, norm=self.mlp_norm, **mode), **mode)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamState:
    """What a causal model keeps of the tokens it has read: the same amount however many they are.

    Attributes:
        layers: of each layer, from the bottom up.
        pooled: of the last layer's output; None for kind tag.
    """

    layers: tuple[LayerState, ...]
    pooled: Pooled | None


class Transformer(nnx.Module):
    """Embedding, positions, blocks, final LN, pool, head.

    Args:
        kind: "classify", "match" or "tag" (the task's).
        vocab_size: V.
        num_classes: C.
        max_length: longest training sequence, in tokens, without CLS.
        attention: stack of mechanisms, see `models.attention.stack`.
        mechanisms: keywords of each mechanism by its name, e.g. `{"linear": {"chunk_size": 64}}`; they
            override what all layers share.
        num_layers: blocks.
        dim: D.
        num_heads: H.
        qkv_dim: width of q, k, v over all heads; 0 for D.
        mlp_dim: width inside the MLP; 0 for none.
        head_dim: hidden width of the classify and match heads; 0 for none.
        match: "concat" or "nli", for kind match.
        positions: see `models.embeddings.POSITIONS`.
        pool: see `models.heads.POOLS`; not used by kind tag.
        causal: whether positions see only what came before them.
        short_conv: taps of a causal convolution in front of q, k, v; 0 for none.
        dropout: rate on the embeddings and both branches of a block.
        attention_dropout: rate on attention weights, in the layers whose mechanism has weights.
        dtype: "float32", "bfloat16" or "float64": the compute type. Parameters are float32.
        rngs: stream `params`.

    Raises:
        ValueError: for values that do not go together; the message holds them.
        TypeError: for a keyword that a mechanism does not have.
    """

    def __init__(
        self,
        *,
        kind: str,
        vocab_size: int,
        num_classes: int,
        max_length: int,
        attention: str,
        mechanisms: dict[str, dict[str, Any]],
        num_layers: int,
        dim: int,
        num_heads: int,
        qkv_dim: int,
        mlp_dim: int,
        head_dim: int,
        match: str,
        positions: str,
        pool: str,
        causal: bool,
        short_conv: int,
        dropout: float,
        attention_dropout: float,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout must be at least 0 and less than 1, got {dropout}")
        if mlp_dim < 0:
            raise ValueError(f"model.mlp_dim must be 0 (no MLP) or a width, got {mlp_dim}")
        if pool not in POOLS:
            raise ValueError(f"model.pool must be one of {', '.join(POOLS)}; got {pool!r}")
        if causal and kind != "tag" and pool == "cls":
            raise ValueError(
                "in a causal model CLS, which stands first, sees no token: use pool last, mean or max"
            )
        compute = DTYPES[dtype]
        self.kind = kind
        self.pool = pool
        self.causal = causal
        self.dtype = compute
        self.cls = (
            nnx.Param(jnp.zeros((1, 1, dim), jnp.float32))
            if kind != "tag" and pool == "cls"
            else None
        )
        positions_needed = max_length + (self.cls is not None)
        self.embedding = Embedding(
            vocab_size,
            dim,
            positions=positions,
            max_length=positions_needed,
            rngs=rngs,
            dtype=compute,
        )
        self.blocks = nnx.List(
            Block(
                build(
                    name,
                    dim=dim,
                    num_heads=num_heads,
                    max_length=positions_needed,
                    causal=causal,
                    rngs=rngs,
                    dtype=compute,
                    **{
                        "qkv_dim": qkv_dim,
                        "rotary": positions == "rotary",
                        "short_conv": short_conv,
                        "depth": index / num_layers,
                        "dropout": attention_dropout if ATTENTION[name].has_weights else 0.0,
                        **mechanisms.get(name, {}),
                    },
                ),
                dim=dim,
                mlp_dim=mlp_dim,
                dropout=dropout,
                rngs=rngs,
                dtype=compute,
            )
            for index, name in enumerate(parse_stack(attention, num_layers))
        )
        self.final_norm = layer_norm(dim, rngs, compute)
        self.head = Head(
            kind,
            dim=dim,
            hidden=head_dim,
            num_classes=num_classes,
            match=match,
            rngs=rngs,
            dtype=compute,
        )
        self.dropout = Dropout(dropout)

    def state_floats(self, length: int) -> int:
        """Numbers that the attention layers keep of `length` tokens of one example."""
        return sum(block.attention.state_floats(length) for block in self.blocks)

    def mixing_flops(self, length: int) -> float:
        """Floating-point operations of the mixing of attention, per token of `length`, all layers."""
        return sum(block.attention.mixing_flops(length) for block in self.blocks)

    def encode(
        self,
        inputs: Int[Array, "B L"],
        mask: Bool[Array, "B L"],
        *,
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"]]:
        """Token vectors after the final LN and their mask; T is L, plus one for CLS."""
        x = self.embedding(inputs)
        if self.cls is not None:
            first = jnp.broadcast_to(self.cls[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], axis=1)
            # CLS is a token of its own: real even where the first token of the sequence is not.
            mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
        x = self.embedding.add_positions(x)
        x = self.dropout(x, deterministic=deterministic, rngs=rngs)
        for block in self.blocks:
            x = block(x, mask=mask, deterministic=deterministic, rngs=rngs)
        return self.final_norm(x).astype(self.dtype), mask

    def __call__(
        self,
        inputs: Int[Array, "..."],
        *,
        mask: Bool[Array, "..."],
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "..."]:
        """Logits.

        Args:
            inputs: token ids, `[B, L]`; `[B, 2, L]` for kind match.
            mask: True for a real token, of the same shape.
            deterministic: False trains with dropout, which then needs `rngs`.
            rngs: stream `dropout`.

        Returns:
            `[B, C]`; `[B, L, C]` for kind tag.
        """
        mode = {"deterministic": deterministic, "rngs": rngs}
        if self.kind != "match":
            x, seen = self.encode(inputs, mask, **mode)
            return self.head(x if self.kind == "tag" else pool(x, seen, self.pool))
        # Both documents through one encoder, as one batch of 2B.
        batch, pair, length = inputs.shape
        x, seen = self.encode(
            inputs.reshape(batch * pair, length), mask.reshape(batch * pair, length), **mode
        )
        return self.head(pool(x, seen, self.pool).reshape(batch, pair, -1))

    def init_stream(self, batch: int) -> StreamState:
        """The state before the first token, for `stream`.

        Args:
            batch: examples; a pair of documents is one.

        Raises:
            ValueError: if the model is not causal or a layer has no state of fixed size.
        """
        if not self.causal:
            raise ValueError(
                "only a causal model can be streamed, and this one has model.causal=False: leave out "
                "--stream"
            )
        rows = 2 * batch if self.kind == "match" else batch
        pooled = None
        if self.kind != "tag":
            wide = jnp.promote_types(self.dtype, jnp.float32) if self.pool == "mean" else self.dtype
            dim = self.final_norm.num_features
            pooled = Pooled(jnp.zeros((rows, dim), wide), jnp.zeros(rows, jnp.int32))
        layers = []
        for index, block in enumerate(self.blocks):
            try:
                layers.append(block.attention.init_stream(rows))
            except ValueError as error:
                raise ValueError(
                    f"layer {index + 1} of the model cannot be streamed: {error}. Leave out --stream"
                ) from None
        return StreamState(tuple(layers), pooled)

    def stream(
        self, state: StreamState, inputs: Int[Array, "..."], *, mask: Bool[Array, "..."]
    ) -> tuple[StreamState, Float[Array, "..."]]:
        """The model over the next L ≥ 1 tokens, in inference, given the state that those before left.

        Args:
            state: from `init_stream` or the call before.
            inputs: token ids, `[B, L]`; `[B, 2, L]` for kind match.
            mask: True for a real token, of the same shape.

        Returns:
            The state after them, and the logits that `__call__` over everything so far would give: of
            these L positions for kind tag, pads aside, of the whole for the other kinds. NaN where a
            token lies beyond learned positions.
        """
        rows = (-1, inputs.shape[-1])
        inputs, mask = inputs.reshape(rows), mask.reshape(rows)
        start = state.layers[0].past.position
        x = self.embedding.add_positions(self.embedding(inputs), start)
        # Pads may lie beyond a learned table, where it has no numbers.
        x = jnp.where(mask[..., None], x, 0)
        layers = []
        for block, before in zip(self.blocks, state.layers, strict=True):
            after, x = block.stream(before, x, mask=mask)
            layers.append(after)
        x = self.final_norm(x).astype(self.dtype)
        if state.pooled is None:
            return StreamState(tuple(layers), None), self.head(x)
        pooled, vector = pool_more(state.pooled, x, mask, self.pool)
        if self.kind == "match":
            vector = vector.reshape(-1, 2, vector.shape[-1])
        return StreamState(tuple(layers), pooled), self.head(vector)
