"""Grids of runs: what a sweep file says (`Sweep`, `product`, `zipped`), and `python -m lra.sweep`."""

from lra.sweep.grid import Setting, Sweep, product, zipped

__all__ = ["Setting", "Sweep", "product", "zipped"]
