"""Jobs in a batch and jobs that end early, driven step by step without a server: text, noise and what is stored."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)
from scripted import plain_tokens
from serving import save_tiny_pair

from dflash_mlx.cli import make_parser
from dflash_mlx.decode.stop import StopStrings
from dflash_mlx.decode.text import TextStream
from dflash_mlx.loading import plan
from dflash_mlx.pairs.families import Family
from dflash_mlx.serve import provider as provider_module
from dflash_mlx.serve.alone import Alone
from dflash_mlx.serve.batch import Batch
from dflash_mlx.serve.cache import CacheStore
from dflash_mlx.serve.errors import ClientGone
from dflash_mlx.serve.job import Job, Piece, Progress
from dflash_mlx.serve.provider import Provider

STEP = 8  # tokens of a chunk of the prompt
ASKED = [  # temperature, seed, filters and penalties of the rows of a batch
    {"seed": 1, "temperature": 0.9},
    {"seed": 1, "temperature": 0.9, "repetition_penalty": 5.0},
    {"seed": 2, "temperature": 1.3, "top_p": 0.9, "top_k": 40},
    {"seed": 3, "temperature": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.02, "min_p": 0.01},
    {"seed": 4, "temperature": 0.0},
    {"presence_penalty": 1.5},
]


class Served:
    """A provider with a store, and the ways to run jobs on them."""

    def __init__(self, folder: Path, family: str, *flags: str):
        target, draft = save_tiny_pair(folder, family)
        command = ["serve", "--model", target, "--draft-model", draft, "--prefill-step-size", STEP, *flags]
        args = make_parser()[0].parse_args(list(map(str, command)))
        self.provider = Provider(args, plan(args.model, args.draft_model))
        self.provider.load_default()
        self.stream = mx.default_stream(mx.default_device())
        self.forget()

    def forget(self) -> None:
        self.store = CacheStore(1 << 30, 100)

    def job(self, prompt: list[int], max_tokens: int = 12, boundaries: tuple[int, ...] = (), **asked: object) -> Job:
        args = GenerationArguments(
            model=ModelDescription("", "", ""),
            sampling=SamplingArguments(
                asked.get("temperature", 0.0), asked.get("top_p", 0.0), asked.get("top_k", 0), asked.get("min_p", 0.0),
                asked.get("xtc_probability", 0.0), asked.get("xtc_threshold", 0.1),
            ),
            logits=LogitsProcessorArguments(
                asked.get("logit_bias"), asked.get("repetition_penalty", 0.0), 40,
                asked.get("presence_penalty", 0.0), 40, 0.0, 20,
            ),
            stop_words=[], max_tokens=max_tokens, num_draft_tokens=0, logprobs=False, top_logprobs=-1,
            seed=asked.get("seed"), chat_template_kwargs=None,
        )  # fmt: skip
        request = CompletionRequest("text", prompt, [], None, None)
        text, end = TextStream(self.provider.tokenizer), frozenset(self.provider.tokenizer.eos_token_ids)
        return Job(request, args, prompt, list(boundaries), "normal", None, end, text, StopStrings([]))

    def alone(self, job: Job) -> Job:
        Alone(self.provider, self.store, self.stream, lambda: False, lambda: False).run(job)
        return job

    def together(self, jobs: list[Job]) -> list[Job]:
        batch = Batch(self.provider, self.store, self.stream)
        for job in jobs:
            batch.add(job)
        while batch.jobs:
            batch.step()
        batch.close()
        return jobs

    def plain(self, tokens: list[int], n: int) -> list[int]:
        """What mlx-lm says, up to its end token."""
        said = plain_tokens(self.provider.model, tokens, n)
        ends = [i for i, token in enumerate(said) if token in self.provider.tokenizer.eos_token_ids]
        return said[: ends[0] + 1] if ends else said


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "gpt_oss"])
def served(request, tmp_path_factory):
    return Served(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def fresh(served):
    served.forget()
    return served


def prompt_of(i: int, n: int) -> list[int]:
    return [(7 * j + 3 + 5 * i) % 250 for j in range(n)]


def said(job: Job) -> list[int]:
    return job.tokens[len(job.prompt) :]


def test_rows_of_a_batch_pick_what_they_pick_alone(fresh):
    prompts = [prompt_of(i, n) for i, n in enumerate((30, 41, 17, 5, 9, 23))]
    first = said(fresh.alone(fresh.job(prompts[1], **ASKED[1])))[0]
    rows = [ASKED[0], {**ASKED[1], "logit_bias": {first: -100.0}}, *ASKED[2:]]
    alone = [said(fresh.alone(fresh.job(ids, **asked))) for ids, asked in zip(prompts, rows, strict=True)]
    assert alone[0] != fresh.plain(prompts[0], 12)
    assert alone[1][0] != first
    fresh.forget()
    jobs = [fresh.job(ids, **asked) for ids, asked in zip(prompts, rows, strict=True)]
    assert [said(job) for job in fresh.together(jobs)] == alone
    again = [fresh.job(ids, **asked) for ids, asked in zip(prompts, rows, strict=True)]  # now with caches
    assert [said(job) for job in fresh.together(again)] == alone
    assert all(job.report.cached for job in again)


def test_a_row_is_picked_from_its_logits_not_from_rounded_log_probabilities():
    from dflash_mlx.decode.sampling import TokenPicker
    from dflash_mlx.serve.picking import Seen

    picker = TokenPicker(1.0, 5)
    seen, differ = Seen(picker), 0
    for n in range(1, 150):
        logits = mx.random.normal((1, 500), key=mx.random.key(n)).astype(mx.bfloat16)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected = picker.pick(logits, picker.noise(n, 1, 500))[0].item()
        seen.note(mx.zeros((n,), mx.int32), logits)
        assert seen.pick(logprobs).item() == expected
        differ += picker.pick(logprobs, picker.noise(n, 1, 500))[0].item() != expected
    assert differ, "no case where it matters"


def test_jobs_that_join_with_caches_count_all_their_tokens(fresh):
    """For penalties, and for the tokens under which a batch stores what it leaves."""
    shared = prompt_of(0, 24)
    penalty = {"repetition_penalty": 2.0}
    prompts = [[*shared, *prompt_of(i, 3 + i)] for i in (1, 2)]
    expected = [said(fresh.alone(fresh.job(ids, **penalty))) for ids in prompts]
    fresh.forget()
    fresh.alone(fresh.job(shared, max_tokens=1, boundaries=()))
    jobs = fresh.together([fresh.job(ids, **penalty) for ids in prompts])
    assert [job.report.cached for job in jobs] == [24, 24]
    assert [said(job) for job in jobs] == expected
    stored = [entry.tokens.tolist() for entry in fresh.store.entries]
    assert all(job.tokens in stored for job in jobs)


@pytest.mark.parametrize("in_batch", [False, True], ids=["alone", "in a batch"])
@pytest.mark.parametrize(
    ("pieces", "least"), [(("progress", 3), 2 * STEP), (("piece", 4), 60)], ids=["in the prompt", "in the answer"]
)
def test_what_was_fed_for_a_client_that_leaves_is_found_by_its_retry(fresh, pieces, least, in_batch):
    prompt = prompt_of(3, 61)
    leaving = fresh.job(prompt, max_tokens=40, boundaries=(16,))
    wanted = {"progress": Progress, "piece": Piece}[pieces[0]]
    seen: list[object] = []

    def send(reply: object) -> None:
        seen.append(reply)
        if sum(isinstance(reply, wanted) for reply in seen) == pieces[1]:
            leaving.cancel()

    leaving.send = send
    if in_batch:
        fresh.together([leaving, fresh.job(prompt_of(1, 20), max_tokens=15)])
    else:
        with pytest.raises(ClientGone):
            fresh.alone(leaving)
    assert not leaving.done
    fed = [reply.done for reply in seen if isinstance(reply, Progress)][-1]
    retry = fresh.alone(fresh.job(prompt, boundaries=(16,)))
    assert said(retry) == fresh.plain(prompt, 12)
    assert retry.report.cached >= max(least, min(fed, 60) if pieces[0] == "progress" else 60)
    if pieces[0] == "piece":
        follow = [*leaving.tokens, 7, 8, 9]
        turn = fresh.alone(fresh.job(follow))
        assert turn.report.cached >= len(leaving.tokens) - 1, "the answer so far is kept too"
        assert said(turn) == fresh.plain(follow, 12)


def test_caches_on_their_way_between_alone_and_a_batch_are_kept_for_a_client_that_leaves(fresh):
    prompt = prompt_of(4, 45)
    moving = fresh.job(prompt, max_tokens=30)
    waits = iter([False] * 9 + [True])
    hit = Alone(fresh.provider, fresh.store, fresh.stream, lambda: next(waits), lambda: False).run(moving)
    assert len(prompt) < hit.held + 1 == len(moving.tokens), "it was handed over in its answer"
    moving.cancel()
    batch = Batch(fresh.provider, fresh.store, fresh.stream)
    batch.add(moving, hit)
    assert batch.step() == [moving]
    follow = [*moving.tokens, 7, 8, 9]
    turn = fresh.alone(fresh.job(follow))
    assert turn.report.cached == hit.held
    assert said(turn) == fresh.plain(follow, 12)


def test_a_client_that_leaves_before_anything_was_fed_changes_nothing(fresh):
    done = fresh.alone(fresh.job(prompt_of(0, 20)))
    leaving = fresh.job(done.prompt)
    leaving.cancel()
    before = held(fresh.store)
    fresh.together([leaving])
    with pytest.raises(ClientGone):
        fresh.alone(leaving)
    assert held(fresh.store) == before


def held(store: CacheStore) -> list[tuple[list[int], bool]]:
    """Tokens of the entries, and whether they have the draft's caches too."""
    return sorted((entry.tokens.tolist(), bool(entry.draft)) for entry in store.entries)


