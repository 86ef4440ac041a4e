"""Text completions as OpenAI's clients and evaluation harnesses use them: lists, echo, scores, legacy logprobs."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from serving import ServerProcess
from tiny import make_hybrid, make_target

from dflash_mlx import demo
from dflash_mlx.cli import make_parser
from dflash_mlx.serve import scoring
from dflash_mlx.serve.dialects.completion import Completion
from dflash_mlx.serve.dialects.fields import UNLIMITED
from dflash_mlx.serve.dialects.logprobs import TextLogprobs
from dflash_mlx.serve.job import Piece, Scores
from dflash_mlx.serve.token_text import TokenText
from dflash_mlx.serve.unknown_fields import UnknownFields

TEXT = "def read(path):\n    return open(path)"
ODD = "naïve 👍 = 1"  # characters of several tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo pair in float32, so that scores can be compared; two prompts of a list at once."""
    folder = tmp_path_factory.mktemp("demo") / "demo32"
    shutil.copytree(demo.TARGET, folder)
    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    flags = ["--model", folder, "--draft-model", "demo", "--decode-concurrency", "2", "--max-queue", "4"]
    with ServerProcess(*flags, "--alias", "Qwen/Qwen3-8B,my model", "--ignore-unknown-fields") as process:
        yield process


@pytest.fixture(scope="module")
def openai(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).completions


