"""Memory per GPU in closed form: to serve a model, and to learn with dense Adam, LoRA or LoGRA.

A step passes through four moments, and not everything is alive in each:

    loss      the forward is done and the loss goes backward: saved activations, four arrays [n, V]
    backward  the last block goes backward: with checkpointing it was computed once more
    probe     LoGRA predicts the KL: three arrays [n, V], no saved activations
    step      the update: the sketch has become U in place, beside it is what travels

Memory to learn is what stands all the time plus the largest moment. n tokens of a microbatch, N
GPUs under FSDP, b bytes of the training type, r the rank, V the vocabulary, h hidden, m the MLP's
width, P parameters, P_t those of the trained matrices [d, k]. Weights are float32 masters, which
FSDP gathers in the training type; LoRA's frozen ones are kept in that type alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from logra_lab.errors import InputError
from logra_lab.memory.arch import Arch, Block
from logra_lab.memory.cost import Cost, Term

METHODS = ("adam", "lora", "logra")
NAMES = {"adam": "dense Adam", "lora": "LoRA", "logra": "LoGRA"}
DTYPES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Setup:
    """What the bytes depend on besides the model. `InputError` for what makes no sense.

    Attributes: `tokens` of a microbatch on one GPU, padding included; `fsdp`, GPUs that share the
        training; `dtype` of forward and backward (float32 masters are kept in any case);
        `offload` puts masters, moments and dense gradients into host memory; `sequences` of
        `context` tokens are served at a time, by one GPU.
    """

    rank: int = 256
    fsdp: int = 4
    tokens: int = 4096
    dtype: str = "bfloat16"
    checkpointing: bool = True
    offload: bool = False
    sequences: int = 32
    context: int = 4096

    def __post_init__(self) -> None:
        for name in ("rank", "fsdp", "tokens", "sequences", "context"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} is {value}: expected an integer of 1 or more")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is unknown: expected one of {list(DTYPES)}")

    @property
    def width(self) -> int:
        """Bytes of a number in the training type."""
        return DTYPES[self.dtype]


def learn(arch: Arch, method: str, setup: Setup) -> Cost:
    """Memory per GPU of one training step of `method`, one of `METHODS`.

    Raises `InputError` for an unknown method and for a rank above the smallest input width.
    """
    if method not in METHODS:
        raise InputError(f"method {method!r} is unknown: expected one of {METHODS}")
    smallest = min(layer.k for layer in arch.layers)
    if method != "adam" and setup.rank > smallest:
        raise InputError(
            f"rank {setup.rank} does not fit {arch.name}: expected at most {smallest}, the "
            "smallest input width of a trained matrix"
        )
    terms = [*_held(arch, method, setup), *_activations(arch, method, setup)]
    terms += [*_logits(arch, method, setup), *_moved(arch, method, setup)]
    return Cost(tuple(terms))


def serve(arch: Arch, setup: Setup, *, follow: bool = False) -> Cost:
    """Memory of one GPU that generates: weights, cache of keys and values, working space.

    `follow` adds the float32 copy of the trained matrices with which an engine stays equal to the
    trainer to the bit (`logra_lab.sync.receiver`, mode exact); it may lie in host memory instead.
    """
    b = setup.width
    cached = setup.sequences * setup.context * arch.kv * b
    busy = setup.tokens * b * (2 * arch.hidden + 3 * arch.inner) + 8 * setup.sequences * arch.vocab
    terms = [
        _exact("weights", b * arch.parameters, "b P"),
        Term(
            "cache of keys and values",
            *(cached, 0, cached),
            f"b · {arch.kv:,} · sequences · context, all of them full",
        ),
        Term(
            "working space", *(busy, busy // 2, 2 * busy), "one block's prefill, logits of sampling"
        ),
    ]
    if follow and b < 4:
        text = "4 P_t: updates are applied to it, and its cast is served"
        terms.append(_exact("float32 copy of the trained matrices", 4 * arch.targets, text))
    return Cost(tuple(terms))


def adapters(arch: Arch, rank: int) -> int:
    """Numbers in LoRA's adapters: r (d + k) for each trained matrix."""
    return sum(rank * b.count * sum(x.d + x.k for x in b.layers) for b in arch.blocks)


