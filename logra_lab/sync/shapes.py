"""Shapes of published models, for what an update of one weighs: nothing is loaded or downloaded.

Numbers are those of the models' `config.json` (hidden and intermediate size, heads, vocabulary).
Qwen2.5 and its sizes: arXiv:2412.15115, table 1. The 27B model is Qwen3.5-27B, whose blocks have
ordinary attention one time in four and linear attention otherwise; its vision tower is left out.
"""

from dataclasses import dataclass

import torch

from logra_lab.errors import InputError
from logra_lab.philox import SCHEME_VERSION
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import WIRES, ThinLayer


@dataclass(frozen=True)
class ModelShape:
    """The linear layers of a model that updates hold, and its size.

    Attributes: `parameters` of the language model, embeddings that are tied counted once;
    `layers` in the order of the model, with the sites of shared inputs.
    """

    name: str
    parameters: int
    layers: tuple[ThinLayer, ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(d, k) of every layer, as `payload_bytes` takes them."""
        return [(layer.d, layer.k) for layer in self.layers]

    def update(self, rank: int, wire: str = "int8") -> ThinUpdate:
        """An update of this model whose numbers are all zero: of the true size in every byte.

        Cost: Σd·(r + 1) bytes for int8. Raises `InputError` for a rank above the smallest k.
        """
        if not 1 <= rank <= min(layer.k for layer in self.layers):
            raise InputError(f"rank {rank} does not fit {self.name}: expected 1 to its smallest k")
        rows = sum(layer.d for layer in self.layers)
        return ThinUpdate(
            run="0" * 12,  # as long as a real id
            base=0,
            version=1,
            seed=0,
            draw=1,
            rank=rank,
            wire=wire,
            kind="sign",
            scheme=SCHEME_VERSION,
            layers=self.layers,
            values=torch.zeros(rows, rank, dtype=WIRES[wire]),
            exponents=torch.zeros(rows, dtype=torch.int8) if wire == "int8" else None,
        )


def _attention(hidden: int, q: int, kv: int, o: int) -> list[tuple[str, int, int, str]]:
    """(name, d, k, first reader of the same input); `o` is the width of the heads together."""
    first = "self_attn.q_proj"
    return [
        (first, q, hidden, first),
        ("self_attn.k_proj", kv, hidden, first),
        ("self_attn.v_proj", kv, hidden, first),
        ("self_attn.o_proj", hidden, o, "self_attn.o_proj"),
    ]


def _linear_attention(hidden: int, qkv: int, v: int) -> list[tuple[str, int, int, str]]:
    first = "linear_attn.in_proj_qkv"
    return [
        (first, qkv, hidden, first),
        ("linear_attn.in_proj_z", v, hidden, first),
        ("linear_attn.out_proj", hidden, v, "linear_attn.out_proj"),
    ]


def _mlp(hidden: int, inner: int) -> list[tuple[str, int, int, str]]:
    return [
        ("mlp.gate_proj", inner, hidden, "mlp.gate_proj"),
        ("mlp.up_proj", inner, hidden, "mlp.gate_proj"),
        ("mlp.down_proj", hidden, inner, "mlp.down_proj"),
    ]


def _shape(name: str, parameters: int, blocks: list[list[tuple[str, int, int, str]]]) -> ModelShape:
    layers = [
        ThinLayer(f"model.layers.{i}.{path}", d, k, f"model.layers.{i}.{first}")
        for i, block in enumerate(blocks)
        for path, d, k, first in block
    ]
    return ModelShape(name, parameters, tuple(layers))


def _qwen2(name: str, parameters: int, hidden: int, inner: int, kv: int, blocks: int) -> ModelShape:
    block = _attention(hidden, hidden, kv, hidden) + _mlp(hidden, inner)
    return _shape(name, parameters, [block] * blocks)


def _qwen35_27b(name: str, *, linear: bool) -> ModelShape:
    hidden, heads, kv_heads, head = 5120, 24, 4, 256
    keys, values = 16 * 128, 48 * 128  # of linear attention
    mlp = _mlp(hidden, 17408)
    # q_proj makes queries and the gate of the output, hence the factor 2.
    full = _attention(hidden, 2 * heads * head, kv_heads * head, heads * head) + mlp
    other = (_linear_attention(hidden, 2 * keys + values, values) if linear else []) + mlp
    return _shape(name, 26_895_998_464, [other, other, other, full] * 16)


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen2("Qwen2.5-1.5B", 1_543_714_304, 1536, 8960, 2 * 128, 28),
        _qwen2("Qwen2.5-7B", 7_615_616_512, 3584, 18944, 4 * 128, 28),
        _qwen35_27b("27B", linear=False),  # the seven kinds of targets
        _qwen35_27b("27B with linear attention", linear=True),
    )
}
