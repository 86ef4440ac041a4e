"""How a job's tokens are picked: the same alone and in a batch, since the noise of a token belongs to its position."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.server import _make_logits_processors

from ..decode.filters import Filters
from ..decode.sampling import LogitsProcessor, Sampler, TokenPicker
from .job import Job


def filters(job: Job, tokenizer: Any) -> dict[str, Any]:
    """What the job asks for, as options of `generate_step` and arguments of `Filters`."""
    sampling = job.args.sampling
    return {
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "xtc_special_tokens": [*tokenizer.encode("\n", add_special_tokens=False), *tokenizer.eos_token_ids],
    }


def processors(job: Job) -> list[LogitsProcessor]:
    """Penalties and biases of the job; each is given all tokens so far."""
    return list(_make_logits_processors(job.args))


def row(job: Job, tokenizer: Any) -> tuple[Sampler | None, list[LogitsProcessor]]:
    """Sampler and processors of the job for mlx-lm's batch generator; None is greedy."""
    picker = TokenPicker(job.args.sampling.temperature, job.args.seed, Filters(**filters(job, tokenizer)))
    if not picker.seeded:
        return None, processors(job)
    seen = Seen(picker)
    return seen.pick, [*processors(job), seen.note]


class Seen:
    """A row's logits on their way from its last processor to its sampler.

    The sampler alone is given log-probabilities in the model's dtype and no position; the processors are given both.
    """

    def __init__(self, picker: TokenPicker):
        self.picker = picker

    def note(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.position, self.logits = tokens.shape[0], logits
        return logits

    def pick(self, logprobs: mx.array) -> mx.array:
        """`[1]`, of `logprobs` `[1, V]`."""
        return self.picker.pick(self.logits, self.picker.noise(self.position, 1, logprobs.shape[-1]))[0]
