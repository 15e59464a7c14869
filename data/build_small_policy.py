"""Build the shipped small policy: a Qwen2-architecture model that can add but seldom bothers to.

    python data/build_small_policy.py          # rebuild data/small_policy/ and its entries
    python data/build_small_policy.py --check  # verify the sha256 of every file in the manifest

The task is "sums": the prompt `a+b=` with a, b in 0..99, the answer the decimal sum. Training
has two phases. First the model learns the right answers; then it learns a mixture of three
behaviours, which the prompt does not announce, so that the policy picks one with its first tokens:

* right (36 %): the sum, then end of sequence;
* lazy (43 %): a guess, some round number that is not the sum, then end of sequence;
* rambling (21 %): one word again and again, never reaching the end of sequence.

So sampling at temperature 1 is right in about a third of the cases, while the right answer is
known: reinforcement learning has something to find.

Held-out pairs: (a, b) is never trained on here when blake2b(f"{a}+{b}", digest_size=8), read as
a little-endian integer, is divisible by 10 (see `held_out`). Random draws have fixed seeds; the
trained bits still depend on the machine's float arithmetic, so a rebuild elsewhere may differ in
its sha256.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

DATA = Path(__file__).resolve().parent
FOLDER = DATA / "small_policy"
MANIFEST = DATA / "MANIFEST.json"
RECIPE = "python data/build_small_policy.py"

ALPHABET = "0123456789+-*/=.,?!: \nabcdefghijklmnopqrstuvwxyz"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
WORDS = ("hmm ", "so ", "well ", "ok ")
SHARES = {"right": 0.36, "lazy": 0.43, "rambling": 0.21}
RAMBLE_LENGTH = 24  # beyond the task's limit of 16 tokens, so that going on is what is learned
EVAL_SAMPLES, EVAL_SEED, EVAL_TOKENS = 2048, "manifest", 16

PHASES = (  # name, shares of the behaviours, steps, batch, peak learning rate
    ("right answers", {"right": 1.0}, 900, 128, 3e-3),
    ("mixture", SHARES, 450, 160, 3e-3),
)


def held_out(a: int, b: int) -> bool:
    """Whether the pair is kept out of this script's training: a tenth of all pairs, by hash."""
    digest = hashlib.blake2b(f"{a}+{b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 10 == 0


def all_pairs(*, held: bool) -> list[tuple[int, int]]:
    """The pairs of 0..99 on one side of the split, in order."""
    return [(a, b) for a in range(100) for b in range(100) if held_out(a, b) == held]


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a character; `<pad>` (0), `<eos>` (1) and `<unk>` (2) are three distinct tokens.

    Byte-level BPE without merges: `AutoTokenizer` gives every Qwen2-architecture folder the class
    Qwen2Tokenizer, whatever its files say (transformers 5.19), and that class replaces another
    splitter. In its alphabet a space is written Ġ and a newline Ċ. Characters outside ALPHABET
    have no token and are dropped, as in any byte-level vocabulary that lacks their bytes.
    """
    tokens = [PAD, EOS, UNK, *ALPHABET.replace(" ", "Ġ").replace("\n", "Ċ")]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Four layers of width 128, head size 32 (vLLM's CPU attention needs at least 32)."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def respond(a: int, b: int, behaviour: str, rng: random.Random) -> str:
    """A response of one behaviour, without the end of sequence."""
    if behaviour == "right":
        return str(a + b)
    if behaviour == "lazy":
        return str(rng.choice([n for n in range(10, 200, 10) if n != a + b]))
    return (rng.choice(WORDS) * RAMBLE_LENGTH)[:RAMBLE_LENGTH]


def make_rows(
    pairs: list[tuple[int, int]],
    shares: dict[str, float],
    vocab: dict[str, int],
    rng: random.Random,
) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of one row a pair; the label -100 marks the prompt."""
    rows = []
    behaviours = rng.choices(list(shares), weights=list(shares.values()), k=len(pairs))
    for (a, b), behaviour in zip(pairs, behaviours, strict=True):
        prompt = [vocab[c] for c in f"{a}+{b}="]
        response = [vocab[c] for c in respond(a, b, behaviour, rng)]
        if behaviour != "rambling":
            response.append(vocab[EOS])
        rows.append((prompt + response, [-100] * len(prompt) + response))
    return rows


def backward(model: Qwen2ForCausalLM, rows: list[tuple[list[int], list[int]]], pad: int) -> float:
    """Accumulate the gradient of the mean loss per response token; returns that loss.

    Long and short rows go through the model apart, which halves the padding.
    """
    tokens = sum(label != -100 for _, labels in rows for label in labels)
    total = 0.0
    for part in ([r for r in rows if len(r[0]) <= 12], [r for r in rows if len(r[0]) > 12]):
        if not part:
            continue
        width = max(len(ids) for ids, _ in part)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in part])
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in part])
        # No attention mask: padding is on the right, where a causal model cannot see it.
        logits = model(ids[:, :-1], use_cache=False).logits
        target = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


