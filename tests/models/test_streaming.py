"""A model that reads its input in chunks gives what it gives for the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import ATTENTION, Attention, build
from models.embeddings import POSITIONS
from models.encoder import Transformer

CHUNKS = (1, 6, 2, 14)
LENGTH = sum(CHUNKS)
#: Mechanisms with a state of fixed size, and settings of them that change what the state is.
CASES = [(name, {}) for name, cls in ATTENTION.items() if cls.step is not Attention.step] + [
    ("linear", {"normalise": False}),
    ("taylor", {"feature_dim": 6}),
    ("performer", {"kernel": "relu", "redraw_interval": 0}),
    ("rfa", {"gate": True}),
    ("gla", {"output_gate": False, "chunk_size": 5}),
    ("gated_deltanet", {"beta_max": 2.0, "key_dim": 6}),
]


def make(**changes):
    settings = {
        "kind": "tag", "vocab_size": 11, "num_classes": 3, "max_length": LENGTH,
        "attention": "gla/linear", "mechanisms": {}, "num_layers": 2, "dim": 8,
        "num_heads": 2, "qkv_dim": 0, "mlp_dim": 12, "head_dim": 6, "match": "concat",
        "positions": "none", "pool": "last", "causal": True, "short_conv": 3,
        "dropout": 0.1, "attention_dropout": 0.0, "dtype": "float64",
    }  # fmt: skip
    return Transformer(**{**settings, **changes}, rngs=nnx.Rngs(0))


def mask_of(pair=()):
    """Full, cut, with gaps, with pads alone in the first chunks, and of pads alone; pairs differ."""
    position = np.arange(LENGTH)
    rows = [position >= 0, position < 4, position % 3 > 0, position > 8, position < 0]
    mask = np.stack(rows)
    return jnp.asarray(np.stack([mask, np.roll(mask, 1, axis=0)], 1) if pair else mask)


def pieces(x, axis):
    return jnp.split(x, np.cumsum(CHUNKS)[:-1], axis=axis)


def streamed(model, inputs, mask):
    """Logits after each chunk."""
    state, found = model.init_stream(inputs.shape[0]), []
    for part, seen in zip(pieces(inputs, -1), pieces(mask, -1), strict=True):
        state, logits = model.stream(state, part, mask=seen)
        found.append(logits)
    return found


def kinds(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("name", "own", "short_conv"),
    [(*case, 4) for case in CASES] + [("linear", {}, 0), ("linear", {}, 1)],
)
def test_every_mechanism(name, own, short_conv, x64):
    layer = build(
        name, dim=8, num_heads=2, max_length=LENGTH, causal=True, rngs=nnx.Rngs(0),
        dtype=jnp.float64, short_conv=short_conv, rotary=True, qkv_dim=16, **own,
    )  # fmt: skip
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    mask = mask_of()
    x = jax.random.normal(jax.random.key(0), (*mask.shape, 8), jnp.float64)
    whole = jax.jit(lambda: layer(x, mask=mask, deterministic=True, norm=norm))()
    stream = jax.jit(lambda state, x, mask: layer.stream(state, x, mask=mask, norm=norm))
    state, found = layer.init_stream(len(x)), []
    for part, seen in zip(pieces(x, 1), pieces(mask, 1), strict=True):
        state, out = stream(state, part, seen)
        found.append(out)
    keep = np.asarray(mask)[..., None]
    joined = np.where(keep, np.concatenate(found, 1), 0)
    np.testing.assert_allclose(joined, np.where(keep, whole, 0), atol=1e-10)
    assert kinds(state) == kinds(layer.init_stream(len(x)))


@pytest.mark.parametrize("positions", POSITIONS)
def test_logits_of_every_position(positions, x64):
    model = make(positions=positions)
    mask = mask_of()
    inputs = jax.random.randint(jax.random.key(1), mask.shape, 0, 11)
    whole = model(inputs, mask=mask, deterministic=True)
    joined = jnp.concatenate(streamed(model, inputs, mask), axis=1)
    keep = np.asarray(mask)[..., None]
    np.testing.assert_allclose(np.where(keep, joined, 0), np.where(keep, whole, 0), atol=1e-10)


@pytest.mark.parametrize("positions", ("sinusoidal", "rotary"))
def test_positions_go_on_beyond_the_first_table(positions):
    """Positions are made from digits to base 1024."""
    model = make(positions=positions, dtype="float32", num_layers=1, attention="linear")
    inputs = jax.random.randint(jax.random.key(1), (1, 1030), 0, 11)
    mask = jnp.ones(inputs.shape, bool)
    whole = model(inputs, mask=mask, deterministic=True)
    state, _ = model.stream(model.init_stream(1), inputs[:, :1020], mask=mask[:, :1020])
    _, logits = model.stream(state, inputs[:, 1020:], mask=mask[:, 1020:])
    np.testing.assert_allclose(logits, whole[:, 1020:], atol=1e-5)


@pytest.mark.parametrize("pool", ("mean", "max", "last"))
@pytest.mark.parametrize("kind", ("classify", "match"))
def test_logits_of_what_was_read(kind, pool, x64):
    model = make(kind=kind, pool=pool)
    mask = mask_of((2,) if kind == "match" else ())
    inputs = jax.random.randint(jax.random.key(1), mask.shape, 0, 11)
    found = streamed(model, inputs, mask)
    for logits, end in zip(found, np.cumsum(CHUNKS), strict=True):
        whole = model(inputs[..., :end], mask=mask[..., :end], deterministic=True)
        np.testing.assert_allclose(logits, whole, atol=1e-10)
    assert np.abs(found[0] - found[-1]).max() > 1e-3


@pytest.mark.parametrize("pool", ("mean", "max", "last"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_the_state_can_be_carried_by_a_scan(dtype, pool):
    model = make(kind="classify", pool=pool, dtype=dtype, positions="rotary")
    start = model.init_stream(2)
    inputs = jnp.ones((5, 2, 4), jnp.int32)

    def one(state, part):
        state, logits = model.stream(state, part, mask=part > 0)
        return state, logits

    state, logits = jax.lax.scan(one, start, inputs)
    assert kinds(state) == kinds(start) and np.isfinite(logits).all()


@pytest.mark.parametrize("chunk", (128, 7))
def test_bfloat16(chunk):
    """At whole chunks of the recurrences only the order of compilation differs; elsewhere what is
    rounded to 8 bits inside a chunk of the recurrence and what is carried in float32."""
    model = make(attention="gla/deltanet", dtype="bfloat16", positions="rotary")
    inputs = jax.random.randint(jax.random.key(1), (2, 256), 0, 11)
    mask = jnp.asarray(np.arange(256) < np.array([[256], [200]]))
    whole = jax.jit(lambda: model(inputs, mask=mask, deterministic=True))()
    whole = np.asarray(whole, np.float32)
    stream = jax.jit(lambda state, x, mask: model.stream(state, x, mask=mask))
    state, found = model.init_stream(2), []
    for start in range(0, 256, chunk):
        part = slice(start, start + chunk)
        state, logits = stream(state, inputs[:, part], mask[:, part])
        found.append(np.asarray(logits, np.float32))
    keep = np.asarray(mask)[..., None]
    joined = np.where(keep, np.concatenate(found, axis=1), 0)
    difference = np.abs(joined - np.where(keep, whole, 0)).max() / np.abs(whole).max()
    assert difference <= (4e-3 if chunk == 128 else 3e-2)


def test_pads_beyond_a_learned_table_are_none_and_tokens_there_are_nan():
    model = make(positions="learned", dtype="float32", max_length=4)
    inputs = jnp.ones((1, 6), jnp.int32)
    for tokens in (4, 5):
        state = model.init_stream(1)
        _, logits = model.stream(state, inputs, mask=jnp.arange(6)[None] < tokens)
        assert np.isfinite(logits).all() == (tokens == 4)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match=r"model.causal=False: leave out --stream"):
        make(causal=False, dtype="float32").init_stream(1)
    with pytest.raises(ValueError, match=r"layer 2 .* Softmax keeps every token"):
        make(attention="linear/softmax", dtype="float32").init_stream(1)
