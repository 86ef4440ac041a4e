"""Counters of the server as Prometheus text. Knows what a job reports, not how it ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import mlx.core as mx

from .job import Job

PREFIX = "dflash_"
# name -> (type, help)
TABLE: dict[str, tuple[str, str]] = {
    "requests_total": ("counter", "Completions that ended, by outcome (ok, cancelled, error) and way"),
    "prompt_tokens_total": ("counter", "Tokens of their prompts"),
    "cached_tokens_total": ("counter", "Prompt tokens that a stored cache held"),
    "generated_tokens_total": ("counter", "Tokens that were emitted"),
    "rounds_total": ("counter", "Rounds of draft and verify"),
    "accepted_tokens_total": ("counter", "Draft tokens that were kept"),
    "queue_seconds_total": ("counter", "Seconds that requests waited"),
    "prefill_seconds_total": ("counter", "Seconds from the start of a request to its first token"),
    "decode_seconds_total": ("counter", "Seconds from first to last token"),
    "tau": ("gauge", "Tokens a round emits on average, since the start"),
    "running": ("gauge", "Requests that run"),
    "queue_length": ("gauge", "Requests that wait"),
    "prompt_cache_bytes": ("gauge", "Prompt caches in memory"),
    "active_memory_bytes": ("gauge", "Memory in use by MLX"),
    "peak_memory_bytes": ("gauge", "Most memory that MLX has used"),
    "uptime_seconds": ("gauge", "Seconds since the start"),
}


class Metrics:
    """Counts and gauges.

    Args:
        load: jobs that run, and jobs that wait.
    """

    def __init__(self, load: Callable[[], tuple[int, int]]):
        self._load = load
        self.started = time.perf_counter()
        self._lock = threading.Lock()
        self._counts = {name: 0.0 for name, (kind, _) in TABLE.items() if kind == "counter"}
        self._requests: dict[tuple[str, str], int] = {}
        self._bonus = 0
        self.prompt_cache_bytes = 0

    def observe(self, job: Job, outcome: str) -> None:
        """Count a job that ended."""
        report = job.report
        figures = report.to_dict()
        with self._lock:
            key = (outcome, figures["ran"] or "none")
            self._requests[key] = self._requests.get(key, 0) + 1
            self._bonus += report.stats.bonus
            for name, value in {
                "prompt_tokens_total": report.prompt_tokens,
                "cached_tokens_total": report.cached,
                "generated_tokens_total": report.tokens,
                "rounds_total": report.stats.rounds,
                "accepted_tokens_total": report.accepted,
                "queue_seconds_total": figures["queue_seconds"],
                "prefill_seconds_total": figures["prefill_seconds"],
                "decode_seconds_total": report.decode_seconds,
            }.items():
                self._counts[name] += value

    def text(self) -> str:
        """All of it, in Prometheus' text format."""
        running, queued = self._load()
        with self._lock:
            counts, requests, bonus = dict(self._counts), dict(self._requests), self._bonus
        rounds = counts["rounds_total"]
        values: dict[str, float] = {
            **counts,
            "tau": (counts["accepted_tokens_total"] + bonus) / rounds if rounds else 0.0,
            "running": running,
            "queue_length": queued,
            "prompt_cache_bytes": self.prompt_cache_bytes,
            "active_memory_bytes": mx.get_active_memory(),
            "peak_memory_bytes": mx.get_peak_memory(),
            "uptime_seconds": time.perf_counter() - self.started,
        }
        lines = []
        for name, (kind, what) in TABLE.items():
            lines += [f"# HELP {PREFIX}{name} {what}", f"# TYPE {PREFIX}{name} {kind}"]
            if name == "requests_total":
                for (outcome, way), count in sorted(requests.items()):
                    lines.append(f'{PREFIX}{name}{{outcome="{outcome}",ran="{way}"}} {count}')
            else:
                lines.append(f"{PREFIX}{name} {values[name]:.17g}")
        return "\n".join(lines) + "\n"
