"""Multi-query associative recall (MQAR), generated.

A sequence of N tokens over a vocabulary of V holds K key–value pairs k₁v₁…k_Kv_K, then filler in
which every key stands once more. Where a key is repeated (a query) the label is its value; no other
position carries a label. Keys are drawn from 1 … V/2 − 1 and values from V/2 … V − 1, both without
replacement. Of the (N − 2K)//2 slots after the context, K are drawn without replacement with
p(i) ∝ i^(power − 1), i = 1, 2, …, and the query of slot i stands at position 2K + 2(i − 1).

Unlike the published generator (HazyResearch/zoology, data/multiquery_ar.py), an example is a pure
function of (seed, split, index), and filler cannot be mistaken for a query or give an answer away.

Reference: Arora et al., "Zoology: Measuring and improving recall in efficient language models",
arXiv 2312.04927.
"""

import dataclasses
import hashlib
import zlib

import numpy as np

from lra.tasks.spec import IGNORE, Example, TaskSpec, check_length, check_split

# A key–value context belongs to the split in whose interval of [0, 1) its hash lies. The intervals
# are wide because a context that lies outside is drawn again: 2, 4 and 4 draws on average.
_SHARES = {"train": (0.0, 0.5), "validation": (0.5, 0.75), "test": (0.75, 1.0)}
_MAX_DRAWS = 1000


