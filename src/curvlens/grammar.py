"""A small language that the package can write itself: sentences of a grammar, word by word.

    sentence → subject verb object [place] .        "the old dog sees a bird near the river ."
    chatter  → subject says that sentence

Number agrees ("the dogs see"), and an adjective or a place is optional, so that a sentence has structure that a model
can learn and choices that it cannot. Thirty-odd words; the token 0 ends a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

NOUNS = ("dog", "bird", "child", "king", "river", "tree", "stone", "house")
VERBS = ("see", "find", "like", "follow", "watch")
ADJECTIVES = ("old", "small", "red", "quiet")
PLACES = ("near", "under", "behind")
WORDS = (
    ".",
    "the",
    "a",
    "that",
    "say",
    "says",
    *NOUNS,
    *(f"{noun}s" for noun in NOUNS),
    *VERBS,
    *(f"{verb}s" for verb in VERBS),
    *ADJECTIVES,
    *PLACES,
)
VOCABULARY = len(WORDS)
INDEX = {word: number for number, word in enumerate(WORDS)}
LENGTH = 24


def sentence(generator: torch.Generator) -> list[str]:
    """The words of one sentence, its full stop included."""
    words, plural = _nouns(generator)
    if _chance(0.15, generator):
        return [*words, "say" if plural else "says", "that", *sentence(generator)]
    verb = _choice(VERBS, generator)
    words = [*words, verb if plural else f"{verb}s", *_nouns(generator)[0]]
    if _chance(0.3, generator):
        words += [_choice(PLACES, generator), *_nouns(generator)[0]]
    return [*words, "."]


def stream(size: int = 32, length: int = LENGTH, seed: int = 0) -> Iterator[Tensor]:
    """Token ids `[size, length]` without end, each row running text; the same seed gives the same text."""
    generator = torch.Generator().manual_seed(seed)
    left: list[int] = []
    while True:
        while len(left) < size * length:
            left += [INDEX[word] for word in sentence(generator)]
        yield torch.tensor(left[: size * length]).view(size, length)
        left = left[size * length :]


def batches(count: int, size: int = 32, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    """The first batches of the stream."""
    return list(islice(stream(size, length, seed), count))


def text(ids: Tensor) -> str:
    """The words of token ids `[length]`."""
    return " ".join(WORDS[number] for number in ids.tolist())


def _nouns(generator: torch.Generator) -> tuple[list[str], bool]:
    """A noun with article and perhaps an adjective, and whether it is plural."""
    plural = _chance(0.4, generator)
    article = "the" if plural or _chance(0.5, generator) else "a"
    adjective = [_choice(ADJECTIVES, generator)] if _chance(0.35, generator) else []
    noun = _choice(NOUNS, generator)
    return [article, *adjective, f"{noun}s" if plural else noun], plural


def _chance(probability: float, generator: torch.Generator) -> bool:
    return bool(torch.rand((), generator=generator) < probability)


def _choice(words: tuple[str, ...], generator: torch.Generator) -> str:
    return words[int(torch.randint(len(words), (), generator=generator))]
