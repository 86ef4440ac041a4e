"""Many jobs at once without a draft: mlx-lm's batch generator. Runs in the engine's thread; knows no HTTP."""

from __future__ import annotations

import itertools
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, make_stop_sequences

from .cache import CacheStore, Hit
from .job import Job, Progress
from .picking import row
from .provider import Provider


class Batch:
    """The jobs that share their forwards.

    Attributes:
        jobs: by the generator's own number. lone_steps: steps in a row with a single job.
    """

    def __init__(self, provider: Provider, store: CacheStore, stream: mx.Stream):
        args = provider.cli_args
        self.provider, self.store = provider, store
        self.jobs: dict[int, Job] = {}
        self.lone_steps = 0
        self.stop_sequences = make_stop_sequences(provider.tokenizer)
        self.generator = BatchGenerator(
            provider.model,
            completion_batch_size=args.decode_concurrency,
            prefill_batch_size=args.prompt_concurrency,
            prefill_step_size=args.prefill_step_size,
            stream=stream,
        )

    def add(self, job: Job, start: Hit | None = None) -> None:
        """Take a job in, from the caches that it ran with so far or those of the store."""
        job.report.start("batch")
        hit = start or self.store.fetch(job.tokens)
        if start is None:
            job.stored = hit.held
        if not job.emitted and start is None:
            job.report.cached = hit.held
        stops = [b for b in job.boundaries if hit.held < b < len(job.tokens)]
        edges = [hit.held, *stops, len(job.tokens)]
        sampler, processors = row(job, self.provider.tokenizer)
        (uid,) = self.generator.insert_segments(
            segments=[[job.tokens[a:b] for a, b in itertools.pairwise(edges)]],
            max_tokens=[job.left],
            caches=cast(Any, [hit.target]),  # None: it makes a fresh one
            all_tokens=[job.tokens[: hit.held]],
            samplers=[sampler] if sampler else None,
            logits_processors=[processors],
            stop_sequences=[self.stop_sequences],
        )
        self.jobs[uid] = job

    def step(self) -> list[Job]:
        """One forward, of prompts, of tokens or of both; returns the jobs that ended or whose clients left."""
        ended = self.drop([uid for uid, job in self.jobs.items() if job.cancelled])
        self.lone_steps = self.lone_steps + 1 if len(self.jobs) == 1 else 0
        prompts, tokens = self.generator.next()
        for response in prompts:
            job = self.jobs[response.uid]
            done, total = response.progress
            job.send(Progress(len(job.prompt) - total + done, len(job.prompt)))
        if not self.provider.cuttable:
            self._keep_boundaries([r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt])
        for response in tokens:
            job = self.jobs[response.uid]
            piece = job.advance(response.token, response.logprobs)
            job.send(piece)
            if piece.finish_reason is None:
                continue
            if response.finish_reason is not None:
                caches, fed = response.prompt_cache, response.all_tokens
                del self.jobs[response.uid]
            else:
                caches, fed = self._remove([response.uid])[response.uid]
            self.store.insert(fed, caches, None)
            ended.append(job)
        return ended

    def drop(self, uids: list[int]) -> list[Job]:
        """Jobs that end before their time; what was fed for them is stored."""
        jobs = {uid: self.jobs[uid] for uid in uids}
        for uid, (caches, fed) in self._remove(uids).items():
            if len(fed) > jobs[uid].stored:
                self.store.insert(fed, caches, None)
        return list(jobs.values())

    def take_out(self) -> tuple[Job, Hit] | None:
        """The only job and its caches, one token short, to go on alone; None while its prompt is fed."""
        ((uid, job),) = self.jobs.items()
        if not job.emitted:
            return None
        caches, fed = self._remove([uid])[uid]
        return job, Hit(caches, None, len(fed))

    def close(self) -> None:
        self.generator.close()

    def _remove(self, uids: list[int]) -> dict[int, tuple]:
        if not uids:
            return {}
        removed = self.generator.remove(uids, return_prompt_caches=True)
        for uid in uids:
            del self.jobs[uid]
        return {uid: (caches, list(tokens)) for uid, (caches, tokens) in removed.items()}

    def _keep_boundaries(self, uids: list[int]) -> None:
        """Store the caches at the ends of prompt segments: caches that can't be cut are only good for these."""
        for caches, fed in self.generator.extract_cache(uids).values():
            self.store.insert(fed[:], caches, None)
