"""Generate text: mlx-lm's three functions with a DFlash draft in them.

Names, arguments and responses are mlx-lm's, so that code which takes its `stream_generate` takes this one;
what is added is `draft_model`, `block_size`, `temp`, `seed` and the statistics. (The module is not called
`generate`: importing it would put a module where the package has a function of that name.)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .arguments import functions, is_whole, one_of, token_ids, whole
from .decode.block_size import AutoBlockSize, BlockSize, FixedBlockSize
from .decode.caches import split_caches
from .decode.drafter import Drafter
from .decode.filters import Filters
from .decode.lookup import PromptLookup, as_drafter
from .decode.loop import Token, decode
from .decode.memory import describe_pair, keep_memory, round_costs
from .decode.sampling import LogitsProcessor, Sampler, TokenPicker
from .decode.session import Session
from .decode.stats import GenerationStats
from .decode.stop import StopStrings
from .decode.text import TextStream
from .device import limits_told
from .draft import DFlashDraftModel
from .pairs.fit import TargetFacts, check_fit
from .prompt import as_ids, encode
from .target import Target


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response, one a token; `stats` is set on the last."""

    stats: GenerationStats | None = None

    def top_logprobs(self, n: int) -> list[tuple[int, float]]:
        """The target's `n` most likely tokens here and their log-probabilities, best first."""
        whole("n", n, 0)
        best = mx.argsort(-self.logprobs.astype(mx.float32))[:n]
        values = self.logprobs[best].astype(mx.float32)
        return list(zip(cast(list[int], best.tolist()), cast(list[float], values.tolist()), strict=True))


