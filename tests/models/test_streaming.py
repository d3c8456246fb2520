"""A model that reads its input in pieces gives what it gives for the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import ATTENTION, build
from models.embeddings import POSITIONS
from models.encoder import Transformer

#: Real tokens of each row, of 23.
COUNTS = (23, 4, 9)
PIECES = (1, 6, 2, 14)
LENGTH = sum(PIECES)
STREAMED = [name for name, cls in ATTENTION.items() if hasattr(cls, "init_state")]


def make(**changes):
    settings = {
        "kind": "tag", "vocab_size": 11, "num_classes": 3, "max_length": LENGTH,
        "attention": "gla/linear", "mechanisms": {}, "num_layers": 2, "dim": 8,
        "num_heads": 2, "qkv_dim": 0, "mlp_dim": 12, "head_dim": 6, "match": "concat",
        "positions": "none", "pool": "last", "causal": True, "short_conv": 3,
        "dropout": 0.1, "attention_dropout": 0.0, "dtype": "float64",
    }  # fmt: skip
    return Transformer(**{**settings, **changes}, rngs=nnx.Rngs(0))


def mask_of(shape=()):
    return jnp.broadcast_to(
        jnp.arange(LENGTH) < jnp.array(COUNTS).reshape(3, *([1] * len(shape)), 1),
        (3, *shape, LENGTH),
    )


def streamed(model, inputs, mask):
    """Logits after each piece."""
    state, found, start = model.init_stream(inputs.shape[0]), [], 0
    for size in PIECES:
        part = slice(start, start + size)
        state, logits = model.stream(state, inputs[..., part], mask=mask[..., part])
        found.append(logits)
        start += size
    assert state.position == LENGTH
    return found


@pytest.mark.parametrize("name", STREAMED)
def test_every_mechanism(name, x64):
    layer = build(
        name, dim=8, num_heads=2, max_length=LENGTH, causal=True, rngs=nnx.Rngs(0),
        dtype=jnp.float64, short_conv=4, rotary=True, qkv_dim=16,
    )  # fmt: skip
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    x, mask = jax.random.normal(jax.random.key(0), (3, LENGTH, 8), jnp.float64), mask_of()
    whole = layer(x, mask=mask, deterministic=True, norm=norm)
    state, found, start = layer.init_stream(3), [], 0
    for size in PIECES:
        part = slice(start, start + size)
        state, out = layer.stream(state, x[:, part], mask=mask[:, part], norm=norm)
        found.append(out)
        start += size
    keep = np.asarray(mask)[..., None]
    joined = np.where(keep, np.concatenate(found, 1), 0)
    np.testing.assert_allclose(joined, np.where(keep, whole, 0), atol=1e-10)
    sizes = {leaf.size for leaf in jax.tree.leaves(layer.init_stream(3))}
    assert {leaf.size for leaf in jax.tree.leaves(state)} == sizes


@pytest.mark.parametrize("positions", POSITIONS)
def test_logits_of_every_position(positions, x64):
    model = make(positions=positions)
    inputs = jax.random.randint(jax.random.key(1), (3, LENGTH), 0, 11)
    mask = mask_of()
    whole = model(inputs, mask=mask, deterministic=True)
    joined = jnp.concatenate(streamed(model, inputs, mask), axis=1)
    keep = np.asarray(mask)[..., None]
    np.testing.assert_allclose(np.where(keep, joined, 0), np.where(keep, whole, 0), atol=1e-10)


@pytest.mark.parametrize("pool", ("mean", "max", "last"))
@pytest.mark.parametrize("kind", ("classify", "match"))
def test_logits_of_what_was_read(kind, pool, x64):
    model = make(kind=kind, pool=pool)
    pair = (2,) if kind == "match" else ()
    inputs = jax.random.randint(jax.random.key(1), (3, *pair, LENGTH), 0, 11)
    mask = mask_of(pair)
    found = streamed(model, inputs, mask)
    for logits, end in zip(found, np.cumsum(PIECES), strict=True):
        whole = model(inputs[..., :end], mask=mask[..., :end], deterministic=True)
        np.testing.assert_allclose(logits, whole, atol=1e-10)
    assert np.abs(found[0] - found[-1]).max() > 1e-3


def test_pads_beyond_a_learned_table_are_none_and_tokens_there_are_nan():
    model = make(positions="learned", dtype="float32", max_length=4)
    inputs = jnp.ones((1, 6), jnp.int32)
    for tokens in (4, 5):
        state = model.init_stream(1)
        _, logits = model.stream(state, inputs, mask=jnp.arange(6)[None] < tokens)
        assert np.isfinite(logits).all() == (tokens == 4)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match=r"model.causal=False"):
        make(causal=False, dtype="float32").init_stream(1)
    with pytest.raises(ValueError, match=r"Softmax keeps every token"):
        make(attention="linear/softmax", dtype="float32").init_stream(1)
