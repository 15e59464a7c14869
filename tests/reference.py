"""What the tests of the primitives compare with: written from definitions, sharing no code."""

import copy
import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

LLM_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def philox(counter, key):
    """Philox4x32-10 on Python integers, from figure 2 and section 3.3 of Salmon et al., SC 2011.

    A round multiplies words 0 and 2; the high halves, keyed and crossed, become words 2 and 0.
    """
    x = list(counter)
    k = list(key)
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * x[0], 2**32)
        hi1, lo1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [hi1 ^ x[1] ^ k[0], lo1, hi0 ^ x[3] ^ k[1], lo0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def sign(i, j, *, seed, draw, path):
    """Sign of A[i, j] by the contract (section 1 of the method): one element, no vectors."""
    digest = hashlib.blake2b(f"{seed}:{draw}:{path}".encode(), digest_size=8).digest()
    low = sum(byte << (8 * n) for n, byte in enumerate(digest[:4]))
    high = sum(byte << (8 * n) for n, byte in enumerate(digest[4:]))
    word = philox((j, i // 128, 0, 1), (low, high))[(i % 128) // 32]
    return 1 if (word >> (i % 32)) & 1 else -1


def matrix(r, k, *, seed, draw, path, dtype=torch.float64):
    """A [r, k], element by element."""
    rows = [[sign(i, j, seed=seed, draw=draw, path=path) for j in range(k)] for i in range(r)]
    return torch.tensor(rows, dtype=dtype) / math.sqrt(r)


class Block(nn.Module):
    """A pre-norm decoder block in plain torch; unlike Hugging Face's, float64 throughout."""

    def __init__(self, k, inner):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(k, k), nn.Linear(k, k)
        self.v_proj, self.o_proj = nn.Linear(k, k), nn.Linear(k, k)
        self.gate_proj, self.up_proj = nn.Linear(k, inner), nn.Linear(k, inner)
        self.down_proj = nn.Linear(inner, k)
        self.norm1, self.norm2 = nn.LayerNorm(k), nn.LayerNorm(k)

    def forward(self, x):
        h = self.norm1(x)
        heads = [p(h).unflatten(-1, (2, -1)).transpose(1, 2) for p in self._qkv]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))

    @property
    def _qkv(self):
        return self.q_proj, self.k_proj, self.v_proj


class Decoder(nn.Module):
    """Token ids [b, n] → logits [b, n, vocabulary]."""

    def __init__(self, k=12, inner=20, layers=2, vocabulary=31):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, k)
        self.blocks = nn.ModuleList(Block(k, inner) for _ in range(layers))
        self.head = nn.Linear(k, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder(seed=0, dtype=torch.float64, **sizes):
    torch.manual_seed(seed)
    return Decoder(**sizes).to(dtype)


def tiny_llm(arch, seed=0, **settings):
    """A random Hugging Face causal LM of a real architecture, large enough to be nonlinear."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if arch == "Qwen3":
        sizes["head_dim"] = 8
    torch.manual_seed(seed)
    config = getattr(transformers, f"{arch}Config")(**sizes | settings)
    model = getattr(transformers, f"{arch}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model.eval()


def dense_gradients(model, run, targets=LLM_TARGETS):
    """{path: G [d, k]} by ordinary autograd on a copy of `model`; call before a sketch is on it."""
    twin = copy.deepcopy(model)
    twin.requires_grad_(True)
    run(twin)
    named = twin.named_modules()
    return {n: m.weight.grad for n, m in named if {n, n.rsplit(".", 1)[-1]} & set(targets)}


def inside(mode, func, args, kwargs):
    """func(*args, **kwargs) for a dispatch mode, which looks into the library's own operators too.

    torch shows a mode an operator as one call, whatever tensors it makes on its way.
    """
    from logra_lab import operators, rowadam
    from logra_lab.sync import operator

    bodies = {f"logra_lab::{n}": getattr(operators, f"_{n}")._init_fn for n in ("project", "gram")}
    bodies |= {"logra_lab::apply": operator._apply}
    bodies |= {"logra_lab::row_adam_": rowadam._row_adam_._init_fn}
    body = bodies.get(func._schema.name)
    if body is None:
        return func(*args, **(kwargs or {}))
    with mode:
        return body(*args, **(kwargs or {}))
