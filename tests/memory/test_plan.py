"""The closed forms against the same sums written out by hand, and how they scale."""

from dataclasses import replace

import pytest

from logra_lab.errors import InputError
from logra_lab.memory.models import PRESETS
from logra_lab.memory.plan import METHODS, Setup, learn, serve
from logra_lab.memory.published import rows, savings

BIG = PRESETS["Qwen2.5-7B"]
GIB = 2**30
# Qwen2.5-7B by its config.json: one block's trained matrices, d and k.
SHAPES = [(3584, 3584)] * 2 + [(512, 3584)] * 2 + [(18944, 3584)] * 2 + [(3584, 18944)]
P, P_t = 7_615_616_512, 28 * sum(d * k for d, k in SHAPES)
ROWS = 28 * sum(d for d, _ in SHAPES)


def terms(method: str, setup: Setup) -> dict[str, int]:
    return {term.name: term.bytes for term in learn(BIG, method, setup).terms}


def test_what_stands_at_7b_is_the_sum_written_out() -> None:
    four = Setup(rank=256, fsdp=4)
    adam, lora, logra = (terms(method, four) for method in METHODS)
    assert adam["float32 master weights"] == P
    assert adam["gradients"] == P_t
    assert adam["Adam's two moments"] == 2 * P_t
    # method.md: 14 GB of bfloat16 weights, 56 GB of moments (of all parameters)
    assert 4 * lora["frozen weights"] == 2 * P
    assert pytest.approx(61, abs=5) == 8 * P / 1e9
    adapters = 28 * sum(256 * (d + k) for d, k in SHAPES)
    assert lora["adapters"] == lora["gradients of the adapters"] == adapters
    assert lora["Adam's two moments"] == 2 * adapters
    assert logra["sketches S, then D and U"] == ROWS * 256
    assert logra["row moments"] == ROWS
    assert logra["the update that travels"] == ROWS * 257  # bench sync: 0.357 GB


def test_each_choice_moves_its_own_terms_and_no_others() -> None:
    base = Setup(rank=64, fsdp=4, tokens=1024)
    changed = {
        "rank": {"sketches S, then D and U", "the update that travels", "sketches on their way"}
        | {"one block, recomputed"},
        "tokens": {"one block, recomputed", "saved block inputs", "saved by the last norm"}
        | {"gradients of activations", "logits, float32", "log-softmax and gradients"}
        | {"logits of the probe"},
        "fsdp": {"float32 master weights", "sketches S, then D and U", "row moments"}
        | {"next row moments"},
    }
    before = terms("logra", base)
    for name, moved in changed.items():
        after = terms("logra", replace(base, **{name: 2 * getattr(base, name)}))
        assert {term for term in before if after[term] != before[term]} == moved
        for term in moved - {"one block, recomputed", "the update that travels"}:
            assert after[term] * (2 if name == "fsdp" else 1) == pytest.approx(
                before[term] * (1 if name == "fsdp" else 2), rel=1e-9
            )


def test_checkpointing_offload_and_one_process_take_away_what_they_should() -> None:
    setup = Setup(tokens=4096)
    kept = learn(BIG, "logra", replace(setup, checkpointing=False))
    names = {term.name for term in kept.terms}
    assert "saved activations" in names
    assert "one block, recomputed" not in names
    assert kept.bytes > learn(BIG, "logra", setup).bytes
    offloaded = learn(BIG, "adam", replace(setup, offload=True))
    assert offloaded.standing() == []
    assert offloaded.host == P + P_t + 2 * P_t
    alone = terms("logra", replace(setup, fsdp=1, dtype="float32"))
    assert not {"gathered weights", "sketches on their way"} & alone.keys()


@pytest.mark.parametrize("method", METHODS)
def test_weights_on_the_host_are_brought_to_one_gpu_too_and_in_float32_as_well(method: str) -> None:
    """FSDP copies a block from the host whatever the number of GPUs and the type."""
    for dtype, b in (("bfloat16", 2), ("float32", 4)):
        alone = terms(method, Setup(fsdp=1, offload=True, dtype=dtype))
        many = terms(method, Setup(fsdp=4, offload=True, dtype=dtype))
        block = (P - 2 * 152064 * 3584 - 3584) // 28
        root = 2 * 152064 * 3584 + 3584
        assert alone["gathered weights"] == many["gathered weights"] == b * (root + 2 * block)