def teacher_forced(model, tokens):
    """Log-probabilities `[n - 1, V]` of what follows each token but the last, by one forward of plain mlx-lm."""
    logits = model(mx.array([tokens[:-1]]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("prompt", [TEXT, ODD])
def test_an_echoed_prompt_is_scored_as_the_model_does(openai, demo_pair, prompt):
    model, _, tokenizer = demo_pair
    ids = tokenizer.encode(prompt)
    expected = teacher_forced(model, ids)
    choice = openai.create(model="demo32", prompt=prompt, max_tokens=0, echo=True, logprobs=3).choices[0]
    own = choice.logprobs
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert own.token_logprobs[0] is own.top_logprobs[0] is None
    assert own.token_logprobs[1:] == pytest.approx(expected[np.arange(len(ids) - 1), ids[1:]].tolist(), abs=1e-4)
    for row, top, logprob in zip(expected, own.top_logprobs[1:], own.token_logprobs[1:], strict=True):
        assert sorted(top.values())[-3:] == pytest.approx(np.sort(row)[-3:].tolist(), abs=1e-4)
        assert logprob in top.values(), "the token itself is among them"
        assert (logprob == max(top.values())) == (logprob == pytest.approx(row.max(), abs=1e-5)), "what greedy means"
    assert len(own.tokens) == len(own.text_offset) == len(ids)
    shown = [token for token in own.tokens if not token.startswith("bytes:")]
    if len(shown) == len(ids):
        assert [
            prompt[at : at + len(token)] for at, token in zip(own.text_offset, own.tokens, strict=True)
        ] == own.tokens
    else:
        raw = b"".join(t.encode() if t in shown else bytes.fromhex(t[6:].replace("\\x", "")) for t in own.tokens)
        assert raw.decode() == prompt
        assert own.text_offset == sorted(own.text_offset)
        assert prompt[own.text_offset[-1] :] == own.tokens[-1]


def test_scores_lead_into_the_text_that_follows(openai, demo_pair):
    """A scored prompt is fed once; what follows is what follows without scores, and its columns go on."""
    tokenizer = demo_pair[2]
    plain = openai.create(model="demo32", prompt=TEXT, max_tokens=12, logprobs=1).choices[0]
    both = openai.create(model="demo32", prompt=TEXT, max_tokens=12, echo=True, logprobs=1).choices[0]
    n = len(tokenizer.encode(TEXT))
    assert both.text == TEXT + plain.text
    assert both.logprobs.tokens[n:] == plain.logprobs.tokens
    assert "".join(both.logprobs.tokens) == both.text
    assert both.logprobs.token_logprobs[n:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert [at - len(TEXT) for at in both.logprobs.text_offset[n:]] == plain.logprobs.text_offset
    assert [max(top, key=top.get) for top in plain.logprobs.top_logprobs] == plain.logprobs.tokens, "greedy"
    echoed = openai.create(model="demo32", prompt=tokenizer.encode(TEXT), max_tokens=1, echo=True).choices[0]
    assert (echoed.text[: len(TEXT)], echoed.logprobs) == (TEXT, None)


def test_mlx_lms_clients_find_their_entries_beside_the_columns(server):
    fields = {"max_tokens": 6, "logprobs": 2, "echo": True}
    columns = server.complete(TEXT, **fields)["choices"][0]["logprobs"]
    entries = columns["content"]
    assert [entry["id"] for entry in entries] == columns["token_ids"][-6:], "what was written, without the echo"
    assert [entry["logprob"] for entry in entries] == columns["token_logprobs"][-6:]
    assert [entry["token"] for entry in entries] == columns["tokens"][-6:]
    assert all(
        {best["token"]: best["logprob"] for best in entry["top_logprobs"]}.items() <= top.items()
        for entry, top in zip(entries, columns["top_logprobs"][-6:], strict=True)
    )
    packets = server.stream("/v1/completions", {"prompt": TEXT, **fields})
    parts = [choice["logprobs"] for packet in packets for choice in packet["choices"] if "logprobs" in choice]
    assert [entry["id"] for part in parts for entry in part["content"]] == [entry["id"] for entry in entries]
    assert server.complete(TEXT, max_tokens=0, logprobs=1, echo=True)["choices"][0]["logprobs"]["content"] == []


def test_a_list_of_prompts_is_answered_in_its_order(openai, server, demo_pair):
    """More prompts than may run or wait at once; texts, ids and both ways to send a list; figures a choice."""
    prompts = [f"def f{i}(" for i in range(7)]
    alone = [openai.create(model="demo32", prompt=prompt, max_tokens=6) for prompt in prompts]
    together = openai.create(model="demo32", prompt=prompts, max_tokens=6)
    assert [choice.text for choice in together.choices] == [reply.choices[0].text for reply in alone]
    assert [choice.index for choice in together.choices] == list(range(7))
    assert together.usage.prompt_tokens == sum(reply.usage.prompt_tokens for reply in alone)
    assert together.usage.completion_tokens == sum(reply.usage.completion_tokens for reply in alone)
    assert all(choice.model_extra["dflash"]["ran"] for choice in together.choices)
    ids = [demo_pair[2].encode(prompt) for prompt in prompts[:2]]
    assert [c.text for c in openai.create(model="demo32", prompt=ids, max_tokens=6).choices] == [
        choice.text for choice in together.choices[:2]
    ]
    status, reply = server.request("POST", "/v1/completions", {"prompt": ["x", [5000]]})
    assert status == 400, reply
    status, reply = server.request("POST", "/v1/completions", {"prompt": [[1], [5000]]})
    assert (status, reply["error"]["param"]) == (400, "prompt")


def test_a_streamed_list_is_the_whole_one(openai):
    fields = {"model": "demo32", "prompt": ["import os", "class A:"], "max_tokens": 6, "echo": True, "logprobs": 1}
    whole = openai.create(**fields)
    packets = list(openai.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert packets[-1].choices == []
    assert packets[-1].usage.total_tokens == whole.usage.total_tokens
    for choice in whole.choices:
        parts = [c for packet in packets for c in packet.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        for column in ("tokens", "token_logprobs", "text_offset"):
            joined = [x for part in parts if part.logprobs for x in getattr(part.logprobs, column)]
            expected = getattr(choice.logprobs, column)
            assert joined == (pytest.approx(expected, abs=1e-4) if column == "token_logprobs" else expected)
    last = list(openai.create(**fields, stream=True))[-1]
    assert last.usage.total_tokens == whole.usage.total_tokens, "without include_usage the last packet tells it"


def test_no_limit_and_no_tokens(openai, server):
    reply = openai.create(model="demo32", prompt=TEXT, max_tokens=0)
    assert (reply.choices[0].text, reply.usage.completion_tokens) == ("", 0)
    reply = server.complete(TEXT, max_tokens=-1, stop=["\n"])
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("context", "most"), [(2048, 8), (2040, 1), (100, 1), (None, UNLIMITED)])
def test_no_limit_is_the_end_of_what_the_target_was_made_for(context, most):
    args = make_parser()[0].parse_args(["serve", "--model", "demo"])
    model = SimpleNamespace(args=SimpleNamespace(max_position_embeddings=context))
    plan = SimpleNamespace(draft=None)
    provider = SimpleNamespace(model=model, answers_to=lambda name: True, public_draft=None, plan=plan)
    engine = SimpleNamespace(args=args, provider=provider, unknown_fields=UnknownFields(), system_fingerprint="")
    engine.prepare = lambda request, args, block_size, scored: SimpleNamespace(prompt=request.prompt, args=args)
    for limit, expected in ((-1, most), (5, 5), (None, args.max_tokens)):
        completion = Completion(engine, {"prompt": [1] * 2040, "max_tokens": limit}, "text")
        assert completion.job.args.max_tokens == expected


def test_a_model_by_another_name(server):
    from openai import OpenAI

    models = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).models
    assert [model.id for model in models.list()] == ["demo32", "Qwen/Qwen3-8B", "my model"]
    assert models.retrieve("Qwen/Qwen3-8B").id == "Qwen/Qwen3-8B", "asked as /v1/models/Qwen%2FQwen3-8B"
    assert models.retrieve("my model").id == "my model"
    assert server.request("GET", "/v1/models/Qwen/Qwen3-8B")[0] == 200
    assert server.request("GET", "/v1/models/%64emo32")[1]["id"] == "demo32"
    assert server.complete("x", model="Qwen/Qwen3-8B", max_tokens=1)["model"] == "Qwen/Qwen3-8B"
    assert server.request("GET", "/v1/models/Qwen%2FQwen3-9B")[0] == 404


def test_unknown_fields_are_ignored_where_the_server_was_told_so(server):
    said = {"max_tokens": 1, "surprise": 1}
    messages = [{"role": "user", "content": "x"}]
    for _ in range(2):
        for path, body in (
            ("/v1/completions", {"prompt": "x", **said}),
            ("/v1/chat/completions", {"messages": messages, **said}),
            ("/v1/messages", {"messages": messages, **said}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1, "surprise": 1}),
        ):
            assert server.request("POST", path, body)[0] == 200, path
    assert sum("surprise" in line for line in server.lines) == 1
    assert server.request("POST", "/v1/responses", {"input": "x", "conversation": "c"})[0] == 400


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss", "llama"])
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_scores_are_those_of_mlx_lm_in_chunks_of_any_size(monkeypatch, family, kv_bits):
    """Full, recurrent and rotating caches; what is looked at at once is bounded, and the caches go on from there."""
    if kv_bits and family != "qwen3":
        pytest.skip("mlx-lm can't quantise these caches")
    model = make_target("qwen3-wide") if family == "qwen3" else make_hybrid(family)
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, 256, 61)]
    rows = []

    def score(most):
        monkeypatch.setattr(scoring, "LOGIT_BYTES", most * 4 * 256)
        sent = []
        job = SimpleNamespace(prompt=prompt, args=SimpleNamespace(top_logprobs=2), send=sent.append)
        cli = SimpleNamespace(prefill_step_size=32, kv_bits=kv_bits, kv_group_size=32, quantized_kv_start=0)
        provider = SimpleNamespace(model=model, cli_args=cli)
        hit = scoring.score(job, provider, mx.default_stream(mx.default_device()), lambda job: None)
        scores = [reply for reply in sent if isinstance(reply, Scores)]
        rows.append([len(some.logprobs) for some in scores])
        best = [top for some in scores for top in some.best]
        return [x for some in scores for x in some.logprobs], best, hit

    wide, best, hit = score(1000)
    narrow, *_ = score(7)
    assert rows == [[32, 28], [7] * 8 + [4]]
    if kv_bits is None:
        expected = teacher_forced(model, prompt)
        for got in (wide, narrow):
            assert got == pytest.approx(expected[np.arange(60), prompt[1:]].tolist(), abs=2e-4)
        assert [[token for token, _ in top] for top in best] == np.argsort(-expected, axis=-1)[:, :2].tolist()
    assert hit.held == 60
    assert any(isinstance(cache, QuantizedKVCache) for cache in hit.target) == bool(kv_bits)
    caches = make_prompt_cache(model)
    if kv_bits is None:
        model(mx.array([prompt[:-1]]), cache=caches)
        token = mx.array([prompt[-1:]])
        assert mx.abs(model(token, cache=hit.target) - model(token, cache=caches)).max().item() < 2e-4