def saved(block: Block, method: str, setup: Setup) -> int:
    """Bytes a token that one block keeps for backward; the first block keeps one norm less."""
    b, r = setup.width, setup.rank
    kept = b * block.kept + 4 * block.float32
    if method == "adam":
        return kept + b * (block.inputs - block.inputs_kept)
    if method == "logra":
        return kept + b * r * block.sites
    if b == 4:
        return kept + 4 * (block.inputs - block.inputs_kept + r * len(block.layers))
    # peft keeps adapters in float32 and casts the input anew for each of them
    return kept + 4 * sum(layer.k + r for layer in block.layers)


def _exact(name: str, size: float, why: str, *moments: str, host: bool = False) -> Term:
    whole = math.ceil(size)
    return Term(name, whole, whole, whole, why, moments, host)


def _held(arch: Arch, method: str, s: Setup) -> Iterator[Term]:
    """Weights, gradients or sketches, moments: one N-th of each on every GPU."""
    N, P, P_t, r, rows = s.fsdp, arch.parameters, arch.targets, s.rank, arch.rows
    if method == "lora":
        A = adapters(arch, r)
        yield _exact("frozen weights", s.width * P / N, "b P / N", host=s.offload)
        yield _exact("adapters", 4 * A / N, "4 Σr(d + k) / N", host=s.offload)
        yield _exact("gradients of the adapters", 4 * A / N, "4 Σr(d + k) / N", host=s.offload)
        yield _exact("Adam's two moments", 8 * A / N, "8 Σr(d + k) / N", host=s.offload)
        return
    yield _exact("float32 master weights", 4 * P / N, "4 P / N", host=s.offload)
    if method == "adam":
        yield _exact("gradients", 4 * P_t / N, "4 P_t / N, float32", host=s.offload)
        yield _exact("Adam's two moments", 8 * P_t / N, "8 P_t / N", host=s.offload)
        return
    yield _exact("sketches S, then D and U", 4 * rows * r / N, "4 Σd r / N, in one memory")
    yield _exact("row moments", 4 * rows / N, "4 Σd / N")
    whole = rows * (r + 1)
    text = "Σd (r + 1), int8 and exponents: whole on every GPU, and once more while it is gathered"
    own = _exact("the update that travels", whole, text, "step")
    yield own if N == 1 else Term(own.name, own.bytes, own.low, 3 * whole, text, own.moments)
    yield _exact("next row moments", 4 * rows / N, "4 Σd / N", "step")


