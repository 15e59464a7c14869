"""PPO with verifiable rewards: advantage, token batches, the clipped loss.

One response per prompt, no critic, no group, no division by a standard deviation:

    L = −Σ_tokens min(ρ_t A, clip(ρ_t, 1 ± ε) A) / N,    ρ_t = exp(logp_t − logp_rollout,t)

with N the generated tokens of the judged responses in the whole batch, fixed before the first
microbatch, so that L does not depend on how the batch is cut or padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.ranks import Ranks
from logra_lab.rl.outcomes import Score
from logra_lab.rl.prefix import common_prefix, prefix_cache
from logra_lab.rl.rollout import Rollout


@dataclass
class RewardBaseline:
    """b_t: bias-corrected EMA of *earlier* batches' mean rewards; the first batch uses its own."""

    decay: float = 0.9
    ema: float = 0.0
    count: int = 0

    def value(self, batch_mean: float) -> float:
        return self.ema / (1 - self.decay**self.count) if self.count else batch_mean

    def update(self, batch_mean: float) -> None:
        """Let the baseline see a batch; call it after the step was taken, and only then."""
        self.ema = self.decay * self.ema + (1 - self.decay) * batch_mean
        self.count += 1


@dataclass(frozen=True)
class Sample:
    """One judged response: what the loss needs of it."""

    prompt: list[int]
    response: list[int]
    logprobs: Tensor
    finish: str
    advantage: float


def judged_samples(rollout: Rollout, scores: Sequence[Score], baseline: float) -> list[Sample]:
    """Responses with a reward; timeouts and errors (reward None, not 0.0) are left out.

    Raises `InputError` when ids and log-probabilities of a response differ in number.
    """
    samples = []
    for i, score in enumerate(scores):
        ids, logprobs = rollout.response_ids[i], rollout.logprobs[i]
        if len(ids) != len(logprobs):
            raise InputError(
                f"response {i} has {len(ids)} token ids but {len(logprobs)} log-probabilities: "
                "the engine must return one for each id"
            )
        if score.reward is not None and ids:
            advantage = score.reward - baseline
            samples.append(
                Sample(rollout.prompt_ids[i], ids, logprobs, rollout.finish[i], advantage)
            )
    return samples


@dataclass(frozen=True)
class TokenBatch:
    """Prompts left-padded, responses right-padded; masks come from lengths, never from ids."""

    input_ids: Int[Tensor, "b T"]
    attention_mask: Int[Tensor, "b T"]
    position_ids: Int[Tensor, "b T"]
    mask: Bool[Tensor, "b L"]  # the response tokens
    labels: Int[Tensor, "n"]  # the response tokens' ids, rows of `mask` in order
    logprobs: Float[Tensor, "n"]  # the rollout's
    advantages: Float[Tensor, "n"]
    complete: Bool[Tensor, "n"]  # token of a response that ended by itself
    prefix: int = 0  # leading columns that are equal in all rows and computed once

    def logits(self, model: torch.nn.Module) -> Float[Tensor, "n V"]:
        """Logits that predict the response tokens, in float32 or wider."""
        n, cache = self.prefix, None
        if n:
            cache = prefix_cache(model, self.input_ids[0, :n].tolist(), len(self.input_ids))
        out = model(
            input_ids=self.input_ids[:, n:],
            attention_mask=self.attention_mask,
            position_ids=self.position_ids[:, n:],
            past_key_values=cache,
            logits_to_keep=self.mask.shape[1] + 1,
            use_cache=cache is not None,
        ).logits
        picked = out[:, :-1][self.mask]
        return picked if picked.dtype == torch.float64 else picked.float()