def _content_hash(context: np.ndarray) -> float:
    """Stable hash in [0, 1) of a context: keys then values, [2K] int."""
    digest = hashlib.blake2b(context.astype("<i4").tobytes(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


@dataclasses.dataclass(frozen=True)
class _RecallSource:
    """Examples of one split; see `Recall`."""

    split: str
    num_examples: int
    length: int
    seed: int
    vocab_size: int
    num_pairs: int
    filler: str
    slot_times: np.ndarray  # [slots] float64: i^(1 − power), one over the weight of slot i

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.num_examples:
            raise IndexError(f"index {index} is outside 0 … {self.num_examples - 1}")
        name = zlib.crc32(f"recall/{self.split}".encode())
        entropy = np.random.SeedSequence((self.seed, name, self.length, int(index)))
        rng = np.random.Generator(np.random.PCG64(entropy))
        context = self._context(rng)
        keys, values = context[: self.num_pairs], context[self.num_pairs :]

        start = 2 * self.num_pairs
        inputs = np.empty(self.length, np.int32)
        inputs[0:start:2] = keys
        inputs[1:start:2] = values
        inputs[start:] = self._filler(rng, context)
        # The K first of independent exponential arrival times with rates p(i) are K draws without
        # replacement, in their order (Gumbel top-k), without the loop of `Generator.choice`.
        times = rng.standard_exponential(self.slot_times.size) * self.slot_times
        queries = start + 2 * times.argsort()[: self.num_pairs]
        inputs[queries] = keys
        label = np.full(self.length, IGNORE, np.int32)
        label[queries] = values
        return {"inputs": inputs, "label": label, "length": self.length}

    def _context(self, rng: np.random.Generator) -> np.ndarray:
        """Draws keys and values, [2K], until their hash selects this split."""
        half, pairs = self.vocab_size // 2, self.num_pairs
        low, high = _SHARES[self.split]
        context = np.empty(2 * pairs, np.int64)
        for _ in range(_MAX_DRAWS):
            context[:pairs] = 1 + rng.choice(half - 1, pairs, replace=False)
            context[pairs:] = half + rng.choice(half, pairs, replace=False)
            if low <= _content_hash(context) < high:
                return context
        raise ValueError(
            f"none of {_MAX_DRAWS} contexts of {pairs} pairs over a vocabulary of "
            f"{self.vocab_size} belongs to split {self.split!r}: there are too few different ones"
        )

    def _filler(self, rng: np.random.Generator, context: np.ndarray) -> np.ndarray | int:
        """Filler of the positions after the context, [N − 2K] or the constant 0."""
        if self.filler == "zeros":
            return 0
        free = np.ones(self.vocab_size, bool)
        free[0] = False
        free[context] = False
        tokens = np.flatnonzero(free)
        return tokens[rng.integers(tokens.size, size=self.length - context.size)]


class Recall:
    """Multi-query associative recall, as the module describes it; kind "tag".

    The split of an example is that of its key–value context, which a hash of the context alone
    selects: no context of one split occurs in another, whatever their seeds and lengths.

    Random filler is uniform over the tokens 1 … V − 1 that are neither a key nor a value of the
    same example: a key in the filler would be a query without a label, a value could be an answer.
    Filler "zeros" is token 0, which is never a key, a value or random filler. No example is ever
    padded; `pad_id` is 0 because 0 stands for nothing else.
    """

    def __init__(
        self,
        length: int,
        seed: int,
        vocab_size: int = 256,
        num_pairs: int = 8,
        filler: str = "random",
        power: float = 0.01,
        train_examples: int = 100_000,
        validation_examples: int = 1000,
        test_examples: int = 3000,
    ):
        """Sets up the generator; nothing is generated yet.

        Args:
            length: N in tokens, odd or even, at least 4 num_pairs: the context and a slot of two
                tokens for each query.
            seed: Root seed, at least 0.
            vocab_size: V, even.
            num_pairs: K, pairs and queries of an example, at most V/2 − 1 (the number of keys).
            filler: What stands at positions without query: "random" or "zeros".
            power: a in p(i) ∝ i^(a−1), above 0; small values put queries close to the context.
            train_examples: Examples in the train split.
            validation_examples: Examples in the validation split.
            test_examples: Examples in the test split.

        Raises:
            ValueError: An argument is outside these bounds.
        """
        sizes = {"train": train_examples, "validation": validation_examples, "test": test_examples}
        for split, size in sizes.items():
            if size < 1:
                raise ValueError(f"{split}_examples must be at least 1, got {size}")
        check_length(length)
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        if num_pairs < 1:
            raise ValueError(f"num_pairs must be at least 1, got {num_pairs}")
        if vocab_size < 4 or vocab_size % 2:
            raise ValueError(f"vocab_size must be even and at least 4, got {vocab_size}")
        if num_pairs > vocab_size // 2 - 1:
            raise ValueError(
                f"num_pairs {num_pairs} exceeds the {vocab_size // 2 - 1} keys that vocab_size "
                f"{vocab_size} has (vocab_size/2 - 1)"
            )
        if 4 * num_pairs > length:
            raise ValueError(
                f"length {length} is below the {4 * num_pairs} tokens that num_pairs {num_pairs} "
                "needs (4 num_pairs)"
            )
        if filler not in ("random", "zeros"):
            raise ValueError(f"filler must be 'random' or 'zeros', got {filler!r}")
        if not 0 < power < np.inf:
            raise ValueError(f"power must be positive and finite, got {power}")
        self._seed, self._num_pairs, self._filler, self._power = seed, num_pairs, filler, power
        self._sizes = sizes
        self.spec = TaskSpec(
            name="recall",
            kind="tag",
            vocab_size=vocab_size,
            num_classes=vocab_size,
            max_length=length,
            pad_id=0,
            chance=1 / num_pairs,
            data=f"generated, vocabulary {vocab_size}, {num_pairs} pairs, {filler} filler, power {power:g}",
        )

    def source(self, split: str) -> _RecallSource:
        """Returns the examples of `split`; ValueError for an unknown split."""
        check_split(split)
        slots = (self.spec.max_length - 2 * self._num_pairs) // 2
        return _RecallSource(
            split=split,
            num_examples=self._sizes[split],
            length=self.spec.max_length,
            seed=self._seed,
            vocab_size=self.spec.vocab_size,
            num_pairs=self._num_pairs,
            filler=self._filler,
            slot_times=np.arange(1, slots + 1, dtype=np.float64) ** (1 - self._power),
        )

    def with_length(self, length: int) -> "Recall":
        """Returns the task with sequences of `length` tokens and as many pairs, drawn afresh."""
        return Recall(
            length,
            self._seed,
            vocab_size=self.spec.vocab_size,
            num_pairs=self._num_pairs,
            filler=self._filler,
            power=self._power,
            train_examples=self._sizes["train"],
            validation_examples=self._sizes["validation"],
            test_examples=self._sizes["test"],
        )
