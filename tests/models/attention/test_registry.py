"""Building mechanisms by name, and what the base class refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.common import ATTENTION_DEFAULTS
from models.attention import ATTENTION, Attention, Buffer, build, keywords
from models.attention.base import ShortConv


def make(name="softmax", **changes):
    settings = {"dim": 8, "num_heads": 2, "max_length": 5, "causal": False, **changes}
    return build(name, rngs=nnx.Rngs(0), **settings)


def test_every_entry_is_built_and_has_defaults():
    for name, cls in ATTENTION.items():
        assert type(make(name)) is cls
        assert set(ATTENTION_DEFAULTS[name]) <= set(keywords(name))
    assert ATTENTION_DEFAULTS.keys() == ATTENTION.keys()


@pytest.mark.parametrize("name", ATTENTION)
def test_every_entry_is_built_without_arrays(name):
    """Sweeps check the models of a whole grid by their shapes before anything runs."""
    own = {"gate": True} if name == "rfa" else {}
    shapes = jax.eval_shape(lambda: nnx.state(make(name, **own)))
    assert jax.tree.leaves(shapes)


def test_unknown_name_lists_the_names_and_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"'linaer'; there are: .*\. Did you mean 'linear'\?") as e:
        make("linaer")
    assert all(name in str(e.value) for name in ATTENTION)
    with pytest.raises(ValueError, match=r"'zzz'; there are: ") as e:
        make("zzz")
    assert "Did you mean" not in str(e.value)


@pytest.mark.parametrize("name", ATTENTION)
def test_unknown_keyword_lists_the_keywords(name):
    with pytest.raises(TypeError, match=f"{name!r} has no keyword 'chunks'; it has: ") as error:
        make(name, chunks=3)
    listed = str(error.value).split("it has: ")[1].split(", ")
    assert listed == keywords(name)
    assert {"dim", "rotary", "short_conv", *ATTENTION_DEFAULTS[name]} <= set(listed)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("softmax", {"num_heads": 3}, "num_heads must divide .* got 3 and 8"),
        ("softmax", {"qkv_dim": 9}, "got 2 and 9"),
        ("softmax", {"qkv_dim": -2}, "got 2 and -2"),
        ("softmax", {"dim": 0}, "got 0, 2 and 5"),
        ("softmax", {"num_heads": 0}, "got 8, 0 and 5"),
        ("softmax", {"max_length": 0}, "got 8, 2 and 0"),
        ("softmax", {"dropout": 1.0}, r"less than 1, got 1\.0"),
        ("softmax", {"dropout": -0.5}, r"got -0\.5"),
        ("softmax", {"rotary": True, "qkv_dim": 6}, "even head width, got 3"),
        ("softmax", {"short_conv": -1}, "got -1"),
        ("linear", {"dropout": 0.1}, r"Linear has no attention weights .* got 0\.1"),
        ("linear", {"chunk_size": 0}, "at least 1 token, got 0"),
        ("linear", {"chunk_size": -4}, "at least 1 token, got -4"),
        ("linear", {"key_dim": -1}, "key_dim must be 0 .* got -1"),
        ("softmax", {"scale": "cubic"}, "one of none, fixed, .* got 'cubic'"),
        ("softmax", {"scale": "fixed", "temperature": -1.0}, r"above 0 and finite, got -1\.0"),
        ("softmax", {"scale": "fixed", "temperature": 0.0}, r"above 0 and finite, got 0\.0"),
        ("softmax", {"temperature": 2.0}, r"temperature=2\.0 has no effect with scale 'none'"),
        ("softmax", {"scale": "log_base", "log_base": 1.0}, r"above 1, .* got 1\.0"),
        ("softmax", {"log_base": 512.0}, r"log_base=512\.0 has no effect with scale 'none'"),
        ("taylor", {"feature_dim": 0}, "feature_dim must be at least 1, got 0"),
        ("performer", {"num_features": -1}, "num_features must be at least 0, got -1"),
        ("performer", {"redraw_interval": -1}, "redraw_interval must be at least 0, got -1"),
        ("performer", {"kernel": "cos"}, "one of softmax, relu; got 'cos'"),
        ("performer", {"kernel": "relu", "num_features": 8}, "num_features must be 0, got 8"),
        ("performer", {"normalise": False}, "normalise must be True"),
        ("performer", {"dropout": 0.2}, r"Performer has no attention weights .* got 0\.2"),
        ("rfa", {"feature_map": "exp"}, "one of sincos, arccos; got 'exp'"),
        ("rfa", {"num_features": -3}, "num_features must be at least 0, got -3"),
    ],
)
def test_refused_values(name, changes, message):
    with pytest.raises(ValueError, match=message):
        make(name, **changes)


def test_attention_dropout_needs_rngs():
    layer = make(dropout=0.5)
    x, mask = jnp.ones((1, 5, 8)), jnp.ones((1, 5), bool)
    with pytest.raises(ValueError, match="needs rngs when deterministic is False"):
        layer(x, mask=mask, deterministic=False)


def test_buffers_are_no_parameters():
    class Noted(Attention):
        def __init__(self, **common):
            super().__init__(**common)
            self.noted = Buffer(jnp.ones(3))

    layer = Noted(dim=4, num_heads=1, max_length=2, causal=False, rngs=nnx.Rngs(0))
    _, params, rest = nnx.split(layer, nnx.Param, ...)
    assert "noted" not in params and list(rest) == ["noted"]


def test_qkv_width():
    layer = make(qkv_dim=4)
    features = layer.project(jnp.ones((1, 5, 8)), jnp.ones((1, 5), bool))
    assert features.value.shape == (1, 2, 5, 2)


def test_rotary_turns_queries_and_keys_only():
    plain, turned = (
        make(rotary=r).project(jnp.ones((1, 5, 8)), jnp.ones((1, 5), bool)) for r in (False, True)
    )
    for part in ("query", "key"):
        assert np.abs(getattr(plain, part) - getattr(turned, part))[:, :, 1:].max() > 1e-2
    np.testing.assert_array_equal(plain.value, turned.value)


class TestShortConv:
    def test_formula(self):
        layer = ShortConv(3, 4, rngs=nnx.Rngs(0))
        x = np.asarray(jax.random.normal(jax.random.key(0), (2, 6, 3)))
        kernel = np.asarray(layer.taps[...])
        expected = np.zeros_like(x)
        for t in range(6):
            for j in range(min(4, t + 1)):
                expected[:, t] += kernel[j] * x[:, t - j]
        np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)

    def test_starts_near_the_identity(self):
        kernel = np.asarray(ShortConv(64, 3, rngs=nnx.Rngs(0)).taps[...])
        assert (kernel[0] == 1).all()
        assert 0.2 < kernel[1:].std() < 0.3

    def test_bfloat16_and_sequences_shorter_than_the_kernel(self):
        layer = ShortConv(3, 4, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        out = layer(jnp.ones((1, 2, 3), jnp.bfloat16))
        assert out.shape == (1, 2, 3) and out.dtype == jnp.bfloat16

    def test_width(self):
        with pytest.raises(ValueError, match=re.escape("at least 1 token, got 0")):
            ShortConv(3, 0, rngs=nnx.Rngs(0))
