"""The one thread that owns MLX: jobs come in order, one runs with DFlash, several share a batch without it.

A job alone runs with the draft. When another arrives that can share a batch, the running one stops at the end of its
round (or chunk of the prompt) and both go on in mlx-lm's batch generator; newcomers join in the order of arrival, also
for a moment after it has run empty. A job that is alone for a while goes back to the draft. Where requests can't share
a batch (see `Provider`), they run one by one in their order.
An exception ends the job it belongs to. One in a batch belongs to nobody in particular: its jobs go on one by one, and
nothing is batched any more.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import threading
import time
from collections import deque
from contextlib import nullcontext
from functools import cached_property
from queue import Empty, Queue

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import CompletionRequest, GenerationArguments, ResponseGenerator, get_system_fingerprint

from ..decode.stop import StopStrings
from ..decode.text import TextStream
from ..errors import DFlashError
from ..prompt_cache import cut
from ..target import Target
from ..target.args import context_length
from .alone import Alone
from .batch import Batch
from .cache import CacheStore, Hit
from .disk import DiskTier
from .errors import ApiError, ClientGone, internal_error
from .job import Job
from .metrics import Metrics
from .provider import Provider
from .token_text import TokenText
from .tokens import Front, takes_tools, tokenized, too_long
from .unknown_fields import UnknownFields

log = logging.getLogger(__name__)

LONE_STEPS = 16  # in a batch of one before it goes back to the draft
IDLE_SECONDS = 0.1
COMPANY_SECONDS = 0.3  # after a batch of several ended, others are expected and nobody starts alone
GOING_DOWN = ApiError(503, "the server is going down", code="unavailable")


class Engine(ResponseGenerator):
    """mlx-lm's generator with a scheduler of our own.

    Attributes:
        loaded: set when the pair is there, or `load_error`.
        store: used by the engine's thread only.
    """

    def __init__(self, provider: Provider, args: argparse.Namespace):
        self.provider, self.args = provider, args
        self.metrics = Metrics(self.load)
        self.unknown_fields = UnknownFields(args.ignore_unknown_fields)
        self.system_fingerprint = get_system_fingerprint()
        self.waiting: deque[Job] = deque()
        self.batch: Batch | None = None
        self.running: Job | None = None
        self.company_until = 0.0
        self.loaded = threading.Event()
        self.load_error: BaseException | None = None
        self._tokenizing = threading.Lock()
        # Not mlx-lm's constructor: it starts a thread that ends. MLX's thread-local caches take Python's lock when
        # their thread ends, which aborts a process that is ending as well; ours is parked instead (`_live`).
        self.model_provider = provider
        self.requests: Queue[Job] = Queue()
        self._stop = self._generation_failed = False
        self._ended = threading.Event()
        self._generation_thread = threading.Thread(target=self._live, daemon=True)
        self._generation_thread.start()

    def stop_and_join(self) -> None:
        """End what runs, write what is to be kept, drop the models."""
        self._stop = True
        self._ended.wait()

    # Asked by the threads of connections -------------------------------------------------------------------

    def generation_available(self) -> bool:
        return not self._ended.is_set()

    @property
    def is_healthy(self) -> bool:
        return self.loaded.is_set() and self.load_error is None and self.generation_available()

    def load(self) -> tuple[int, int]:
        """Jobs that run, and jobs that wait."""
        batch = self.batch
        return (1 if self.running else 0) + (len(batch.jobs) if batch else 0), self.requests.qsize() + len(self.waiting)

    def prepare(
        self,
        request: CompletionRequest,
        args: GenerationArguments,
        block_size: int | None = None,
        scored: bool = False,
    ) -> Job:
        """Turn a request into a job: its prompt is rendered and checked here, so that the engine need not wait for it.

        Raises `ApiError` for a prompt that can't be rendered, is too long or holds ids that the model does not have.
        """
        provider = self.provider
        limit = self.args.max_prompt_tokens or context_length(provider.model)
        field = "messages" if request.request_type == "chat" else "prompt"
        tokenizer = Front(self.front_tokenizer, limit, self.longest_token, field)
        with nullcontext() if isinstance(request.prompt, list) else self._tokenizing:  # ids need no tokenizer
            prompt, boundaries, state = tokenized(self, tokenizer, request, args)
        if limit and len(prompt) > limit:
            raise too_long(f"{len(prompt)} tokens", limit, field)
        for name, ids in (("prompt", prompt), ("logit_bias", list(args.logits.logit_bias or ()))):
            if any(not 0 <= token < self.vocab for token in ids):
                raise ApiError(400, f"{name} holds a token id that is not in 0 to {self.vocab - 1}", name)
        if block_size is not None and block_size > (provider.plan.block_size or 1):
            most = provider.plan.block_size
            reason = f"this draft's blocks have 1 to {most} tokens" if most else "the server runs without a draft"
            raise ApiError(400, f"block_size is {block_size}, but {reason}", "block_size")
        job = Job(
            request,
            args,
            prompt,
            boundaries,
            state,
            block_size,
            self.end_tokens,
            TextStream(provider.tokenizer),
            StopStrings(args.stop_words),
            scored=scored,
        )
        job.report.draft = provider.public_draft
        job.report.wanted = self.alone.drafts(job)
        return job

    @cached_property
    def takes_tools(self) -> bool:
        """Whether this model is shown the tools of a request."""
        return takes_tools(self.front_tokenizer, self.args.chat_template_args)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `ApiError` when too many wait or the engine is down."""
        if not self.is_healthy:
            raise ApiError(503, "the engine is down; the server's log says why", code="unavailable")
        if self.load()[1] >= self.args.max_queue:
            raise ApiError(429, "too many requests wait; try again later", code="queue_full")
        self.requests.put(job)

    # The engine's thread -----------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._generate()
        except BaseException:  # nothing is above a thread that never ends; clients are told by `generation_available`
            log.exception("the engine died")
        finally:
            self.loaded.set()
            self._ended.set()
            threading.Event().wait()  # for ever, see the constructor

    def _generate(self) -> None:
        try:
            self._load()
        except BaseException as error:  # raised again by the thread that waits for `loaded`; loading may exit
            self.load_error = error
            self.loaded.set()
            return
        self.loaded.set()
        while not self._stop:
            self._admit(wait=not self.waiting and self.batch is None)
            if self.batch is not None:
                self._run_batch(self.batch)
            elif self.waiting:
                self._run_next(self.waiting.popleft())
            else:
                self.store.write_one()
        self._close()

    def _load(self) -> None:
        self.provider.load_default()
        self.front_tokenizer = copy.deepcopy(self.provider.tokenizer)  # Rust tokenizers do not like two threads
        self.token_text = TokenText(self.front_tokenizer)
        self.longest_token = max(map(len, self.front_tokenizer.get_vocab()))
        self.end_tokens = frozenset(self.provider.tokenizer.eos_token_ids)
        self.vocab = Target(self.provider.model).vocab_size
        self.store = self._open_store()
        self.stream = mx.default_stream(mx.default_device())
        self.alone = Alone(self.provider, self.store, self.stream, self._others_wait, lambda: self._stop)

    def _open_store(self) -> CacheStore:
        args, disk = self.args, None
        if args.prompt_cache_dir is not None:
            entries = len(make_prompt_cache(self.provider.model))
            disk = DiskTier(args.prompt_cache_dir, args.prompt_cache_dir_bytes, self.provider.fingerprint(), entries)
        return CacheStore(args.prompt_cache_bytes, args.prompt_cache_size, disk)

    def _admit(self, wait: bool = False) -> None:
        """Move what has arrived into the line."""
        try:
            while True:
                self.waiting.append(self.requests.get(timeout=IDLE_SECONDS) if wait else self.requests.get_nowait())
                wait = False
        except Empty:
            return

    def _others_wait(self) -> bool:
        """Whether there is another job to share a batch with."""
        self._admit()
        while self.waiting and self.waiting[0].cancelled:
            self._end(self.waiting.popleft(), "cancelled")
        return bool(self.waiting) and not self.provider.one_by_one

    def _run_next(self, job: Job, start: Hit | None = None) -> None:
        if job.cancelled:
            return self._end(job, "cancelled")
        if job.scored or not job.args.max_tokens:
            return self._score(job)
        company = self.provider.cuttable and time.monotonic() < self.company_until  # a lone one can go back
        shares = not self.provider.one_by_one and start is None
        if shares and (company or not self.alone.drafts(job) or self._others_wait()):
            return self._join(job)
        self.running = job
        try:
            start = self.alone.run(job, start)
            if start is not None:
                return self._join(job, start)
            self._end(job, "ok")
        except ClientGone as gone:
            job.send(GOING_DOWN if self._stop else gone)
            self._end(job, "cancelled")
        except Exception as error:
            self._fail(job, error)
        finally:
            self.running = None

    def _run_batch(self, batch: Batch) -> None:
        while self.waiting:
            job = self.waiting.popleft()
            if job.cancelled:
                self._end(job, "cancelled")
            else:
                self._join(job)
        try:
            for job in batch.step():
                self._end(job, "ok" if job.done else "cancelled")
        except Exception as error:
            log.exception("a batch of %d failed (%s); requests run one by one from now on", len(batch.jobs), error)
            self.provider.one_by_one = "a batch failed"
            self._leave_batch()
            for job in reversed(batch.jobs.values()):
                if job.done:  # its last piece is out
                    self._end(job, "ok")
                else:
                    self.waiting.appendleft(job)
            return
        if batch.lone_steps < LONE_STEPS:
            self.company_until = time.monotonic() + COMPANY_SECONDS
        if not batch.jobs:
            self._leave_batch()
        elif batch.lone_steps >= LONE_STEPS and not self.waiting:
            self._back_to_the_draft(batch)

    def _back_to_the_draft(self, batch: Batch) -> None:
        (job,) = batch.jobs.values()
        if not (self.provider.cuttable and self.alone.drafts(job) and job.left > LONE_STEPS):
            return
        taken = batch.take_out()
        if taken is None:
            return
        self._leave_batch()
        job, hit = taken
        assert hit.target is not None
        surplus = hit.held - (len(job.tokens) - 1)
        cut(hit.target, surplus)
        hit.held -= surplus
        self._run_next(job, hit)

    def _score(self, job: Job) -> None:
        """Feed a job whose prompt's log-probabilities are asked for, between two steps of a batch if there is one."""
        self.running = job
        try:
            start = self.alone.score(job)
            job.scored = False
        except ClientGone as gone:
            job.send(GOING_DOWN if self._stop else gone)
            return self._end(job, "cancelled")
        except Exception as error:
            return self._fail(job, error)
        finally:
            self.running = None
        if not job.args.max_tokens:
            job.finish_empty()
            self._end(job, "ok")
        elif self.batch is not None:
            self._join(job, start)
        else:
            self._run_next(job, start)

    def _join(self, job: Job, start: Hit | None = None) -> None:
        if job.scored or not job.args.max_tokens:
            return self._score(job)
        try:
            if self.batch is None:
                self.batch = Batch(self.provider, self.store, self.stream)
            self.batch.add(job, start)
        except Exception as error:
            self._fail(job, error)

    def _leave_batch(self) -> None:
        if self.batch is not None:
            self.batch.close()
        self.batch = None
        mx.clear_cache()

    def _fail(self, job: Job, error: Exception) -> None:
        """End one job with an error; the user's mistakes are told, ours are logged."""
        if isinstance(error, DFlashError):
            log.info("a request can't be done", exc_info=error)
            job.send(ApiError(400, str(error)))
        else:
            log.exception("a request failed", exc_info=error)
            job.send(internal_error())
        self._end(job, "error")

    def _end(self, job: Job, outcome: str) -> None:
        self.metrics.prompt_cache_bytes = self.store.nbytes
        self.metrics.observe(job, outcome)

    def _close(self) -> None:
        """Models and caches are dropped by the thread that made them."""
        for job in [*self.waiting, *(self.batch.drop(list(self.batch.jobs)) if self.batch else ())]:
            job.send(GOING_DOWN)
        self._leave_batch()
        while self.store.write_one():
            pass
        self.store.clear()
        self.provider.reset()
        gc.collect()
