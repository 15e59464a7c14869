"""A memory plan as a table of named terms, and what they come to at each moment of a step."""

import math
from dataclasses import dataclass
from typing import Any

#: See `plan`, which fills the table.
MOMENTS = ("loss", "backward", "probe", "step")

#: What the terms are made of, for figures: kind → names.
KINDS = {
    "weights": ("float32 master weights", "frozen weights", "adapters", "weights"),
    "gradients or sketches": (
        "gradients",
        "gradients of the adapters",
        "sketches S, then D and U",
        "the update that travels",
        "a new gradient",
    ),
    "moments": ("Adam's two moments", "row moments", "next row moments"),
    "activations": (
        "saved block inputs",
        "one block, recomputed",
        "saved activations",
        "saved by the last norm",
        "gradients of activations",
    ),
    "logits": ("logits, float32", "log-softmax and gradients", "logits of the probe"),
    "in transit": (
        "gathered weights",
        "weights cast for backward",
        "gradients on their way",
        "sketches on their way",
    ),
}

#: Share of what comes and goes that a caching allocator holds beyond it: an assumption.
FRAGMENTATION = 0.1
#: CUDA context, NCCL and library workspaces, outside any allocator: an assumption, in bytes.
CONTEXT = 2**30


@dataclass(frozen=True)
class Term:
    """One named share of the memory.

    Attributes: `low` ≤ `bytes` ≤ `high`, all equal where the arithmetic is exact; `moments` in
        which it is alive, () for always; `host` for memory of the host; `why`, the formula.
    """

    name: str
    bytes: int
    low: int
    high: int
    why: str
    moments: tuple[str, ...] = ()
    host: bool = False


@dataclass(frozen=True)
class Cost:
    """Named terms, and what they come to."""

    terms: tuple[Term, ...]

    def standing(self) -> list[Term]:
        """What is there all the time, on the GPU."""
        return [t for t in self.terms if not t.moments and not t.host]

    def at(self, moment: str) -> list[Term]:
        """What is on the GPU at a moment."""
        return [t for t in self.terms if not t.host and (not t.moments or moment in t.moments)]

    @property
    def peak(self) -> str:
        """The moment at which most is there."""
        return max(MOMENTS, key=lambda m: sum(t.bytes for t in self.at(m)))

    @property
    def bytes(self) -> int:
        """At the peak."""
        return sum(t.bytes for t in self.at(self.peak))

    @property
    def low(self) -> int:
        return max(sum(t.low for t in self.at(m)) for m in MOMENTS)

    @property
    def high(self) -> int:
        """With the upper end of every range, the allocator's share, and what lies outside it."""
        stands = sum(t.high for t in self.standing())
        moving = max(sum(t.high for t in self.at(m)) for m in MOMENTS) - stands
        return math.ceil(stands + (1 + FRAGMENTATION) * moving + CONTEXT)

    @property
    def limit(self) -> Term:
        """The largest term at the peak: what to make smaller first."""
        return max(self.at(self.peak), key=lambda t: t.bytes)

    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by the kinds of `KINDS`."""
        there = {t.name: t.bytes for t in self.at(self.peak)}
        return {kind: sum(there.get(name, 0) for name in names) for kind, names in KINDS.items()}

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return sum(t.bytes for t in self.terms if t.host)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the totals and the terms in bytes."""
        return {
            "bytes": self.bytes,
            "low": self.low,
            "high": self.high,
            "standing": sum(t.bytes for t in self.standing()),
            "host": self.host,
            "peak": self.peak if any(t.moments for t in self.terms) else "always",
            "limit": self.limit.name,
            "terms": [
                {
                    "name": t.name,
                    "bytes": t.bytes,
                    "low": t.low,
                    "high": t.high,
                    "moments": list(t.moments) or "always",
                    "host": t.host,
                    "why": t.why,
                }
                for t in self.terms
            ],
        }
