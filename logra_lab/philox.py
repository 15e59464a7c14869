"""Random numbers as a pure function of a text and four counters: Philox4x32-10.

Nothing is stored and nothing is drawn in sequence, so every process, device and slice gets the same
numbers. The words of a counter are (index, index, domain, scheme version); the key comes from a
text. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

SCHEME_VERSION = 1
# Third counter word: which stream of random numbers a call belongs to.
DOMAIN_SIGNS, DOMAIN_ROUNDING, DOMAIN_GAUSSIAN, DOMAIN_SAMPLING = 0, 1, 2, 3

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def key_of(text: str) -> tuple[int, int]:
    """Philox key of a text: 8 bytes of BLAKE2b as two little-endian words, low word first."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(
    counter: Int64[Tensor, "4 *n"] | Sequence[Tensor | int], key: tuple[int | Tensor, int | Tensor]
) -> Int64[Tensor, "4 *n"]:
    """Philox4x32-10: four random 32-bit words for each 128-bit counter.

    The counter's four words are a tensor, or tensors and integers that broadcast to [*n].
    Words are unsigned 32-bit values held in int64, since torch's unsigned types lack the
    arithmetic; a product's upper half survives the signed wrap-around. The key words are integers
    or tensors that broadcast against the counters. Cost: about 100 elementwise operations.
    """
    return torch.stack(_philox(counter, key))


def _philox(counter: Any, key: tuple[Any, Any]) -> list[Tensor]:
    """The same, word by word.

    Words 1 and 3 keep what lies above their 32 bits until it is masked in another word: xor does
    not carry, and a word is multiplied only after it was masked.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1 & _MASK, c2, c3 & _MASK]


def rounding_words(
    text: str, rows: slice, rank: int, device: torch.device | str = "cpu"
) -> Int64[Tensor, "rows r"]:
    """32 random bits for each entry of some rows of a [d, r] factor: stochastic rounding.

    Entry (row, c) is output word c % 4 at counter (row, c // 4, 1, 1) under the key of `text`.
    """
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    quad = torch.arange(-(-rank // 4), device=device)
    words = _philox((row, quad, DOMAIN_ROUNDING, SCHEME_VERSION), key_of(text))
    return torch.stack(words, dim=-1).flatten(1)[:, :rank]


def stream(domain: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The last two counter words of a domain, in the shape of the first two."""
    return torch.full_like(like, domain), torch.full_like(like, SCHEME_VERSION)