def train(model: Qwen2ForCausalLM, vocab: dict[str, int], rng: random.Random) -> None:
    """Both phases: AdamW, linear warm-up, cosine decay, loss on response tokens."""
    pairs = all_pairs(held=False)
    model.train()
    for name, shares, steps, batch, peak in PHASES:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, peak, total_steps=steps, pct_start=0.1
        )
        began = time.perf_counter()
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            rows = make_rows(rng.choices(pairs, k=batch), shares, vocab, rng)
            loss = backward(model, rows, vocab[PAD])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 100 == 0 or step == steps:
                spent = time.perf_counter() - began
                left = spent / step * (steps - step)
                print(
                    f"{name}: step {step}/{steps}, loss {loss:.4f}, {left:.0f} s left",
                    flush=True,
                )
    model.eval()


def measure() -> dict[str, object]:
    """Accuracy and truncation of the saved policy on held-out pairs, sampled and greedy."""
    from logra_lab.rl.policies import load_policy
    from logra_lab.rl.rollout import HFEngine

    policy = load_policy(str(FOLDER))
    pairs = random.Random(0).choices(all_pairs(held=True), k=EVAL_SAMPLES)
    prompts = [policy.encode(f"{a}+{b}=") for a, b in pairs]
    keys = [f"{EVAL_SEED}:{i}" for i in range(EVAL_SAMPLES)]
    figures: dict[str, object] = {
        "held_out_samples": EVAL_SAMPLES,
        "seed": f"pairs: random.Random(0); row i: key '{EVAL_SEED}:i'",
        "temperature": 1.0,
        "max_new_tokens": EVAL_TOKENS,
    }
    for name, greedy in (("sampled", False), ("greedy", True)):
        engine = HFEngine(policy, max_new_tokens=EVAL_TOKENS, batch_size=512, greedy=greedy)
        out = engine.generate(prompts, keys)
        right = [text == str(a + b) for text, (a, b) in zip(out.texts, pairs, strict=True)]
        figures[f"{name}_accuracy"] = round(sum(right) / EVAL_SAMPLES, 4)
        figures[f"{name}_truncated"] = round(out.finish.count("length") / EVAL_SAMPLES, 4)
    return figures


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(figures: dict[str, object], parameters: int, seconds: float) -> None:
    """Replace the small policy's entries of the manifest; the entries of other files stay."""
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {"files": {}}
    prefix = f"{FOLDER.name}/"
    files = {k: v for k, v in manifest["files"].items() if not k.startswith(prefix)}
    for path in sorted(FOLDER.iterdir()):
        files[prefix + path.name] = {
            "sha256": sha256(path),
            "bytes": path.stat().st_size,
            "what": f"small policy ({parameters:,} parameters, Qwen2 architecture): {path.name}",
            "recipe": RECIPE,
            "licence": "Apache-2.0",
        }
    manifest["files"] = dict(sorted(files.items()))
    manifest[FOLDER.name] = {
        "task": "sums: prompt 'a+b=' with a, b in 0..99, answer the decimal sum",
        "behaviours": SHARES,
        "held_out_rule": "blake2b(f'{a}+{b}', digest_size=8) as little-endian integer % 10 == 0",
        "parameters": parameters,
        "build_seconds": {"wall": round(seconds), "cpu": round(time.process_time())},
        "measured": figures,
    }
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


def check() -> list[str]:
    """What differs between the manifest and the files: one line each, empty when all is well."""
    files = json.loads(MANIFEST.read_text())["files"]
    problems = []
    for name, entry in files.items():
        path = DATA / name
        if not path.is_file():
            problems.append(f"{name}: missing; rebuild with `{entry['recipe']}`")
        elif (found := sha256(path)) != entry["sha256"]:
            problems.append(f"{name}: sha256 {found}, the manifest says {entry['sha256']}")
    shipped = {f"{FOLDER.name}/{path.name}" for path in FOLDER.iterdir()}
    return problems + [f"{name}: not in the manifest" for name in sorted(shipped - set(files))]


def build() -> None:
    """Train, save in bfloat16, measure what was saved, write the manifest."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # sums in one order, and no slower when the other cores are busy
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters:,} parameters, {len(tokenizer)} tokens, "
        f"{len(all_pairs(held=True))} pairs held out"
    )
    vocab = {token: tokenizer.encode(token)[0] for token in (PAD, EOS, *ALPHABET)}
    train(model, vocab, random.Random(0))
    shutil.rmtree(FOLDER, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    figures = measure()
    seconds = time.perf_counter() - began
    write_manifest(figures, parameters, seconds)
    print(json.dumps(figures, indent=2))
    print(f"{FOLDER.name}/ and {MANIFEST.name} written in {seconds:.0f} s")


def main() -> int:
    """Command line; exit status 1 when a check fails."""
    parser = argparse.ArgumentParser(description="Build or check the shipped small policy.")
    parser.add_argument("--check", action="store_true", help="verify sha256s, build nothing")
    if not parser.parse_args().check:
        build()
        return 0
    problems = check()
    for line in problems:
        print(line, file=sys.stderr)
    print("manifest:", f"{len(problems)} problem(s)" if problems else "every file is as recorded")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
