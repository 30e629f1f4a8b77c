"""English text for a character model: the topics of Python's own documentation, from the Python that runs."""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
from collections import Counter
from dataclasses import dataclass

import torch

TEST_SHARE = 10  # the last of so many parts of the text is kept for the test


class NoText(RuntimeError):
    """This Python came without the text, as some distributions leave pydoc_data out."""


@dataclass(frozen=True)
class Corpus:
    """Characters as numbers [n] on the CPU, the part that is trained on and the part that is not, and what they are.

    `entropy` is that of single characters of the test part, bits: what a model reaches that knows their frequencies
    there and nothing else. `digest` is the SHA-256 of the text, which differs from Python to Python.
    """

    train: torch.Tensor
    test: torch.Tensor
    symbols: str
    entropy: float
    digest: str


@functools.cache
def corpus() -> Corpus:
    """Return the distinct paragraphs of pydoc_data.topics, the last tenth for the test; raises NoText.

    Topics share paragraphs, so each is taken once: otherwise the test would hold text that was trained on.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise NoText(f"this Python has no pydoc_data.topics: {error}") from error
    paragraphs = dict.fromkeys(part.strip("\n") for name in sorted(topics) for part in topics[name].split("\n\n"))
    text = "\n\n".join(paragraphs)
    symbols = "".join(sorted(set(text)))
    number = {symbol: index for index, symbol in enumerate(symbols)}
    data = torch.tensor([number[symbol] for symbol in text])
    border = len(text) - len(text) // TEST_SHARE
    return Corpus(
        data[:border], data[border:], symbols, entropy(text[border:]), hashlib.sha256(text.encode()).hexdigest()
    )


def entropy(text: str) -> float:
    """Return bits per character of a source that draws the characters of `text` independently, by their frequency."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)