class Tokenizer:
    names = ("<s>", "a", " b", "c", "a")

    def decode(self, ids):
        return "".join(self.names[i] for i in ids)

    def encode(self, text, add_special_tokens):
        return [1]

    def convert_ids_to_tokens(self, token):
        return self.names[token]


def test_of_tokens_that_are_spelled_alike_the_likelier_is_told():
    columns = TextLogprobs(TokenText(Tokenizer()))
    columns.add(Piece("a", 4, None, -2.0, ((1, -1.0), (4, -2.0), (3, -3.0))))
    taken = columns.take()
    assert taken["top_logprobs"] == [{"a": -1.0, "c": -3.0}]
    assert taken["token_logprobs"] == [-2.0], "its own all the same"


def test_offsets_leave_out_a_mark_in_front_of_the_text():
    """Llama's tokenizers put a BOS there, which is scored and not shown."""
    columns = TextLogprobs(TokenText(Tokenizer()))
    columns.add_prompt([0, 1, 2, 3], [Scores((-1.0, -2.0), ((), ())), Scores((-3.0,), ((),))], "a bc")
    taken = columns.take()
    assert taken["text_offset"] == [0, 0, 1, 3]
    assert taken["tokens"] == ["<s>", "a", " b", "c"]
    assert taken["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert columns.take() is None
    assert json.dumps(taken)
