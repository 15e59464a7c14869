"""The paper's averages beside the closed form: two different quantities.

Published is the average over a run of a whole training system on four GPUs; its microbatches, its
types and whether it recomputes are not known here. The closed form says what stands all the time
and what is there at the largest moment of a step. An average of one system lies between the two.
"""

from dataclasses import dataclass

from logra_lab.lab.published import PUBLISHED
from logra_lab.memory.arch import Arch
from logra_lab.memory.models import PRESETS
from logra_lab.memory.plan import METHODS, NAMES, Setup, learn

GIB = 2**30
#: Four training GPUs and rank 256 are published; the rest of `Setup` is assumed.
PAPER = Setup(rank=int(PUBLISHED["rank"]), fsdp=4)
_KEYS = {"Qwen2.5-1.5B": "1_5b", "Qwen2.5-7B": "7b", "27B": "27b"}


@dataclass(frozen=True)
class Row:
    """A published average beside ours, in GiB per GPU; `published` is None where there is none."""

    model: str
    method: str
    published: float | None
    standing: float
    peak: float
    low: float
    high: float

    @property
    def out_of_memory(self) -> bool:
        """Whether the paper reports that this did not fit."""
        return (self.model, self.method) == ("27B", NAMES["adam"])

    @property
    def above(self) -> float | None:
        """GiB by which the average exceeds what stands."""
        return None if self.published is None else self.published - self.standing

    @property
    def way(self) -> float | None:
        """How far up from what stands to the peak the average lies: 0 to 1, or beyond."""
        return None if self.above is None else self.above / (self.peak - self.standing)

    @property
    def inside(self) -> bool | None:
        """Whether the average lies between what stands and the upper end of the peak's range."""
        return None if self.published is None else self.standing <= self.published <= self.high

    def explain(self) -> str:
        """What the published number says beside ours, in a sentence."""
        if self.out_of_memory:
            return (
                "published: out of memory at the first optimizer state, on GPUs of "
                f"{PUBLISHED['gpu_gb']:.0f} GB; here {self.standing:.1f} GiB stand all the time"
            )
        if self.published is None:
            return f"no average is published; {self.standing:.1f} GiB stand all the time"
        if self.inside and self.published > self.peak:
            return "above our peak, within its range: not all of their settings are those here"
        if self.inside:
            return (
                f"{self.above:.1f} GiB above what stands, {self.way:.0%} of the way to our peak: "
                "as an average over steps may be"
            )
        side = "below what stands" if self.published < self.standing else "above our range"
        return f"{side}: the systems differ in what they hold, or in their settings"


def rows(names: tuple[str, ...] = tuple(PRESETS), setup: Setup = PAPER) -> list[Row]:
    """The table for some of the presets, all methods."""
    return [_row(PRESETS[name], method, setup) for name in names for method in METHODS]


def _row(arch: Arch, method: str, setup: Setup) -> Row:
    cost = learn(arch, method, setup)
    standing = sum(t.bytes for t in cost.standing())
    sizes = [x / GIB for x in (standing, cost.bytes, cost.low, cost.high)]
    published = PUBLISHED.get(f"gib_{_KEYS[arch.name]}_{method}")
    return Row(arch.name, NAMES[method], published, *sizes)


@dataclass(frozen=True)
class Saving:
    """Dense Adam less LoGRA in GiB per GPU: published, and what our terms allow.

    Attributes: `moments` less sketches, `gradients` as far as they stand, and `projections`, which
        implementations that store every A (float32 and a cast copy) pay for and this one does not.
    """

    model: str
    published: float
    moments: float
    gradients: float
    projections: float

    @property
    def least(self) -> float:
        """Gradients never stand, every A is stored."""
        return self.moments - self.projections

    @property
    def most(self) -> float:
        """Gradients stand all the time, no A is stored."""
        return self.moments + self.gradients


def savings(setup: Setup = PAPER) -> list[Saving]:
    """For the two models of which both averages are published."""
    out = []
    for name, key in list(_KEYS.items())[:2]:
        arch = PRESETS[name]
        published = PUBLISHED[f"gib_{key}_adam"] - PUBLISHED[f"gib_{key}_logra"]
        sketches = 4 * arch.rows * (setup.rank + 1)
        stored = 6 * setup.rank * sum(b.count * x.k for b in arch.blocks for x in b.layers)
        out.append(
            Saving(
                name,
                published,
                moments=(8 * arch.targets - sketches) / setup.fsdp / GIB,
                gradients=4 * arch.targets / setup.fsdp / GIB,
                projections=stored / GIB,
            )
        )
    return out