def test_one_gpu_that_keeps_activations_keeps_a_bfloat16_copy_of_every_block() -> None:
    whole = Setup(fsdp=1, checkpointing=False)
    for method in ("adam", "logra"):
        found = terms(method, whole)
        assert found["gathered weights"] + found["weights cast for backward"] == 2 * P
        cost = learn(BIG, method, whole)
        assert sum(cost.kinds().values()) == cost.bytes  # figures have it too
    copies = "weights cast for backward"
    for other in ({"dtype": "float32"}, {"checkpointing": True}, {"offload": True}, {"fsdp": 2}):
        assert copies not in terms("logra", replace(whole, **other))
    assert copies not in terms("lora", whole)  # its frozen weights are in that type already


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PRESETS)
def test_totals_are_those_of_the_terms_and_lie_in_their_range(name: str, method: str) -> None:
    cost = learn(PRESETS[name], method, Setup())
    at = {t.name: t for t in cost.at(cost.peak)}
    assert cost.bytes == sum(t.bytes for t in at.values())
    assert cost.limit.bytes == max(t.bytes for t in at.values())
    assert cost.low <= cost.bytes < cost.high
    assert sum(cost.kinds().values()) == cost.bytes  # a term of no kind would lack in figures
    assert all(t.low <= t.bytes <= t.high for t in cost.terms)
    # A GPU's context and the allocator's share are in the range, not in the estimate.
    assert cost.high >= sum(t.high for t in at.values()) + GIB


def test_serving_is_weights_and_a_full_cache_and_an_exact_engine_keeps_float32_beside() -> None:
    setup = Setup(sequences=16, context=2048)
    found = {term.name: term.bytes for term in serve(BIG, setup, follow=True).terms}
    assert found["weights"] == 2 * P
    assert found["cache of keys and values"] == 16 * 2048 * 28 * 2 * 512 * 2
    assert found["float32 copy of the trained matrices"] == 4 * P_t
    alone = serve(BIG, setup)
    assert serve(BIG, setup, follow=True).bytes - alone.bytes == 4 * P_t


def test_published_averages_lie_between_what_stands_and_the_range_of_the_peak() -> None:
    table = {(row.model, row.method): row for row in rows()}
    averages = {
        ("Qwen2.5-1.5B", "dense Adam"): 9.18,
        ("Qwen2.5-1.5B", "LoGRA"): 7.18,
        ("Qwen2.5-7B", "dense Adam"): 31.82,
        ("Qwen2.5-7B", "LoGRA"): 17.29,
        ("27B", "LoGRA"): 51.5,
    }  # method.md
    for key, value in averages.items():
        assert table[key].published == value
        assert table[key].inside, key
        assert table[key].standing < value < table[key].high
    # Published: out of memory at the first optimizer state, on 80 GB, which masters, gradients and
    # moments of four ranks alone exceed.
    adam = table["27B", "dense Adam"]
    assert adam.published is None
    assert adam.standing * GIB > 80e9
    assert "out of memory" in adam.explain()


def test_published_savings_lie_between_moments_less_stored_projections_and_all_gradients() -> None:
    for saving, published in zip(savings(), (9.18 - 7.18, 31.82 - 17.29), strict=True):
        assert saving.published == pytest.approx(published)
        assert saving.least < published < saving.most
    # Σk·r over the seven matrices, float32 and bfloat16: design.md says about 1.7 GiB at 7B.
    stored = 28 * 256 * 6 * (6 * 3584 + 18944) / GIB
    assert savings()[1].projections == pytest.approx(stored)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"rank": 0}, "rank is 0"), ({"tokens": -1}, "tokens is -1"), ({"dtype": "fp8"}, "'fp8'")],
)
def test_settings_without_sense_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Setup(**changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at most 3584"):
        learn(BIG, "logra", Setup(rank=4096))
    with pytest.raises(InputError, match="galore"):
        learn(BIG, "galore", Setup())
