"""One job alone, with DFlash where there is a draft. Runs in the engine's thread; knows no HTTP and no batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..api import generate_step
from ..decode import as_drafter
from ..decode.sampling import LogitsProcessor
from .cache import CacheStore, Hit
from .errors import ClientGone
from .job import Job, Piece, Progress
from .picking import filters, processors
from .provider import Provider
from .scoring import score


class _HandOver(Exception):
    """Raised out of the prefill: the job goes on in a batch."""


class Alone:
    """Runs a job to its end, or until another one could share a batch with it.

    Args:
        others_wait: asked after every token and every chunk of the prompt.
        stopping: whether the server is going down.
    """

    def __init__(
        self,
        provider: Provider,
        store: CacheStore,
        stream: mx.Stream,
        others_wait: Callable[[], bool],
        stopping: Callable[[], bool],
    ):
        self.provider, self.store, self.stream = provider, store, stream
        self.others_wait, self.stopping = others_wait, stopping

    def drafts(self, job: Job) -> bool:
        """Whether this job would run with the draft."""
        return self.provider.draft_model is not None and self.pinned(job) != 1

    def pinned(self, job: Job) -> int | None:
        """The block that the request or the command line asks for; None where each round chooses."""
        return job.block_size or self.provider.pinned

    def run(self, job: Job, start: Hit | None = None) -> Hit | None:
        """Run the job; its last piece is sent when the caches are settled and the figures complete.

        Args:
            start: caches of a batch that it comes from; by default the store is asked.

        Returns:
            The caches to go on from in a batch, or None when it is done.

        Raises:
            ClientGone: nobody waits any more; what was fed is in the store.
        """
        drafts, stats = self.drafts(job), job.report.stats
        stats.cache_lost = False
        job.report.start("dflash" if drafts else "plain")
        hit = start or self.store.fetch(job.tokens)
        if start is None:
            job.stored = hit.held
        if not job.emitted and start is None:
            job.report.cached = hit.held
        fresh = hit.target or make_prompt_cache(self.provider.model)
        drafter = as_drafter(self.provider.draft_model) if drafts else None
        draft = (hit.draft or drafter.make_cache(offset=hit.held)) if drafter else []
        caches = [*fresh, *draft]
        size, fed = len(fresh), [hit.held]

        def parts() -> tuple[list[Any], list[Any] | None]:
            return caches[:size], caches[size:] or None  # quantising replaces entries of the list

        def progress(done: int, total: int) -> None:
            fed[0] = hit.held + done
            if done == total:
                return
            if not self.provider.cuttable and fed[0] > hit.held and (done in stops or done == total - 1):
                self.store.insert(job.tokens[: fed[0]], *copy.deepcopy(parts()))
            self._check(job)
            job.send(Progress(fed[0], len(job.prompt)))
            if drafts and self.others_wait():
                raise _HandOver

        rest = job.tokens[hit.held :]
        stops = [] if self.provider.cuttable else [b - hit.held for b in job.boundaries if b > hit.held]
        steps = generate_step(
            rest,
            self.provider.model,
            self.provider.draft_model if drafts else None,
            stats=stats,
            prompt_cache=caches,
            max_tokens=job.left,
            end_tokens=job.end_tokens,
            prompt_progress_callback=progress,
            prefill_stops=stops,
            leave_last=drafts,
            keep_costs=True,
            stream=self.stream,
            **self._options(job, hit.held, drafts),
        )
        last: Piece | None = None
        gone: ClientGone | None = None
        try:
            with closing(steps):
                for token, logprobs, _ in steps:
                    piece = job.advance(token, logprobs)
                    fed[0] = len(job.tokens) - (1 if drafts else 0)
                    if piece.finish_reason:
                        last = piece
                        break
                    job.send(piece)
                    self._check(job)
                    if drafts and not stats.draft_broken and self.others_wait():
                        break
        except _HandOver:
            pass
        except ClientGone as error:
            gone = error
        target, rows = parts()  # settled: they hold the first `fed[0]` tokens
        if last is None and gone is None:
            return Hit(None, None, 0) if stats.cache_lost else Hit(target, None, fed[0])
        if last is not None:
            job.send(last)
        if not stats.draft_broken and not stats.cache_lost and fed[0] > job.stored:
            self.store.insert(job.tokens[: fed[0]], target, rows)
        if gone is not None:
            raise gone
        return None

    def score(self, job: Job) -> Hit | None:
        """Tell the log-probabilities of its prompt, or nothing where none are asked for; returns where to go on.

        Raises `ClientGone`.
        """
        job.report.start("score")
        return score(job, self.provider, self.stream, self._check) if job.scored else None

    def _check(self, job: Job) -> None:
        if job.cancelled or self.stopping():
            raise ClientGone

    def _options(self, job: Job, held: int, drafts: bool) -> dict[str, Any]:
        cli = self.provider.cli_args
        return {
            "block_size": self.pinned(job) if drafts else None,
            "temp": job.args.sampling.temperature,
            "seed": job.args.seed,
            **filters(job, self.provider.tokenizer),
            "logits_processors": [_after(job.tokens[:held], f) for f in processors(job)],
            "prefill_step_size": cli.prefill_step_size,
            "kv_bits": cli.kv_bits,
            "kv_group_size": cli.kv_group_size,
            "quantized_kv_start": cli.quantized_kv_start,
        }


def _after(held: list[int], process: LogitsProcessor) -> LogitsProcessor:
    """The same processor, given the cached tokens as well: a hit must not change a penalty."""
    if not held:
        return process
    before = mx.array(held, mx.int32)
    return lambda tokens, logits: process(mx.concatenate([before, tokens]), logits)
