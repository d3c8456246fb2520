"""One optimizer step, and one evaluation step: pure functions of state and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lra.training.state import TrainState, merge_model, split_model

Batch = dict[str, Array]

#: The arrays of a batch that steps read; what else the pipeline gives stays on the host.
MODEL_KEYS = ("inputs", "mask", "label", "weight")


def cross_entropy(
    logits: Float[Array, "*B C"], label: Int[Array, "*B"], weight: Float[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Weighted loss (nats) and weighted correctness, for each label on its own."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    hit = (logits.argmax(-1) == label).astype(weight.dtype)
    return loss * weight, hit * weight


def redrawn(graph: nnx.GraphDef, state: TrainState, key: Key[Array, ""]) -> dict[str, Any]:
    """The buffers for the step that `state` is in front of: new ones where a layer's interval is up.

    What is drawn is a function of the run's key, the layer and the number of the interval alone, so
    that a run that is interrupted goes on with the same. The first interval has what the model was
    made with.

    Args:
        graph: structure of the model.
        state: before the step.
        key: of the run, for redraws.
    """
    model = merge_model(graph, state.params, state.buffers)
    layers = [block.attention for block in model.blocks]
    if not any(layer.redraw_interval for layer in layers):
        return state.buffers
    for index, layer in enumerate(layers):
        if not (interval := layer.redraw_interval):
            continue
        own = jax.random.fold_in(jax.random.fold_in(key, index), state.step // interval)
        due = (state.step > 0) & (state.step % interval == 0)
        structure, params, before = nnx.split(layer, nnx.Param, ...)

        def draw(
            before: Any, key: Any = own, structure: Any = structure, params: Any = params
        ) -> Any:
            other = nnx.merge(structure, params, before)
            other.redraw(key)
            return nnx.split(other, nnx.Param, ...)[2]

        nnx.update(layer, jax.lax.cond(due, draw, lambda before: before, before))
    return split_model(model)[2]


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    accumulate: int,
) -> Callable[
    [TrainState, Batch, Key[Array, ""], Key[Array, ""]], tuple[TrainState, dict[str, Array]]
]:
    """The compiled training step; the state that goes in is donated.

    Gradient accumulation splits the batch inside the step: the sum of the parts' gradients is
    divided by the whole batch's weight, as without it.

    Args:
        graph: structure of the model.
        optimizer: from `make_optimizer`.
        schedule: the learning rate, to be reported.
        accumulate: parts of the batch.

    Returns:
        (state, batch, dropout key and redraw key of the run) → (state, metrics). Metrics: sums
        `loss_sum` (nats), `correct`, `weight`; `grad_norm`, `learning_rate`.
    """

    def loss_sum(
        params: Any, buffers: Any, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Array, tuple[Array, Array]]:
        model = merge_model(graph, params, buffers)
        rngs = nnx.Rngs(dropout=key)
        logits = model(batch["inputs"], mask=batch["mask"], deterministic=False, rngs=rngs)
        loss, hit = cross_entropy(logits, batch["label"], batch["weight"])
        return loss.sum(), (hit.sum(), batch["weight"].sum())

    gradient = jax.value_and_grad(loss_sum, has_aux=True)

    def over_parts(params: Any, buffers: Any, batch: Batch, key: Key[Array, ""]) -> Any:
        # Row r of a device's share goes to part r mod accumulate: no row leaves its device.
        parts = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1),
            batch,
        )
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(accumulate))

        def add(total: Any, part: Any) -> tuple[Any, None]:
            new = gradient(params, buffers, *part)
            return jax.tree.map(jnp.add, total, new), None

        shapes = jax.eval_shape(gradient, params, buffers, jax.tree.map(lambda x: x[0], parts), key)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, zeros, (parts, keys))[0]

    def train_step(
        state: TrainState, batch: Batch, key: Key[Array, ""], redraw_key: Key[Array, ""]
    ) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(key, state.step)
        buffers = redrawn(graph, state, redraw_key)
        compute = gradient if accumulate == 1 else over_parts
        (loss, (correct, weight)), grads = compute(state.params, buffers, batch, key)
        safe = jnp.maximum(weight, 1)
        grads = jax.tree.map(lambda g: g / safe, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {
            "loss_sum": loss,
            "correct": correct,
            "weight": weight,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state.step),
        }
        new = TrainState(state.step + 1, params, buffers, opt_state)
        return new, metrics

    return jax.jit(train_step, donate_argnums=(0,))


def make_eval_step(
    graph: nnx.GraphDef, *, chunk: int = 0
) -> Callable[[Any, Any, Batch], dict[str, Float[Array, "B"]]]:
    """The compiled evaluation step.

    Args:
        graph: structure of the model.
        chunk: tokens that a causal model reads at a time, with a state of fixed size in between; 0
            for all at once. The memory that the model needs then does not grow with the length.

    Returns:
        (params, buffers, batch) → sums over each example's labels: `loss` (nats), `correct`,
        `weight`, each `[B]`. With `chunk`, its call raises ValueError for a model that cannot be
        streamed.

    Raises:
        ValueError: for a negative chunk.
    """
    if chunk < 0:
        raise ValueError(f"chunk must be 0 (everything at once) or a number of tokens, got {chunk}")

    def sums(logits: Array, batch: Batch) -> dict[str, Float[Array, "B"]]:
        loss, hit = cross_entropy(logits, batch["label"], batch["weight"])
        found = {"loss": loss, "correct": hit, "weight": batch["weight"]}
        return {k: v.reshape(v.shape[0], -1).sum(-1) for k, v in found.items()}

    def eval_step(params: Any, buffers: Any, batch: Batch) -> dict[str, Float[Array, "B"]]:
        model = merge_model(graph, params, buffers)
        logits = model(batch["inputs"], mask=batch["mask"], deterministic=True)
        return sums(logits, batch)

    def stream_step(params: Any, buffers: Any, batch: Batch) -> dict[str, Float[Array, "B"]]:
        model = merge_model(graph, params, buffers)
        length = batch["inputs"].shape[-1]
        size = min(chunk, length)
        tag = model.kind == "tag"
        keys = MODEL_KEYS if tag else ("inputs", "mask")

        def chunks(x: Array) -> Array:
            """`[…, L]` to `[N, …, C]`; what fills up the last is masked and has weight 0."""
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % size)])
            return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, size), -2, 0)

        def read(state: Any, part: Batch) -> tuple[Any, Any]:
            state, logits = model.stream(state, part["inputs"], mask=part["mask"])
            return state, sums(logits, part) if tag else logits

        def one(carry: Any, part: Batch) -> tuple[Any, None]:
            # What is found is carried: stacked, it would grow with the length.
            state, new = read(carry[0], part)
            return (state, jax.tree.map(jnp.add, carry[1], new) if tag else new), None

        parts = {k: chunks(batch[k]) for k in keys}
        start = model.init_stream(batch["inputs"].shape[0])
        shapes = jax.eval_shape(lambda: read(start, jax.tree.map(lambda x: x[0], parts))[1])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        (_, found), _ = jax.lax.scan(one, (start, zeros), parts)
        return found if tag else sums(found, batch)

    return jax.jit(stream_step if chunk else eval_step)