def _activations(arch: Arch, method: str, s: Setup) -> Iterator[Term]:
    b, n, h, m = s.width, s.tokens, arch.hidden, arch.inner
    blocks = [(n * saved(block, method, s), block) for block in arch.blocks]
    # Padding needs a mask, and with one transformers repeats keys and values for every head.
    padded = [size + n * b * _repeats(block) for size, block in blocks]
    high = [x * block.rough for x, (_, block) in zip(padded, blocks, strict=True)]
    alive, turns = ("loss", "backward"), 2 * b * n * arch.head_dim  # cosines and sines
    if s.checkpointing:
        kept = n * b * h * arch.depth + turns
        text = "n b h blocks: checkpointing keeps a block's input"
        yield Term("saved block inputs", kept, kept, 2 * kept, text, alive)
        one = max(size for size, _ in blocks)
        text = "n (b kept + 4 float32 + inputs, P or both), see memory/arch.py"
        yield Term("one block, recomputed", one, one, math.ceil(max(high)), text, ("backward",))
    else:
        first = n * 4 * (h + 1)  # no gradient goes below the first block: its norm keeps nothing
        every = sum(size * block.count for size, block in blocks) - first + turns
        most = sum(x * block.count for x, (_, block) in zip(high, blocks, strict=True)) + turns
        text = "n Σ (b kept + 4 float32 + inputs, P or both), see memory/arch.py"
        yield Term("saved activations", every, every, math.ceil(most), text, alive)
    yield _exact("saved by the last norm", 4 * n * (h + 1), "4 n (h + 1)", "loss")
    # The MLP goes backward first. Gradients after and before its product, less what was freed.
    flow, text = n * b * (3 * m + h), "n b (3 m + h): the MLP's gradients"
    if method != "logra":
        flow, text = n * b * (2 * m + h), "n b (2 m + h): the MLP's gradients, less down's input"
    yield Term("gradients of activations", flow, flow // 2, 2 * flow, text, ("backward",))


def _repeats(block: Block) -> int:
    """Numbers a token more when keys and values are repeated for every query head."""
    heads = [x for x in block.layers if x.name == "o_proj"]
    return 2 * heads[0].k - block.kv if heads else 0


def _logits(arch: Arch, method: str, s: Setup) -> Iterator[Term]:
    one = 4 * s.tokens * arch.vocab
    yield _exact("logits, float32", one, "4 n V, held by the loop", "loss", "backward")
    text = "3 · 4 n V: log-softmax, the loss's gradient, the logits' gradient"
    yield Term("log-softmax and gradients", 3 * one, 2 * one, 4 * one, text, ("loss",))
    if method == "logra":
        text = "3 · 4 n V of n probe positions: logits ahead, behind, and between"
        yield Term("logits of the probe", 3 * one, 2 * one, 4 * one, text, ("probe",))


def _moved(arch: Arch, method: str, s: Setup) -> Iterator[Term]:
    """What FSDP brings together for a block and sends out again.

    One GPU has whole float32 masters and casts them by autocast, unless they are on the host.
    """
    b, block = s.width, s.width * arch.block_parameters
    sharded = s.fsdp > 1 or s.offload
    casts = b < 4 and method != "lora"
    if sharded or casts:
        root = b * arch.root
        yield Term(
            "gathered weights",
            *(root + 2 * block, root + block, root + 3 * block),
            "b (embedding, head + 2 blocks: one at work, one fetched ahead)",
            ("loss", "backward", "probe"),
        )
    if casts and not sharded and not s.checkpointing:
        rest = block * max(0, arch.depth - 2)
        text = "b (the other blocks): autocast's copies are kept for the gradients of inputs"
        first = max(0, rest - block)  # no gradient goes below the first block
        yield Term("weights cast for backward", rest, first, rest, text, ("loss", "backward"))
    layers, alive = arch.layers, ("backward",)
    if method == "logra":
        if sharded:
            one = 4 * max(layer.d for layer in layers) * s.rank
            text = "2 · 4 d r: whole sketches of two matrices on their way to their owners"
            yield Term("sketches on their way", 2 * one, one, 3 * one, text, alive)
        return
    sizes = [x.d * x.k for x in layers]
    text = "4 d k of the largest matrix: its new gradient, before it is added"
    per_block = max(block.targets for block in arch.blocks)
    if method == "lora":
        sizes = [s.rank * max(x.d, x.k) for x in layers]
        text = "4 r max(d, k): the new gradient of an adapter, before it is added"
        per_block = max(s.rank * sum(x.d + x.k for x in block.layers) for block in arch.blocks)
    if not sharded:  # down's own is made while fewer gradients of activations are there
        one = max(0, 4 * max(sizes) - s.tokens * b * arch.inner)
        yield Term("a new gradient", one, 0, 4 * max(sizes), text, alive)
        return
    sent = (b + 4) * per_block
    text = "(b + 4) a block: its whole gradients, and the float32 buffer that is reduced"
    yield Term("gradients on their way", sent, sent, 2 * sent, text, alive)
