"""The training state: what is trained, what is only saved, and the way back to a model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra.training.state import count_parameters, initial_state, merge_model, split_model
from models.attention import Buffer
from models.encoder import Transformer

DIM, VOCAB, CLASSES = 8, 11, 5


@pytest.fixture(scope="module")
def model():
    made = Transformer(
        kind="classify",
        vocab_size=VOCAB,
        num_classes=CLASSES,
        max_length=16,
        attention="softmax",
        mechanisms={"softmax": {"dropout": 0.1}},
        num_layers=1,
        dim=DIM,
        num_heads=2,
        qkv_dim=0,
        mlp_dim=12,
        head_dim=4,
        match="concat",
        positions="learned",
        pool="cls",
        causal=False,
        short_conv=0,
        dropout=0.1,
        attention_dropout=0.0,
        dtype="float32",
        rngs=nnx.Rngs(params=jax.random.key(0)),
    )
    made.features = Buffer(jnp.arange(3.0))
    return made


def test_split_keeps_buffers_and_dropout_apart_from_parameters(model):
    _, params, buffers = split_model(model)
    assert list(buffers) == ["features"]
    assert "features" not in params
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == jnp.float32


def test_merge_is_the_inverse_of_split(model):
    graph, params, buffers = split_model(model)
    _, again, other = split_model(merge_model(graph, params, buffers))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    jax.tree.map(np.testing.assert_array_equal, other, buffers)


def test_count_parameters_by_hand(model):
    norms = 3 * 2 * DIM
    attention = 4 * DIM * DIM
    mlp = DIM * 12 + 12 + 12 * DIM + DIM
    embedding = VOCAB * DIM + 17 * DIM + DIM  # tokens, positions with CLS, CLS
    head = DIM * 4 + 4 + 4 * CLASSES + CLASSES
    assert count_parameters(split_model(model)[1]) == (norms + attention + mlp + embedding + head)


def test_initial_state_is_at_step_0_and_its_optimizer_sees_no_buffer(model):
    _, params, buffers = split_model(model)
    state = initial_state(params, buffers, optax.adam(1e-3))
    assert int(state.step) == 0
    assert state.step.dtype == jnp.int32
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) - 1  # the count
    assert moments == 2 * count_parameters(params)
