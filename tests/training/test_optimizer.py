"""Schedules against their closed forms, the decay mask name by name, one step of AdamW by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from lra.training.optimizer import decay_mask, make_optimizer, make_schedule
from lra.training.state import split_model
from models.encoder import Transformer

BASE, WARMUP, CYCLE = 0.3, 10, 40


def optim(**given):
    values = {
        "learning_rate": BASE,
        "schedule": "constant",
        "warmup_steps": WARMUP,
        "schedule_steps": CYCLE,
        "weight_decay": 0.1,
        "b1": 0.9,
        "b2": 0.98,
        "eps": 1e-9,
        "clip_norm": 0.0,
    }
    return ConfigDict({**values, **given})


def closed_form(name, t):
    ramp = BASE * min(1, t / WARMUP)
    if name == "constant":
        return ramp
    if name == "rsqrt":
        return ramp / math.sqrt(max(t, WARMUP))
    return ramp * 0.5 * (1 + math.cos(math.pi * min(max((t - WARMUP) / CYCLE, 0), 1)))


@pytest.mark.parametrize("name", ["constant", "rsqrt", "cosine"])
def test_schedules(name):
    rate = make_schedule(optim(schedule=name))
    for t in (1, 5, WARMUP - 1, WARMUP, WARMUP + 1, 30, WARMUP + CYCLE, WARMUP + CYCLE + 1, 500):
        np.testing.assert_allclose(
            rate(t - 1), closed_form(name, t), rtol=1e-5, atol=1e-8, err_msg=f"t = {t}"
        )


def test_schedule_values_worth_knowing_by_heart():
    cosine = make_schedule(optim(schedule="cosine"))
    assert float(cosine(WARMUP - 1)) == pytest.approx(BASE)
    assert float(cosine(WARMUP + CYCLE // 2 - 1)) == pytest.approx(BASE / 2)
    for t in (WARMUP + CYCLE, WARMUP + CYCLE + 1, 10 * CYCLE):
        assert float(cosine(t - 1)) == 0
    assert float(make_schedule(optim(schedule="rsqrt"))(99)) == pytest.approx(BASE / 10)
    assert float(make_schedule(optim(warmup_steps=0))(0)) == pytest.approx(BASE)


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"constant, rsqrt, cosine.*'cosin'"):
        make_schedule(optim(schedule="cosin"))


def test_decay_mask_of_a_model_with_every_kind_of_parameter():
    model = Transformer(
        kind="classify",
        vocab_size=7,
        num_classes=2,
        max_length=4,
        attention="softmax",
        mechanisms={},
        num_layers=1,
        dim=4,
        num_heads=1,
        qkv_dim=0,
        mlp_dim=4,
        head_dim=4,
        match="concat",
        positions="learned",
        pool="cls",
        causal=False,
        short_conv=2,
        dropout=0.0,
        attention_dropout=0.0,
        dtype="float32",
        rngs=nnx.Rngs(params=jax.random.key(0)),
    )
    mask = decay_mask(split_model(model)[1])
    named = {
        "/".join(str(part.key) for part in path): decays
        for path, decays in jax.tree_util.tree_leaves_with_path(mask)
    }
    block = "blocks/0"
    assert named == {
        "cls": False,
        "embedding/tokens/embedding": True,
        "embedding/position_table": False,
        f"{block}/attention/short_conv/taps": False,
        f"{block}/attention/query/kernel": True,
        f"{block}/attention/key/kernel": True,
        f"{block}/attention/value/kernel": True,
        f"{block}/attention/out/kernel": True,
        f"{block}/attention_norm/scale": False,
        f"{block}/attention_norm/bias": False,
        f"{block}/mlp/up/kernel": True,
        f"{block}/mlp/up/bias": False,
        f"{block}/mlp/down/kernel": True,
        f"{block}/mlp/down/bias": False,
        f"{block}/mlp_norm/scale": False,
        f"{block}/mlp_norm/bias": False,
        "final_norm/scale": False,
        "final_norm/bias": False,
        "head/layers/0/kernel": True,
        "head/layers/0/bias": False,
        "head/layers/1/kernel": True,
        "head/layers/1/bias": False,
    }


def one_step(config, gradient):
    params = {"dense": {"kernel": jnp.array([2.0, -3.0]), "bias": jnp.array([5.0])}}
    optimizer = make_optimizer(config)
    grads = {"dense": {"kernel": jnp.array(gradient[:2]), "bias": jnp.array(gradient[2:])}}
    state, moved = optimizer.init(params), params
    for _ in range(2):
        updates, state = optimizer.update(grads, state, moved)
        moved = optax.apply_updates(moved, updates)
    return moved["dense"]


def test_adamw_by_hand_decay_is_decoupled_and_scaled_by_the_rate():
    """With a constant gradient g Adam's direction is g/(|g| + eps): two steps, rates r and 2r."""
    rate = BASE / WARMUP
    moved = one_step(optim(), [0.5, -0.25, 4.0])
    kernel, bias = np.array([2.0, -3.0]), 5.0
    for step in (1, 2):
        kernel = kernel - step * rate * (np.array([1.0, -1.0]) + 0.1 * kernel)
        bias = bias - step * rate * 1.0
    np.testing.assert_allclose(moved["kernel"], kernel, rtol=1e-5)
    np.testing.assert_allclose(moved["bias"], bias, rtol=1e-5)


def test_clipping_scales_the_gradient_to_the_norm():
    """With eps = 1 Adam's direction depends on the size of the gradient, so that clipping shows."""
    plain = {"eps": 1.0, "weight_decay": 0.0}
    clipped = one_step(optim(**plain, clip_norm=1.0), [3.0, 4.0, 0.0])["kernel"]
    scaled = one_step(optim(**plain), [0.6, 0.8, 0.0])["kernel"]
    np.testing.assert_allclose(clipped, scaled, rtol=1e-6)
    below = one_step(optim(**plain, clip_norm=9.0), [3.0, 4.0, 0.0])["kernel"]
    np.testing.assert_array_equal(below, one_step(optim(**plain), [3.0, 4.0, 0.0])["kernel"])
    assert float(jnp.abs(below - clipped).max()) > 1e-3
