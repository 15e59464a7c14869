"""Fused and tensor-parallel layouts against a construction from heads, not from offsets."""

import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.sync.mapping import TARGETS, Geometry, shard, shards, target_paths
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer

# Grouped, single and full KV heads; the third and fourth have heads * head_dim != hidden, as Qwen3
# may; the last three divide by 6, 5 and 7.
SIZES = [
    Geometry(hidden=16, intermediate=24, heads=8, kv_heads=2, head_dim=2),
    Geometry(hidden=16, intermediate=40, heads=8, kv_heads=8, head_dim=2),
    Geometry(hidden=10, intermediate=16, heads=8, kv_heads=4, head_dim=3),
    Geometry(hidden=12, intermediate=8, heads=8, kv_heads=1, head_dim=4),
    Geometry(hidden=6, intermediate=36, heads=12, kv_heads=3, head_dim=2),
    Geometry(hidden=6, intermediate=30, heads=30, kv_heads=15, head_dim=2),
    Geometry(hidden=6, intermediate=42, heads=42, kv_heads=7, head_dim=2),
]


def divides(geometry, size):
    """Whether vLLM's layers accept the sizes (QKVParallelLinear, MergedColumnParallelLinear)."""
    more, fewer = max(geometry.kv_heads, size), min(geometry.kv_heads, size)
    return not (geometry.heads % size or geometry.intermediate % size or more % fewer)


CASES = [(g, size) for g in SIZES for size in range(1, 9) if divides(g, size)]


def test_the_cases_cover_every_size_and_both_ways_of_kv_heads():
    assert {size for _, size in CASES} == set(range(1, 9))
    assert any(size > g.kv_heads > 1 for g, size in CASES)
    assert any(1 < size < g.kv_heads for g, size in CASES)


