"""Real servers for tests: a process on loopback, and tiny targets with a tokenizer and a chat template for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tiny import HYBRIDS, draft_config, make_draft, randomised, save_draft, save_target, target_config

SPECIALS = ("<|im_end|>", "<|im_start|>", "<|mask|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
# What the scripted target says behind each token; one token each, so that a bigram model can say it.
SCRIPT = {
    "<think>": "Two and two.",
    "Two and two.": "</think>",
    "</think>": "It is 4.",
    "It is 4.": "<tool_call>",
    "<tool_call>": '{"name": "add", "arguments": {"a": 2, "b": 2}}',
    '{"name": "add", "arguments": {"a": 2, "b": 2}}': "</tool_call>",
    "</tool_call>": "<|im_end|>",
}
WORDS = [word for word in SCRIPT if word not in SPECIALS]
VOCAB = 256 + len(SPECIALS) + len(WORDS) + 6  # a multiple of 16 that leaves unused rows
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{% for tool_call in message.tool_calls %}<tool_call>
{{ tool_call.name }}</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}{% endif %}"""


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Bytes, special tokens and the words of the script; one byte a token otherwise."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS[:3]])
    tokenizer.add_tokens([AddedToken(s, special=False) for s in (*SPECIALS[3:], *WORDS)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": None}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def token_id(text: str) -> int:
    return 256 + [*SPECIALS, *WORDS].index(text)


def save_scripted_pair(folder: Path) -> tuple[Path, Path]:
    """A target that says `SCRIPT`, token by token, and a random draft for it."""
    config = {
        **target_config("qwen3-untied", layers=4, vocab=VOCAB, hidden=VOCAB),
        "eos_token_id": token_id("<|im_end|>"),
    }
    from mlx_lm.models.qwen3 import Model, ModelArgs

    model = randomised(Model(ModelArgs.from_dict(config)), mx.float32)
    follows = np.zeros((VOCAB, VOCAB), np.float32)  # [next, current]
    follows[token_id("<|im_end|>")] = 0.5
    for word, following in SCRIPT.items():
        follows[token_id(following), token_id(word)] = 4.0
    weights = [("model.embed_tokens.weight", mx.eye(VOCAB)), ("lm_head.weight", mx.array(follows))]
    for i in range(4):  # the layers pass their input through
        weights.append((f"model.layers.{i}.self_attn.o_proj.weight", mx.zeros((VOCAB, 64))))
        weights.append((f"model.layers.{i}.mlp.down_proj.weight", mx.zeros((VOCAB, 96))))
    model.load_weights(weights, strict=False)
    return _save_pair(folder, model, config, hidden_size=VOCAB)


def save_scripts(folder: Path, scripts: dict[str, Sequence[str]], template: str) -> Path:
    """A target of one layer that answers each word of `scripts` with its pieces, one token each, then ends.

    Args:
        template: must end the prompt with the word. A piece that is said twice must be followed by the same.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    end = "<|im_end|>"
    words = list(dict.fromkeys(word for script in scripts.items() for word in (script[0], *script[1])))
    ids = {end: 256, **{word: 257 + i for i, word in enumerate(words)}}
    size = -(-(257 + len(words)) // 16) * 16
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    config: dict[str, Any] = {
        **target_config("qwen3-untied", layers=1, vocab=size, hidden=size),
        "eos_token_id": ids[end],
    }
    from mlx_lm.models.qwen3 import Model, ModelArgs

    model = randomised(Model(ModelArgs.from_dict(config)), mx.float32)
    follows = np.zeros((size, size), np.float32)  # [next, current]
    follows[ids[end]] = 0.5
    for word, pieces in scripts.items():
        for current, following in zip((word, *pieces), (*pieces, end), strict=True):
            follows[ids[following], ids[current]] = 4.0
    passed = ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight")
    silent = [(name, mx.zeros(array.shape)) for name, array in tree_flatten(model.parameters()) if name in passed]
    model.load_weights(
        [("model.embed_tokens.weight", mx.eye(size)), ("lm_head.weight", mx.array(follows)), *silent], strict=False
    )
    save_target(folder, model, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_tiny_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """A random target ("qwen3" or one of `tiny.HYBRIDS`) with the tokenizer, and a random draft."""
    import copy
    import importlib

    config: dict[str, Any] = copy.deepcopy(HYBRIDS[family]) if family in HYBRIDS else target_config(family)
    config.get("text_config", config)["vocab_size"] = VOCAB
    if "text_config" not in config:
        config["vocab_size"] = VOCAB
    config["eos_token_id"] = token_id("<|im_end|>")
    source = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = randomised(source.Model(source.ModelArgs.from_dict(copy.deepcopy(config))), mx.float32)
    return _save_pair(folder, model, config)


def _save_pair(folder: Path, model: Any, config: dict[str, Any], **draft: Any) -> tuple[Path, Path]:
    save_target(folder / "target", model, config)
    save_tokenizer(folder / "target")
    changes = {"vocab_size": VOCAB, "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 258}, **draft}
    save_draft(folder / "draft", make_draft(**changes), draft_config(**changes))
    return folder / "target", folder / "draft"


class ServerProcess:
    """`dflash-mlx serve` or `mlx_lm.server` in a process of its own.

    Args:
        flags: of the command. plain: mlx-lm's server.
    """

    def __init__(self, *flags: object, plain: bool = False, env: dict[str, str] | None = None):
        if plain:
            self.port = free_port()
            command = [sys.executable, "-m", "mlx_lm", "server", "--port", str(self.port)]
        else:
            command = [sys.executable, "-m", "dflash_mlx", "serve", "--port", "0"]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*command, *map(str, flags)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
        )
        started = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(started,), daemon=True)
        self._reader.start()
        if not started.wait(240) or self.process.poll() is not None:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.lines))

    def _read(self, started: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"serving on http://[^/]*:(\d+)/v1", line):
                self.port = int(found[1])
                started.set()
            elif "Starting httpd" in line:
                started.set()
        started.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(120)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body, as JSON where it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        raw = response.read().decode()
        connection.close()
        is_json = (response.getheader("Content-Type") or "").startswith("application/json")
        return response.status, json.loads(raw) if is_json and raw else raw

    def chat(self, messages: str | Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A chat completion, which must succeed."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        status, reply = self.request("POST", "/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, reply
        return reply

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A text completion, which must succeed."""
        status, reply = self.request("POST", "/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, reply
        return reply

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The packets of a stream; its end mark must come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        done = False
        for line in response:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])
        connection.close()
        assert done, "the stream broke off"

    def count(self, name: str) -> float:
        """The sum of a counter of /metrics; of some with labels: `requests_total{outcome="cancelled"`."""
        lines = self.request("GET", "/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"dflash_{name}"))

    def load(self) -> int:
        """Requests that run or wait."""
        health = self.request("GET", "/health")[1]
        return health["running"] + health["queued"]

    def until_idle(self) -> None:
        until(lambda: not self.load())


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for something that happens at once where nothing is wrong, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
