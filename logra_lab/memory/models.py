"""Which models can be planned: presets, a folder with a config.json, an id on the hub."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from logra_lab.errors import InputError
from logra_lab.memory.arch import Arch, Block, block_of, from_config
from logra_lab.sync.shapes import MODELS


def _qwen25(name: str, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> Arch:
    head = hidden // heads
    shape = MODELS[name]
    return Arch(
        name=name,
        source="the model's config.json; arXiv:2412.15115, table 1",
        hidden=hidden,
        inner=inner,
        head_dim=head,
        vocab=vocab,
        tied=name == "Qwen2.5-1.5B",
        parameters=shape.parameters,
        blocks=(block_of(28, hidden, inner, hidden, kv_heads * head, heads),),
    )


def _qwen35_27b() -> Arch:
    """One block in four has gated attention, three have gated linear attention (Gated DeltaNet).

    What their token mixers keep is estimated from the widths of what passes through them; kernels
    for linear attention differ widely, so the range is wide.
    """
    hidden, inner, heads, kv, q = 5120, 17408, 24, 4 * 256, 24 * 256
    keys, values = 16 * 128, 48 * 128
    full = block_of(16, hidden, inner, q, kv, heads)
    ordinary = {layer.name: layer for layer in full.layers}
    gated = replace(ordinary["q_proj"], d=2 * q)  # queries and the gate of the output
    mlp = tuple(ordinary[name] for name in ("gate_proj", "up_proj", "down_proj"))
    mixer = 2 * (2 * keys + values) + 2 * values + 3 * values  # conv in and out, q k, out and gate
    return Arch(
        name="27B",
        source="Qwen3.5-27B without its vision tower: an assumption, the paper says only 27B",
        hidden=hidden,
        inner=inner,
        head_dim=256,
        vocab=248320,
        tied=False,
        parameters=MODELS["27B"].parameters,
        blocks=(
            replace(
                full,
                layers=(gated, *full.layers[1:]),
                kept=full.kept + 2 * q,  # the gate, and the attention's output before it
                float32=full.float32 + q + kv,  # norms of queries and keys
                inputs_kept=0,
                rough=1.5,
            ),
            Block(48, mlp, 3 * inner + mixer, 2 * (hidden + 1) + values, 0, 0, rough=2.0),
        ),
    )


PRESETS: dict[str, Arch] = {
    "Qwen2.5-1.5B": _qwen25("Qwen2.5-1.5B", 1536, 8960, 12, 2, 151936),
    "Qwen2.5-7B": _qwen25("Qwen2.5-7B", 3584, 18944, 28, 4, 152064),
    "27B": _qwen35_27b(),
}
#: Presets by their ids on the hub: the same numbers, and no network needed.
_ON_HUB = {f"Qwen/{name}": name for name in PRESETS if name.startswith("Qwen")}


def find(name: str) -> Arch:
    """The sizes of a preset, of `small`, of a model folder, or of a model on the hub.

    Only configurations are read, no weights. Raises `InputError` that says what could not be found.
    """
    name = _ON_HUB.get(name, name)
    if name in PRESETS:
        return PRESETS[name]
    folder = Path(name)
    if name == "small":
        folder = Path(__file__).resolve().parents[2] / "data" / "small_policy"
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"model {name!r}: the folder has no config.json; name a model folder")
    if not folder.is_dir() and (name.count("/") > 1 or name[:1] in (".", "/")):
        raise InputError(f"model {name!r}: no such folder; name a folder that holds a config.json")
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise InputError(
            f"reading {name!r} needs transformers: pip install 'logra-lab[rl]'; without it there "
            f"are the presets {', '.join(PRESETS)}"
        ) from error
    local = folder.is_dir()
    try:
        config = AutoConfig.from_pretrained(folder if local else name, local_files_only=local)
    except (
        *(OSError, ValueError, KeyError, TypeError, ArithmeticError),  # of values, ZeroDivision too
        StrictDataclassError,
    ) as error:
        raise InputError(_not_found(name, local, error)) from error
    return from_config(config, name)


def _not_found(name: str, local: bool, error: Exception) -> str:
    if local:
        reason = " ".join(str(error).split()) or repr(error)
        return f"model {name!r}: its config.json cannot be read: {reason:.200}"
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    near = get_close_matches(name.rpartition("/")[2], PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"model {name!r} is no preset and no folder, and the hub gave no configuration of that id "
        f"(is there a network connection?): {reason} {hint}Presets: {', '.join(PRESETS)}"
    )