def weights(geometry, seed=0):
    """A random dense weight for each target; shapes from the definition of the layers."""
    torch.manual_seed(seed)
    g = geometry
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    shapes = {"q_proj": (q, g.hidden), "k_proj": (kv, g.hidden), "v_proj": (kv, g.hidden)}
    shapes |= {"o_proj": (g.hidden, q), "down_proj": (g.hidden, g.intermediate)}
    shapes |= {"gate_proj": (g.intermediate, g.hidden), "up_proj": (g.intermediate, g.hidden)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def fused(w, geometry, rank, size):
    """What rank `rank` holds, head by head (Shoeybi et al. 2019, section 3).

    A rank takes its share of the query heads in order, and the KV heads which those queries
    attend to: query head h reads KV head h // (heads / kv_heads) (Ainslie et al. 2023, GQA).
    """
    g = geometry
    mine = [h for h in range(g.heads) if h * size // g.heads == rank]
    read = sorted({h // (g.heads // g.kv_heads) for h in mine})
    heads = {n: w[n].unflatten(0, (-1, g.head_dim)) for n in ("q_proj", "k_proj", "v_proj")}
    qkv = [heads["q_proj"][mine], heads["k_proj"][read], heads["v_proj"][read]]
    inner = [i for i in range(g.intermediate) if i * size // g.intermediate == rank]
    return {
        "qkv_proj": torch.cat([part.flatten(0, 1) for part in qkv]),
        "gate_up_proj": torch.cat([w["gate_proj"][inner], w["up_proj"][inner]]),
        "o_proj": w["o_proj"].unflatten(1, (-1, g.head_dim))[:, mine].flatten(1),
        "down_proj": w["down_proj"][:, inner],
    }


def parts(geometry, rank, size):
    """{kind: Shard} of block 0."""
    paths = target_paths(1)
    return {s.layer.rsplit(".", 1)[1]: s for s in shards(paths, geometry, rank=rank, size=size)}


@pytest.mark.parametrize(("geometry", "size"), CASES)
def test_slices_put_every_row_where_the_heads_say(geometry, size):
    w = weights(geometry)
    for rank in range(size):
        built = {
            name: torch.full_like(t, torch.nan)
            for name, t in fused(w, geometry, rank, size).items()
        }
        for kind, part in parts(geometry, rank, size).items():
            target = built[part.parameter.split(".")[-2]]
            assert target.shape == part.shape
            assert (part.d, part.k) == w[kind].shape
            assert target[part.place].isnan().all(), "two layers share a place"
            target[part.place] = w[kind][part.rows, part.columns]
        for name, expected in fused(w, geometry, rank, size).items():
            assert torch.equal(built[name], expected), name  # NaN left over would differ as well


@pytest.mark.parametrize(("geometry", "size"), CASES)
def test_updating_shards_equals_sharding_the_updated_whole(geometry, size):
    """W − U A on rows of U and columns of A; integers, so that every order of the sum is exact."""
    w = {name: t.mul(64).round() for name, t in weights(geometry).items()}
    torch.manual_seed(1)
    U = {name: torch.randint(-127, 128, (t.shape[0], 3)).float() for name, t in w.items()}
    A = {name: torch.randint(0, 2, (3, t.shape[1])).float() * 2 - 1 for name, t in w.items()}
    whole = {name: t - U[name] @ A[name] for name, t in w.items()}
    for rank in range(size):
        local = fused(w, geometry, rank, size)
        for kind, part in parts(geometry, rank, size).items():
            product = U[kind][part.rows] @ A[kind][:, part.columns]
            local[part.parameter.split(".")[-2]][part.place] -= product
        expected = fused(whole, geometry, rank, size)
        assert all(torch.equal(local[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("geometry", "size"), CASES)
def test_apply_on_shards_gives_the_bits_of_apply_on_the_whole(geometry, size):
    """The real thing, three updates in a row, on views into the fused parameters."""
    dense = weights(geometry)
    w = {path: dense[path.rsplit(".", 1)[1]] for path in target_paths(1)}
    layers = [ThinLayer(name, *t.shape, name) for name, t in w.items()]

    def local(rank):
        return fused({name.split(".")[-1]: t for name, t in w.items()}, geometry, rank, size)

    ranks = [local(rank) for rank in range(size)]
    for version in range(3):
        torch.manual_seed(version)
        U = torch.randn(sum(x.d for x in layers), 2) * 1e-2
        update = ThinUpdate.round(U, layers, run="r", base=version, seed=5, draw=version)
        apply(update, [Slot.whole(name, t) for name, t in w.items()])
        for rank, held in enumerate(ranks):
            found = parts(geometry, rank, size).values()
            apply(update, [
                Slot(s.layer, held[s.parameter.split(".")[-2]][s.place], s.rows, s.columns)
                for s in found
            ])  # fmt: skip
    for rank, held in enumerate(ranks):
        expected = local(rank)
        assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_the_ranks_together_hold_every_row_and_column_once():
    geometry = SIZES[0]  # 2 KV heads on 4 ranks: each is held twice
    for kind, copies in [("q_proj", 1), ("k_proj", 2), ("v_proj", 2), ("gate_proj", 1),
                         ("up_proj", 1), ("o_proj", 1), ("down_proj", 1)]:  # fmt: skip
        held = torch.zeros(geometry.shape(kind))
        for rank in range(4):
            part = parts(geometry, rank, 4)[kind]
            held[part.rows, part.columns] += 1
        assert torch.equal(held, torch.full_like(held, copies)), kind


def test_names_are_those_of_the_engine_and_only_weights():
    """vLLM 0.32, models/qwen2.py, qwen3.py, llama.py: the names of the fused modules."""
    found = shards(target_paths(2), SIZES[0])
    base = "model.layers.1"
    assert {s.parameter for s in found if s.layer.startswith(base)} == {
        f"{base}.self_attn.qkv_proj.weight",
        f"{base}.self_attn.o_proj.weight",
        f"{base}.mlp.gate_up_proj.weight",
        f"{base}.mlp.down_proj.weight",
    }
    assert len(found) == 14
    assert {s.layer.rsplit(".", 1)[1] for s in found} == set(TARGETS)


@pytest.mark.parametrize("arch", ["Qwen2", "Qwen3", "Llama"])
def test_paths_and_shapes_are_those_of_the_trained_model(arch):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 61}
    config = getattr(transformers, f"{arch}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=6 + 4 * (arch == "Qwen3")
    )
    model = getattr(transformers, f"{arch}ForCausalLM")(config)
    linears = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    head_dim = 10 if arch == "Qwen3" else 6
    geometry = Geometry(hidden=24, intermediate=20, heads=4, kv_heads=2, head_dim=head_dim)
    assert {s.layer: (s.d, s.k) for s in shards(target_paths(2), geometry)} == linears


@pytest.mark.parametrize(
    ("changes", "rank", "size", "words"),
    [
        ({}, 0, 3, "8 query heads cannot be divided among 3"),
        ({"intermediate": 25}, 0, 2, "25 MLP features cannot be divided among 2"),
        ({"kv_heads": 3, "heads": 12}, 0, 2, "3 KV heads can be neither"),
        ({"kv_heads": 3, "heads": 12}, 0, 4, "3 KV heads can be neither"),
        ({"kv_heads": 3}, 0, 1, "8 query heads cannot share 3"),
        ({"head_dim": 0}, 0, 1, "head_dim is 0"),
        ({}, 2, 2, "rank 2 of 2"),
        ({}, -1, 2, "rank -1 of 2"),
        ({}, 0, 0, "rank 0 of 0"),
    ],
)
def test_impossible_divisions_are_named(changes, rank, size, words):
    geometry = Geometry(**(vars(SIZES[0]) | changes))
    with pytest.raises(InputError, match=words):
        shard("model.layers.0.self_attn.q_proj", geometry, rank=rank, size=size)


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.x"])
def test_what_is_no_target_has_no_place(layer):
    with pytest.raises(InputError, match="is no target"):
        shard(layer, SIZES[0])


def test_partial_targets_keep_their_order_and_unknown_ones_are_refused():
    assert target_paths(1, ("down_proj", "q_proj")) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    ]
    with pytest.raises(InputError, match="embed"):
        target_paths(1, ("embed",))
