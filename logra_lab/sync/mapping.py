"""Where a rank of an inference engine keeps the rows and columns of a trained matrix.

Engines fuse q/k/v into one parameter and gate/up into another, and cut both over tensor-parallel
ranks: column-parallel layers (q, k, v, gate, up) by outputs, row-parallel ones (o, down) by inputs
(Shoeybi et al., "Megatron-LM", 2019, section 3). A rank therefore needs some rows of U and some
columns of A, and these functions say which, from head counts and sizes alone:

    fused parameter [rows here, columns here] -= U[shard.rows] · A[:, shard.columns]

KV heads that are fewer than the ranks are replicated: several ranks hold the same head. Biases,
norms (q_norm and k_norm of Qwen3 too), embeddings and padded vocabularies are no targets and never
appear. Nothing here imports an engine; the plugin checks the shapes against the real one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from logra_lab.errors import InputError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Llama-like decoder (Llama, Qwen2, Qwen3), as in its `config.json`.

    `head_dim` is independent of `hidden // heads`: in Qwen3, q_proj is [heads · head_dim, hidden].
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def shape(self, kind: str) -> tuple[int, int]:
        """(d, k) of the whole matrix of a target kind such as "q_proj"; raises `InputError`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        if kind not in shapes:
            raise InputError(f"layer kind {kind!r} is no target; expected one of {TARGETS}")
        return shapes[kind]


@dataclass(frozen=True)
class Shard:
    """One target matrix [d, k] as one rank holds it.

    Attributes:
        layer: the trainer's module path, `model.layers.0.self_attn.q_proj`.
        d, k: shape of the whole matrix.
        rows, columns: the part of it (rows of U, columns of A) that lives on this rank.
        parameter: the engine's parameter, `model.layers.0.self_attn.qkv_proj.weight`.
        shape: shape of that parameter on this rank.
        place: rows of the parameter that hold the part; its columns are always all of them.
    """

    layer: str
    d: int
    k: int
    rows: slice
    columns: slice
    parameter: str
    shape: tuple[int, int]
    place: slice


def shard(layer: str, geometry: Geometry, *, rank: int = 0, size: int = 1) -> Shard:
    """The part of one target that tensor-parallel rank `rank` of `size` holds, and where.

    The layer's kind is the last part of its path. Raises `InputError` for a path that is no
    target, a rank outside the group, and sizes that the group cannot divide.
    """
    _check(geometry, rank, size)
    block, _, kind = layer.rpartition(".")
    d, k = geometry.shape(kind)
    head = geometry.head_dim
    heads = geometry.heads // size
    kv_heads = max(1, geometry.kv_heads // size)
    inner = geometry.intermediate // size
    whole_d, whole_k = slice(0, d), slice(0, k)

    if kind in ("o_proj", "down_proj"):
        width = heads * head if kind == "o_proj" else inner
        columns = slice(rank * width, (rank + 1) * width)
        return Shard(layer, d, k, whole_d, columns, f"{layer}.weight", (d, width), whole_d)

    if kind in ("gate_proj", "up_proj"):
        rows = slice(rank * inner, (rank + 1) * inner)
        start = 0 if kind == "gate_proj" else inner
        parameter, shape = f"{block}.gate_up_proj.weight", (2 * inner, k)
        place = slice(start, start + inner)
        return Shard(layer, d, k, rows, whole_k, parameter, shape, place)

    # Query heads come first, then the keys', then the values'. With more ranks than KV heads,
    # `copies` neighbouring ranks hold one head.
    copies = max(1, size // geometry.kv_heads)
    sizes = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
    starts = {"q_proj": 0, "k_proj": sizes["q_proj"], "v_proj": sizes["q_proj"] + sizes["k_proj"]}
    length = sizes[kind]
    part = rank if kind == "q_proj" else rank // copies
    rows = slice(part * length, (part + 1) * length)
    place = slice(starts[kind], starts[kind] + length)
    parameter, shape = f"{block}.qkv_proj.weight", (sum(sizes.values()), k)
    return Shard(layer, d, k, rows, whole_k, parameter, shape, place)


def shards(
    layers: Iterable[str], geometry: Geometry, *, rank: int = 0, size: int = 1
) -> list[Shard]:
    """`shard` for every layer, in the order given."""
    return [shard(layer, geometry, rank=rank, size=size) for layer in layers]


def target_paths(
    blocks: int, targets: Sequence[str] = TARGETS, prefix: str = "model.layers"
) -> list[str]:
    """Module paths of the targets of a decoder, block by block, as `transformers` names them."""
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        raise InputError(f"targets {unknown} are unknown; expected some of {TARGETS}")
    part = {kind: "mlp" if kind in TARGETS[4:] else "self_attn" for kind in TARGETS}
    ordered = [kind for kind in TARGETS if kind in targets]
    return [f"{prefix}.{b}.{part[kind]}.{kind}" for b in range(blocks) for kind in ordered]


def _check(geometry: Geometry, rank: int, size: int) -> None:
    """Refuse what cannot be divided, with the numbers and what would divide."""
    for name, value in vars(geometry).items():
        if value < 1:
            raise InputError(f"geometry: {name} is {value}, expected at least 1")
    if not 0 <= rank < size:
        raise InputError(f"tensor-parallel rank {rank} of {size}: expected 0 ≤ rank < size")
    if geometry.heads % geometry.kv_heads:
        raise InputError(
            f"{geometry.heads} query heads cannot share {geometry.kv_heads} KV heads evenly; "
            "expected a multiple: check the model's config.json"
        )
    for name, value in (("query heads", geometry.heads), ("MLP features", geometry.intermediate)):
        if value % size:
            raise InputError(
                f"{value} {name} cannot be divided among {size} tensor-parallel ranks; choose a "
                f"size that divides {value}"
            )
    more, fewer = max(geometry.kv_heads, size), min(geometry.kv_heads, size)
    if more % fewer:
        raise InputError(
            f"{geometry.kv_heads} KV heads can be neither divided among nor replicated over "
            f"{size} tensor-parallel ranks; choose a size that divides {geometry.kv_heads} or "
            f"that it divides"
        )