def test_only_what_was_measured_is_batched(served, monkeypatch):
    provider = Provider.__new__(Provider)
    provider.model = served.provider.model
    family = type(provider.model).__module__.rpartition(".")[2]
    caches = mlx_lm.models.cache.make_prompt_cache(provider.model)
    row = provider_module.families()[family]

    def reason(known: Family | None = row, **flags: object) -> str:
        provider.cli_args = Namespace(**{"decode_concurrency": 8, "kv_bits": None, **flags})
        table = {} if known is None else {family: known}
        monkeypatch.setattr(provider_module, "families", lambda: table)
        return provider._why_one_by_one(caches)

    assert reason() == "" == served.provider.one_by_one
    assert "--decode-concurrency 1" in reason(decode_concurrency=1)
    assert "quantised" in reason(kv_bits=8)
    assert "not tested" in reason(None)
    assert "not tested" in reason(Family(family, "verified", "", "verified", ("ChunkedKVCache",), row.mlx_lm))
    assert "mlx-lm 0.1" in reason(Family(family, "verified", "", "verified", row.caches, "0.1"))
    monkeypatch.setitem(provider_module.UNBATCHED, family, "other text")
    assert reason() == f"{family} in a batch: other text"


def test_the_table_names_the_families_that_mlx_lm_batches_wrongly():
    table = json.loads((Path(provider_module.__file__).parents[1] / "pairs" / "families.json").read_text())["families"]
    wrong = {name for name, row in table.items() if row.get("batch", "verified") != "verified"}
    # mlx-lm 0.32.2: other text, exceptions, caches that do not merge
    assert wrong >= {
        "afm7", "baichuan_m1", "bailing_moe_linear", "gemma2", "jamba", "longcat_flash_ngram", "mamba", "nemotron_h",
        "minimax_m3_vl", "olmo_hybrid", "recurrent_gemma", "rwkv7", "gpt_bigcode", "internlm2", "nemotron-nas",
        "phi3small", "llama4",
    }  # fmt: skip
    assert wrong == {name for name in provider_module.UNBATCHED if name in table and "caches" in table[name]}
