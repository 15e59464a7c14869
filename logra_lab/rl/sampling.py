"""Drawing tokens: counter-based uniform numbers, the inverse CDF, and the sampler of one batch.

The uniform number of row i at position t is a pure function of (key_i, t): Philox4x32-10 with
key = `key_of(key_i)` and counter = (t, 0, 3, 1), 27 and 26 leading bits of output words 0 and 1. A
row's tokens therefore do not depend on the batch it is in, nor on its place there.
"""

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from logra_lab.errors import LograError
from logra_lab.philox import DOMAIN_SAMPLING, SCHEME_VERSION, key_of, philox4x32
from logra_lab.rl.policies import Policy


class NonFiniteLogits(LograError):
    """The model's logits hold NaN or +inf: there is no distribution to sample from."""


def sampling_uniforms(keys: list[str], tokens: int) -> Float64[Tensor, "n tokens"]:
    """Uniform numbers in [0, 1) for n rows and token positions 0 to tokens - 1.

    Row i depends on keys[i] alone. Cost: about 100 elementwise operations on [n, tokens].
    """
    low, high = torch.tensor([key_of(key) for key in keys]).T[..., None]
    position = torch.arange(tokens).expand(len(keys), tokens)
    zero = torch.zeros_like(position)
    counter = torch.stack([position, zero, zero + DOMAIN_SAMPLING, zero + SCHEME_VERSION])
    words = philox4x32(counter, (low, high))
    # 27 bits and 26 bits: every multiple of 2^-53, the spacing of float64 just below 1.
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def sample_inverse_cdf(
    logprobs: Float[Tensor, "n vocab"], uniforms: Float64[Tensor, " n"]
) -> Int64[Tensor, " n"]:
    """The first id whose cumulative probability exceeds the row's uniform number.

    The sum is taken in float64: in float32 a large vocabulary's last ids could not be reached.
    An id of probability 0 is never returned. Rows that hold NaN return an arbitrary valid id.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return ids.clamp_(max=logprobs.shape[1] - 1)


class Sampler(LogitsProcessor):
    """Chooses and records every token of one batch; keeps each row's length and whether it stopped.

    After `generate`: ids and logprobs [rows, limit] (valid up to lengths [rows]), stopped [rows].
    Raises `NonFiniteLogits`. Cost a token: two float32 and one float64 pass over the logits of
    the rows not yet finished.
    """

    def __init__(
        self,
        uniforms: Float64[Tensor, "n limit"] | None,
        rows: int,
        limit: int,
        temperature: float,
        policy: Policy,
        device: torch.device,
    ) -> None:
        self.uniforms = None if uniforms is None else uniforms.to(device)
        self.limit, self.temperature, self.pad_id = limit, temperature, policy.pad_id
        self.eos = torch.tensor(policy.eos_ids, device=device)
        self.ids = torch.full((rows, limit), policy.pad_id, device=device)
        self.logprobs = torch.zeros(rows, limit, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.step = 0

    def _draw(self, scores: Float[Tensor, "n vocab"], rows: Int64[Tensor, " n"]) -> None:
        logprobs = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        if self.uniforms is None:
            ids = logprobs.argmax(-1)
        else:
            ids = sample_inverse_cdf(logprobs, self.uniforms[rows, self.step])
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        # A NaN or +inf anywhere in a row makes its normaliser, and so the chosen value, NaN.
        if not chosen.isfinite().all():
            raise NonFiniteLogits(
                f"logits of token {self.step} are not finite in "
                f"{int((~chosen.isfinite()).sum())} of {len(rows)} rows; the weights hold NaN or "
                "have diverged: go back to the last checkpoint and take smaller steps"
            )
        self.ids[rows, self.step] = ids
        self.logprobs[rows, self.step] = chosen
        self.lengths[rows] += 1
        self.stopped[rows] = torch.isin(ids, self.eos)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores under which the recorded token is the only choice (pad for finished rows)."""
        token = torch.full_like(self.lengths, self.pad_id)
        if self.step < self.limit:  # on some devices generate runs one step past the stop
            rows = (~self.stopped).nonzero()[:, 0]
            if len(rows):
                self._draw(scores if len(rows) == len(scores) else scores[rows], rows)
            token = self.ids[:, self.step]
            self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


class StopWhenSampled(StoppingCriteria):
    """Tells `generate` which rows the sampler has finished."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return self.sampler.stopped | (self.sampler.lengths >= self.sampler.limit)
