"""What changes from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.encoder import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint holds. Plain nested dicts: they flatten fast at every step.

    Attributes:
        step: optimizer steps done, an integer array (JAX puts stand-ins in its place as well).
        params: trained arrays.
        buffers: arrays that are saved and not trained.
        opt_state: the optimizer's.
    """

    step: Any
    params: dict[str, Any]
    buffers: dict[str, Any]
    opt_state: Any

    def as_dict(self) -> dict[str, Any]:
        """The same by name, as checkpoints hold it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def split_model(model: Transformer) -> tuple[nnx.GraphDef, dict[str, Any], dict[str, Any]]:
    """The model's structure, its trained arrays, its other arrays."""
    graph, params, buffers = nnx.split(model, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def merge_model(
    graph: nnx.GraphDef, params: dict[str, Any], buffers: dict[str, Any]
) -> Transformer:
    """The model again; the inverse of `split_model`."""
    return nnx.merge(graph, nnx.State(params), nnx.State(buffers))


def initial_state(
    params: dict[str, Any], buffers: dict[str, Any], optimizer: optax.GradientTransformation
) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, buffers, optimizer.init(params))


def count_parameters(params: dict[str, Any]) -> int:
    """Number of trained scalars."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
