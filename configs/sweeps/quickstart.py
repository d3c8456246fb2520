"""Softmax and linear attention on associative recall: trained at 64 tokens, tested up to 1024.

    python -m lra.sweep configs/sweeps/quickstart.py --workdir=runs/quickstart --run.platform=cpu

Makes the table of the README's quickstart: two runs of 600 steps, one seed, at the rate that the
config has. About two and a half minutes on two CPU cores.
"""

from lra.sweep import Sweep, product


def get_sweep(arg: str | None = None) -> Sweep:
    """The sweep; it has no argument."""
    if arg is not None:
        raise ValueError(f"this sweep has no argument, got {arg!r}")
    return Sweep(
        settings=product("configs/recall.py", args={"attention": ["softmax", "linear"]}),
        lengths=(64, 128, 256, 512, 1024),
    )
