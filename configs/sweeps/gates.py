"""Recall by mechanisms with gates and the delta rule: trained at 64 tokens, tested up to 1024.

    python -m lra.sweep configs/sweeps/gates.py --workdir=runs/gates --run.platform=cpu

Eight pairs, causal, a short convolution in front of q, k, v. GLA with both starts of its gate and
DeltaNet have states of one size (no output gate, keys as wide as values); ELU linear attention has
K more floats a head. All seeds are tried at both learning rates, because at the larger one some learn
and some do not: 24 runs of 1500 steps. About an hour on two CPU cores.
Argument: `steps=1500`.
"""

from __future__ import annotations

from configs.common import parse_argument
from lra.sweep import Sweep, product


def get_sweep(arg: str | None = None) -> Sweep:
    """The sweep; `arg` is explained in the module's docstring."""
    args = parse_argument(arg, steps=1500)
    values = {"train.steps": args.steps, "train.eval_every": max(args.steps // 3, 1)}
    return Sweep(
        settings=[
            *product("configs/recall.py", {"attention": ["linear", "deltanet"]}, values),
            *product(
                "configs/recall.py",
                {"attention": "gla"},
                {
                    **values,
                    "attention.gla.output_gate": False,
                    "attention.gla.gate_start": ["paper", "spread"],
                },
            ),
        ],
        rates=(3e-3, 1e-2),
        seeds=(0, 1, 2),
        search_seeds=3,
        lengths=(64, 128, 256, 512, 1024),
    )