def generate_step(
    prompt: mx.array | Sequence[int],
    model: nn.Module,
    draft_model: Any = None,
    *,
    stats: GenerationStats | None = None,
    **options: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Generate token ids; end tokens do not end it.

    Args:
        prompt: `[n]` token ids, at least one.
        model: any mlx-lm model whose caches can be rewound, or any at all without a draft.
        draft_model: a draft of `load_draft`, an object with the `Drafter` protocol, "lookup" (see `PromptLookup`), or
            None to decode plainly.
        stats: rounds are recorded there as they finish.
        options: see `_tokens`.

    Yields:
        (token, log-probabilities `[V]` of the target, whether the draft proposed it).

    Raises:
        TargetError, DraftError: the pair can't be run. ValueError: an option is of another kind or out of range.
    """
    stats = GenerationStats() if stats is None else stats

    def show(token: Token) -> tuple[tuple[int, mx.array, bool], bool]:
        return (token.id, token.logprobs, token.from_draft), False

    yield from _tokens(prompt, model, draft_model, stats, show, **options)


def _as_it_is(token: Token) -> tuple[Any, bool]:
    return token, False


def _tokens(
    prompt: mx.array | Sequence[int],
    model: nn.Module,
    draft_model: Any,
    stats: GenerationStats,
    show: Callable[[Token], tuple[Any, bool]] = _as_it_is,
    *,
    end_tokens: Collection[int] = (),
    max_tokens: int = 256,
    temp: float = 0.0,
    seed: int | None = None,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
    acceptance: str = "match",
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    block_size: int | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    prefill_stops: Collection[int] = (),
    leave_last: bool = False,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: None = None,
    num_draft_tokens: int | None = None,
    lookup: bool = False,
    stream: Any = generation_stream,
    profile: bool = False,
    keep_costs: bool = False,
) -> Generator[Any, None, None]:
    """The token generator behind all three functions.

    Args:
        show: makes of a token what is handed out, and says whether the text ends with it. What an exception breaks off
            in it was not handed out.
        end_tokens: ids that end the text.
        max_tokens: at most so many tokens, the end token included; 0 only feeds the prompt, -1 is no limit.
        temp, seed: see `TokenPicker`; top_p to xtc_special_tokens: see `Filters`; a `sampler` replaces them all.
        acceptance: "match" (the text does not depend on the draft) or "rejection" (see `decode/acceptance.py`).
        block_size: slots of a block, anchor included; None chooses it round by round from measured costs and
            acceptance (plain decoding is one of the choices), 1 decodes plainly.
        num_draft_tokens: mlx-lm's name for block_size - 1.
        lookup: propose by prompt lookup where the text repeats itself, `draft_model` elsewhere.
        prompt_cache: the target's cache entries, then (optionally) the draft's; updated in place and left at
            exactly prompt + emitted tokens. The other arguments are mlx-lm's.
        prefill_stops: lengths of the prompt at which a chunk ends, so that the callback sees the caches there.
        leave_last: leave the caches one token short of that, for whoever feeds the last token to go on from it.
        profile: measure host, draft and verify apart (costs a second sync a round).
        keep_costs: start from the costs and acceptance of earlier processes and keep this one's (see `costs_file`), as
            the commands do. What requests of this process showed is known in any case.
    """
    prompt = as_ids(prompt)
    if input_embeddings is not None:
        raise ValueError("input_embeddings are not supported: a draft needs the tokens")
    whole("max_tokens", max_tokens, -1)
    whole("prefill_step_size", prefill_step_size, 1)
    whole("max_kv_size", max_kv_size, 1, 2**31 - 1, none=True)
    whole("num_draft_tokens", num_draft_tokens, 0, none=True)
    whole("quantized_kv_start", quantized_kv_start, 0)
    one_of("kv_bits", kv_bits, (None, 2, 3, 4, 5, 6, 8))
    one_of("kv_group_size", kv_group_size, (32, 64, 128))
    one_of("acceptance", acceptance, ("match", "rejection"))
    for name, flag in (("lookup", lookup), ("leave_last", leave_last), ("profile", profile)):
        one_of(name, flag, (False, True))
    for name, values in (("end_tokens", end_tokens), ("prefill_stops", prefill_stops)):
        token_ids(name, values)
    functions("logits_processors", logits_processors or ())
    functions("sampler, prompt_progress_callback", [f for f in (sampler, prompt_progress_callback) if f is not None])
    if acceptance == "rejection" and sampler is not None:
        raise ValueError("acceptance 'rejection' needs the distributions; give temp, top_p, ... instead of a sampler")
    filters = Filters(top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, xtc_special_tokens)
    picker = TokenPicker(temp, seed, filters, acceptance == "rejection", sampler, tuple(logits_processors or ()))
    target = Target(model)
    target.check_ids(prompt)
    drafter = None if draft_model is None else as_drafter(draft_model)
    if lookup and not isinstance(drafter, PromptLookup):
        drafter = PromptLookup(drafter)
    if num_draft_tokens is not None and block_size is None and drafter is not None:
        block_size = min(num_draft_tokens + 1, drafter.block_size)
    width = _block_size(drafter, block_size, stats)
    if width == 1:
        drafter = None
    target_cache, draft_cache, held, noise_shift = split_caches(target, drafter, prompt_cache, max_kv_size)
    if kv_bits is not None:
        target.check_quantizable(target_cache, kv_group_size)
    if drafter is not None:
        target.require_rewindable(target_cache)
        target.taps_before_norm = getattr(drafter, "taps_before_norm", False)
        target.check(drafter.target_layer_ids)
        draft = getattr(drafter.draft if isinstance(drafter, PromptLookup) else drafter, "draft", None)
        if isinstance(draft, DFlashDraftModel):
            check_fit(draft.config, TargetFacts.from_model(target), "draft_model")

    def quantize(caches: list[Any]) -> None:
        maybe_quantize_kv_cache(caches, quantized_kv_start, kv_group_size, kv_bits)
        if prompt_cache is not None:
            prompt_cache[: len(caches)] = caches  # it replaces entries, and the caller's list is another one

    session = Session(
        target,
        drafter,
        picker,
        target_cache,
        draft_cache,
        stats,
        held=held,
        noise_shift=noise_shift,
        private=prompt_cache is None,
        stream=stream,
        quantize=quantize,
        profile=profile,
    )
    room = quantized_kv_start if kv_bits else None
    chooser: BlockSize = FixedBlockSize(width)
    if stats.auto:
        way = ["greedy" if temp == 0 else acceptance, *(["processors"] if logits_processors else [])]
        pair = describe_pair(model, drafter, [*way, f"kv {kv_bits}"] if kv_bits else way)
        costs = round_costs(pair, kept=keep_costs)
        beside = isinstance(drafter, PromptLookup)
        chooser = AutoBlockSize(
            width, costs, round_costs(f"{pair}, lookup", costs, keep_costs) if beside else None, temp
        )

    def feed(prompt: mx.array) -> None:
        session.prefill(prompt, prefill_step_size, prompt_progress_callback, prefill_stops)

    started = False

    def first(token: Token) -> tuple[Any, bool]:
        nonlocal started
        shown = show(token)
        if prompt_progress_callback is not None and not started:
            started = True
            prompt_progress_callback(prompt.shape[0], prompt.shape[0])
        return shown

    try:
        with limits_told():
            yield from decode(session, prompt, feed, chooser, max_tokens, first, end_tokens, room, leave_last)
    finally:
        if keep_costs and stats.auto:
            keep_memory()
        if isinstance(chooser, AutoBlockSize) and not stats.draft_off_reason:
            stats.draft_off_reason = chooser.reason or None


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: Any = None,
    *,
    stop: Sequence[str] | None = None,
    stats: GenerationStats | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate text, streamed: one response a token, the last with `finish_reason` and `stats`.

    The texts of all responses join to `tokenizer.decode` of the tokens without the end token.

    Args:
        model, draft_model, options: as in `generate_step`; further options are `max_kv_size`, `prompt_cache`,
            `prefill_step_size`, `kv_bits`, ... as in mlx-lm.
        tokenizer: mlx-lm's wrapper or transformers' tokenizer; its `eos_token_ids` end the text.
        prompt: text, or token ids.
        stop: strings that end the text; neither they nor what follows is shown.
        stats: filled as it goes, for a caller that may stop early; the last response carries it anyway.

    Raises:
        TargetError, DraftError: the pair can't be run. ValueError: an option is of another kind or out of range.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens is 0, but a text ends with its last token; `generate_step` takes 0")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    stats = GenerationStats() if stats is None else stats
    stats.prompt_tokens = ids.shape[0]
    text, stopping = TextStream(tokenizer), StopStrings(stop or ())
    end_tokens = tokenizer.eos_token_ids
    start = time.perf_counter()

    def show(token: Token) -> tuple[GenerationResponse, bool]:
        nonlocal start
        stats.generation_tokens += 1
        now = time.perf_counter()
        if stats.generation_tokens == 1:
            stats.prefill_seconds, start = now - start, now
        stats.generation_seconds = now - start
        stats.peak_memory = mx.get_peak_memory() / 1e9
        ended = token.id in end_tokens
        last = ended or stats.generation_tokens == max_tokens
        shown = stopping.add(("" if ended else text.add(token.id)) + (text.finish() if last else ""))
        stopped = stopping.found is not None
        last = last or stopped
        if last:
            shown += stopping.finish()
        response = GenerationResponse(
            text=shown,
            token=token.id,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=stats.prompt_tokens,
            prompt_tps=stats.prompt_tps,
            generation_tokens=stats.generation_tokens,
            generation_tps=stats.generation_tps,
            peak_memory=stats.peak_memory,
            finish_reason=("stop" if ended or stopped else "length") if last else None,
            stats=stats if last else None,
        )
        return response, last

    with wired_limit(model, [options.get("stream", generation_stream)]):
        yield from _tokens(
            ids, model, draft_model, stats, show, max_tokens=max_tokens, end_tokens=end_tokens, **options
        )


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate the whole text; arguments as in `stream_generate`.

    Args:
        verbose: stream the text to stdout and a summary to stderr.
    """
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None and response.stats is not None:
        print()
        print(response.stats.summary(), file=sys.stderr)
    return text


def _block_size(drafter: Drafter | None, asked: int | None, stats: GenerationStats) -> int:
    if drafter is None:
        if asked is not None and not (is_whole(asked) and asked == 1):
            raise ValueError(f"block_size is {asked}, but there is no draft")
        stats.draft_off_reason = "no draft was given"
        return 1
    whole("the drafter's block_size", drafter.block_size, 1)
    if asked is not None and not (is_whole(asked) and 1 <= asked <= drafter.block_size):
        raise ValueError(
            f"block_size is {asked}, this draft was trained for blocks of 2 to {drafter.block_size} (1: plain)"
        )
    if asked == 1:
        stats.draft_off_reason = "block size 1 is plain decoding"
    stats.auto = asked is None
    stats.block_size = drafter.block_size if asked is None else asked
    return stats.block_size
