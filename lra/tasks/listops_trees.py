"""ListOps trees: tokens, grammar, and their generator, a block of trees at a time.

A tree is a digit 0 … 9 or an operator over 2 … max_args trees. The root is an operator and stands at
depth 1; below it a node is an operator with probability 1/4 and else a digit, at max_depth always a
digit. Digits, numbers of arguments and operators are uniform. The length of a tree is its digits
plus 2 for each operator (the operator and its bracket); trees whose length is not strictly between
min_length and max_length are thrown away. The root may be taken for an operator because a tree of
one digit would be thrown away too.

    [MIN   least argument              [MED   median, of an even number the mean of the middle two,
    [MAX   greatest argument                  rounded down
                                       [SM    sum modulo 10

References: Nangia and Bowman, "ListOps: A diagnostic dataset for latent tree learning", arXiv
1804.06028; Tay et al., "Long Range Arena", arXiv 2011.04006.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib

import numpy as np

#: Of the data: other trees from the same variant and seed, or another format, are another version.
VERSION = "1.0.0"

#: The vocabulary: a token's id is its position. Prepared data hold ids, so the order is fixed.
TOKENS = (
    *("<pad>", "<unknown>"),
    *("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
    *("[MIN", "[MAX", "[MED", "[SM", "]"),
)
PAD, UNKNOWN = 0, 1
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 2, 12, 16

_MIN, _MAX, _MED, _SM = range(FIRST_OPERATOR, CLOSE)
_IDS = {token.encode(): i for i, token in enumerate(TOKENS) if i > UNKNOWN}

# A tree belongs to the split in whose interval of [0, 1) its hash lies. The intervals do not depend
# on the variant or the seed: no tree of one split occurs in another of any of them.
_SPLIT_ENDS = {"train": 0.9, "validation": 0.95, "test": 1.0}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A distribution of trees and the number of them.

    Attributes:
        name: Name of the variant and of its directory.
        min_length: Lengths are above this many tokens, at least 1.
        max_length: Lengths are below this many tokens.
        max_depth: Depth at which all nodes are digits; the root's is 1.
        max_args: Most arguments of an operator.
        train: Trees in the train split.
        validation: Trees in the validation split.
        test: Trees in the test split.
        block: Trees that are drawn at a time, those thrown away included.
    """

    name: str
    min_length: int
    max_length: int
    max_depth: int
    max_args: int
    train: int
    validation: int
    test: int
    block: int

    def __post_init__(self):
        if self.min_length < 1 or self.max_length < self.min_length + 2:
            raise ValueError(
                "lengths must lie strictly between two bounds of at least 1 token, got min_length "
                f"{self.min_length} and max_length {self.max_length}"
            )
        for name, least in (("max_depth", 2), ("max_args", 2), ("block", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{name} must have at least 1 tree, got {size}")

    @property
    def sizes(self) -> dict[str, int]:
        """Number of trees in each split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


@dataclasses.dataclass(frozen=True)
class Trees:
    """Trees side by side.

    Attributes:
        tokens: Ids of all trees, one after the other, [sum of lengths] uint8.
        lengths: Tokens of each tree, [trees] int64.
        labels: Value of each tree, 0 … 9, [trees] uint8.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> list[np.ndarray]:
        """The tokens of each tree, [length] uint8 each."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self) else []


#: The variants by name. "default" is Long Range Arena's; "test" is for tests.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("default", 500, 2000, 10, 10, 96_000, 2000, 2000, block=4096),
        Variant("short", 20, 100, 5, 5, 20_000, 1000, 1000, block=4096),
        Variant("test", 5, 40, 4, 4, 200, 20, 20, block=64),
    )
}


def encode(text: bytes) -> np.ndarray:
    """Token ids of a tree in words; round brackets are no tokens, other strange words are `UNKNOWN`.

    Args:
        text: Words between blanks.

    Returns:
        Ids, [tokens] uint8.
    """
    words = text.translate(None, b"()").split()
    return np.frombuffer(bytes(map(_IDS.get, words, itertools.repeat(UNKNOWN))), np.uint8)


def decode(tokens: np.ndarray) -> str:
    """The words of token ids, between blanks.

    Args:
        tokens: Ids, [tokens] integers.
    """
    return " ".join(TOKENS[i] for i in tokens)


def content_hash(tokens: np.ndarray) -> bytes:
    """A hash of 16 bytes of a tree, which stands for the tree.

    Args:
        tokens: Ids, [length] uint8.
    """
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def split_of(digest: bytes) -> str:
    """The split to which the tree of a content hash belongs."""
    share = int.from_bytes(digest[:6], "little") / 2**48
    return next(split for split, end in _SPLIT_ENDS.items() if share < end)


def draw_block(variant: Variant, seed: int, index: int) -> Trees:
    """Draws `variant.block` trees and returns those whose length is in bounds.

    A block is a function of its arguments alone. One tree may occur several times.

    Args:
        variant: The distribution.
        seed: Root seed, at least 0.
        index: Number of the block, at least 0.

    Returns:
        The trees in the order in which they were drawn.
    """
    name = zlib.crc32(f"listops/{variant.name}".encode())
    entropy = np.random.SeedSequence((seed, name, index))
    levels, kept = _grow(variant, np.random.Generator(np.random.PCG64(entropy)))
    levels = [level.of(kept) for level in levels]
    sizes = _sizes(levels)
    return Trees(_layout(levels, sizes), sizes[0], _values(levels))


@dataclasses.dataclass(frozen=True)
class _Level:
    """The nodes of one depth of many trees, ordered by tree and then from left to right.

    The children of its operators, in order, are the nodes of the level below.
    """

    ids: np.ndarray  # [nodes] uint8: token ids of digits and operators
    tree: np.ndarray  # [nodes] int64: number of the tree that a node is in
    arity: np.ndarray  # [operators] int64: number of arguments
    owner: np.ndarray  # [operators] int64: number of the tree that an operator is in

    @property
    def operators(self) -> np.ndarray:
        """Which nodes are operators, [nodes] bool."""
        return self.ids >= FIRST_OPERATOR

    @property
    def starts(self) -> np.ndarray:
        """Where the children of each operator start in the level below, [operators] int64."""
        return np.cumsum(self.arity) - self.arity

    def of(self, kept: np.ndarray) -> _Level:
        """Only the nodes of some trees; kept: [trees] bool."""
        nodes, operators = kept[self.tree], kept[self.owner]
        return _Level(
            self.ids[nodes], self.tree[nodes], self.arity[operators], self.owner[operators]
        )


def _grow(variant: Variant, rng: np.random.Generator) -> tuple[list[_Level], np.ndarray]:
    """Draws all trees of a block, depth by depth; trees that have become too long grow no further.

    Returns:
        The levels from depth 1 to `max_depth`, and which trees have a length in bounds, [block]
        bool; the levels are complete for those.
    """
    levels = []
    tree = np.arange(variant.block)
    ids = rng.integers(FIRST_OPERATOR, CLOSE, variant.block, np.uint8)
    lengths = np.zeros(variant.block, np.int64)
    for depth in range(1, variant.max_depth + 1):
        operators = ids >= FIRST_OPERATOR
        lengths += np.bincount(tree, minlength=variant.block)
        lengths += np.bincount(tree[operators], minlength=variant.block)
        owner = tree[operators & (lengths < variant.max_length)[tree]]
        arity = rng.integers(2, variant.max_args + 1, len(owner))
        levels.append(_Level(ids, tree, arity, owner))
        tree = np.repeat(owner, arity)
        # Of 40 equally likely draws 30 are digits, three for each, and 10 are operators.
        draws = rng.integers(0, 40 if depth + 1 < variant.max_depth else 30, len(tree), np.uint8)
        ids = FIRST_DIGIT + draws % 10
        operators = np.flatnonzero(draws >= 30)
        ids[operators] = rng.integers(FIRST_OPERATOR, CLOSE, len(operators), np.uint8)
    return levels, (variant.min_length < lengths) & (lengths < variant.max_length)


def _sizes(levels: list[_Level]) -> list[np.ndarray]:
    """Tokens of the subtree of every node: for each level [nodes] int64."""
    sizes = []
    below = np.zeros(0, np.int64)
    for level in reversed(levels):
        below_sizes, below = below, np.ones(len(level.ids), np.int64)
        if len(level.arity):
            below[level.operators] = 2 + np.add.reduceat(below_sizes, level.starts)
        sizes.append(below)
    return sizes[::-1]


def _layout(levels: list[_Level], sizes: list[np.ndarray]) -> np.ndarray:
    """Writes the trees as sequences, one after the other: [sum of lengths] uint8."""
    tokens = np.full(sizes[0].sum(), CLOSE, np.uint8)
    position = np.cumsum(sizes[0]) - sizes[0]
    for i, level in enumerate(levels):
        tokens[position] = level.ids
        if not len(level.arity):
            break
        # A child stands behind its parent's token and the subtrees of its elder siblings.
        before = np.cumsum(sizes[i + 1]) - sizes[i + 1]
        offset = position[level.operators] + 1 - before[level.starts]
        position = before + np.repeat(offset, level.arity)
    return tokens


def _values(levels: list[_Level]) -> np.ndarray:
    """Evaluates the trees from their leaves up: the values of the first level, [trees] uint8."""
    values = np.zeros(0, np.uint8)
    for level in reversed(levels):
        arguments, values = values, level.ids - np.uint8(FIRST_DIGIT)
        if len(level.arity):
            values[level.operators] = _apply(
                level.ids[level.operators], arguments, level.arity, level.starts
            )
    return values


def _apply(
    operators: np.ndarray, arguments: np.ndarray, arity: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Values of operators.

    Args:
        operators: Token ids, [operators] uint8.
        arguments: Values of all of their arguments, [sum of arity] uint8.
        arity: Numbers of arguments, [operators] int64.
        starts: Where the arguments of each start, [operators] int64.

    Returns:
        [operators] uint8.
    """
    least = np.minimum.reduceat(arguments, starts)
    greatest = np.maximum.reduceat(arguments, starts)
    total = np.add.reduceat(arguments, starts, dtype=np.int64) % 10
    # Sorted with padding behind, which is above every value.
    columns = np.arange(arity.max())
    padded = np.full((len(arity), len(columns)), 10, np.uint8)
    padded[columns < arity[:, None]] = arguments
    padded.sort(axis=1)
    rows = np.arange(len(arity))
    median = (padded[rows, (arity - 1) // 2] + padded[rows, arity // 2]) // 2
    return np.choose(operators - FIRST_OPERATOR, (least, greatest, median, total)).astype(np.uint8)
