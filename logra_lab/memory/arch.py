"""What of a model decides how much memory it takes: its matrices, and what its blocks keep.

Numbers a token that backward needs, of one block as transformers 5.19 computes it with PyTorch's
fused attention (h hidden, q and v the widths of queries and of keys, m the MLP's width):

    2 norms            2 (h + 1)          float32: input and reciprocal RMS
    attention          2 q + 2 v          queries and keys (rotated), values, output
    its softmax        heads              float32: log-sum-exp
    MLP                3 m                gate before SiLU, after it, up
    dense weights      h + h + m          inputs of q k v, of gate and up, of down (o's is above)

`measure` counts them in a running model; tests hold the two together.
"""

from dataclasses import dataclass
from typing import Any

from logra_lab.errors import InputError
from logra_lab.sync.wire import ThinLayer

#: Model types whose block is the one above.
SUPPORTED = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Block:
    """`count` blocks of one kind.

    Attributes: `layers` are the trained matrices. Per token, `kept` numbers in the training type
        and `float32` numbers in float32 stay for backward whatever the method; `inputs_kept` of
        them are also an input of a trained matrix. `kv` numbers go to the cache of keys and values.
        `rough` is how many times as much it may be where the count is an estimate.
    """

    count: int
    layers: tuple[ThinLayer, ...]
    kept: int
    float32: int
    inputs_kept: int
    kv: int
    rough: float = 1.0

    @property
    def targets(self) -> int:
        """Numbers in the trained matrices."""
        return sum(layer.d * layer.k for layer in self.layers)

    @property
    def rows(self) -> int:
        """Σd: rows of all sketches, one below the other."""
        return sum(layer.d for layer in self.layers)

    @property
    def sites(self) -> int:
        """Distinct inputs of trained matrices: what is projected once."""
        return len({layer.site for layer in self.layers})

    @property
    def inputs(self) -> int:
        """Numbers a token in the distinct inputs of trained matrices."""
        return sum({layer.site: layer.k for layer in self.layers}.values())


@dataclass(frozen=True)
class Arch:
    """A model's sizes. `parameters` counts tied embeddings once; `source` says where it is from."""

    name: str
    source: str
    hidden: int
    inner: int
    head_dim: int
    vocab: int
    tied: bool
    parameters: int
    blocks: tuple[Block, ...]

    @property
    def depth(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def targets(self) -> int:
        """Numbers in the trained matrices."""
        return sum(block.count * block.targets for block in self.blocks)

    @property
    def rows(self) -> int:
        """Σd over the trained matrices."""
        return sum(block.count * block.rows for block in self.blocks)

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embedding, head (unless tied), last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one block; the mean where kinds differ."""
        return (self.parameters - self.root) // self.depth

    @property
    def kv(self) -> int:
        """Numbers a token in the cache of keys and values, of all blocks."""
        return sum(block.count * block.kv for block in self.blocks)

    @property
    def layers(self) -> list[ThinLayer]:
        """The trained matrices of one block of each kind."""
        return [layer for block in self.blocks for layer in block.layers]


def from_config(config: Any, name: str) -> Arch:
    """The sizes of a `transformers` configuration; `InputError` for another kind of block."""
    kind = getattr(config, "model_type", None)
    if kind not in SUPPORTED:
        raise InputError(
            f"{name!r} is of type {kind!r}: its blocks' activations have no closed form here; "
            f"expected one of {', '.join(SUPPORTED)}, or a preset"
        )
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv = (config.num_key_value_heads or heads) * head_dim
    depth, vocab, q = config.num_hidden_layers, config.vocab_size, heads * head_dim
    bias = q + 2 * kv if kind == "qwen2" else 0
    if getattr(config, "attention_bias", False):
        bias = q + 2 * kv + hidden
    if getattr(config, "mlp_bias", False):
        bias += 2 * inner + hidden
    tied = bool(config.tie_word_embeddings)
    block = block_of(depth, hidden, inner, q, kv, heads)
    parameters = depth * (block.targets + bias + 2 * hidden)
    parameters += vocab * hidden * (1 if tied else 2) + hidden
    return Arch(name, "its config.json", hidden, inner, head_dim, vocab, tied, parameters, (block,))


def block_of(count: int, hidden: int, inner: int, q: int, kv: int, heads: int) -> Block:
    """The block of the module's table; q and kv are the widths of queries and of keys."""
    rows = (
        ("q_proj", q, hidden, "q_proj"),
        ("k_proj", kv, hidden, "q_proj"),
        ("v_proj", kv, hidden, "q_proj"),
        ("o_proj", hidden, q, "o_proj"),
        ("gate_proj", inner, hidden, "gate_proj"),
        ("up_proj", inner, hidden, "gate_proj"),
        ("down_proj", hidden, inner, "down_proj"),
    )
    return Block(
        count=count,
        layers=tuple(ThinLayer(*row) for row in rows),
        kept=2 * q + 2 * kv + 3 * inner,
        float32=2 * (hidden + 1) + heads,
        inputs_kept=q,
        kv=2 * kv,
    )