def token_batch(
    samples: Sequence[Sample],
    pad_id: int,
    device: torch.device | str = "cpu",
    *,
    share_prefix: bool = True,
) -> TokenBatch:
    """Pad samples into one batch: common prefix, padding, rest of the prompt, response, padding.

    `share_prefix=False` computes it in every row (activation checkpointing allows no cache; for
    models with windows or recurrent layers see `prefix.can_share`).
    """
    prefix = common_prefix([s.prompt for s in samples]) if share_prefix else 0
    left = max(len(s.prompt) for s in samples)
    right = max(len(s.response) for s in samples)
    ids = torch.full((len(samples), left + right), pad_id)
    attention = torch.zeros_like(ids)
    for row, s in enumerate(samples):
        start, stop = left - len(s.prompt) + prefix, left + len(s.response)
        ids[row, :prefix] = torch.tensor(s.prompt[:prefix])
        ids[row, start:stop] = torch.tensor(s.prompt[prefix:] + s.response)
        attention[row, :prefix] = 1
        attention[row, start:stop] = 1
    mask = attention[:, left:].bool()
    lengths = torch.tensor([len(s.response) for s in samples])

    def per_token(values: list[float] | list[bool]) -> Tensor:
        return torch.tensor(values).repeat_interleave(lengths).to(device)

    return TokenBatch(
        input_ids=ids.to(device),
        attention_mask=attention.to(device),
        position_ids=(attention.cumsum(1) - 1).clamp_min(0).to(device),
        mask=mask.to(device),
        labels=ids[:, left:][mask].to(device),
        logprobs=torch.cat([s.logprobs for s in samples]).to(device),
        advantages=per_token([s.advantage for s in samples]),
        complete=per_token([s.finish == "stop" for s in samples]),
        prefix=prefix,
    )


def microbatches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Cut a batch, sorted by length, into pieces of at most `max_tokens` padded tokens.

    A single longer sample is a piece of its own.
    """
    order = sorted(samples, key=lambda s: (len(s.response), len(s.prompt)))
    pieces: list[list[Sample]] = []
    left = right = 0
    for s in order:
        left, right = max(left, len(s.prompt)), max(right, len(s.response))
        if pieces and (len(pieces[-1]) + 1) * (left + right) <= max_tokens:
            pieces[-1].append(s)
        else:
            pieces.append([s])
            left, right = len(s.prompt), len(s.response)
    return pieces


@dataclass
class LossStats:
    """Sums over the tokens of a batch, for the step's record."""

    tokens: int = 0
    loss: float = 0.0
    clipped: int = 0
    ratio_max: float = 0.0
    entropy: float = 0.0
    gap: float = 0.0
    complete: int = 0

    def over(self, ranks: Ranks) -> "LossStats":
        """The same of all ranks' tokens."""
        tokens, loss, clipped, entropy, gap, complete = ranks.totals(
            self.tokens, self.loss, self.clipped, self.entropy, self.gap, self.complete
        )
        largest = ranks.largest(self.ratio_max)
        return LossStats(int(tokens), loss, int(clipped), largest, entropy, gap, int(complete))

    def to_dict(self) -> dict[str, float | None]:
        return {
            "loss": self.loss,
            "clip_share": self.clipped / max(self.tokens, 1),
            "ratio_max": self.ratio_max,
            "entropy": self.entropy / max(self.tokens, 1),
            "logprob_gap": self.gap / self.complete if self.complete else None,
        }


def ppo_loss(
    logits: Float[Tensor, "n V"],
    batch: TokenBatch,
    *,
    normaliser: int,
    temperature: float,
    clip: float,
    stats: LossStats | None = None,
) -> Float[Tensor, ""]:
    """This microbatch's share of L. `temperature` divides logits, as in the rollout."""
    scaled = logits if temperature == 1 else logits / temperature
    logp = -F.cross_entropy(scaled, batch.labels, reduction="none")
    ratio = torch.exp(logp - batch.logprobs)
    A = batch.advantages
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip, 1 + clip) * A
    loss = -torch.minimum(unclipped, clipped).sum() / normaliser
    if stats is not None:
        with torch.no_grad():
            gap = (batch.logprobs - logp)[batch.complete]
            stats.tokens += len(logp)
            stats.loss += loss.item()
            stats.clipped += int((clipped < unclipped).sum())
            if len(ratio):
                stats.ratio_max = max(stats.ratio_max, ratio.max().item())
            stats.entropy += entropy(scaled).sum().item()
            stats.gap += gap.sum().item()
            stats.complete += gap.numel()
    return loss


def entropy(logits: Float[Tensor, "n V"]) -> Float[Tensor, "n"]:
    """Entropy of softmax(logits) in nats, some rows at a time: temporaries of a few MiB."""
    rows = max(1, 2**20 // logits.shape[-1])
    return torch.cat([torch.special.entr(torch.softmax(z, -1)).sum(-1) for z in logits.split(rows)])
