"""Bad input through the command line (C20, C21, C30): one line, an exit code, nothing written, nothing heavy loaded."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import draft_config, make_draft, make_target, save_draft, save_target, target_config

from dflash_mlx import demo

FILE = "model.safetensors"


class Loaded(Exception):
    """The target was about to be loaded."""


@dataclass
class Pair:
    """A tiny pair in its own folder, and the commands on it."""

    folder: Path
    cli: Callable[..., Any]
    heavy: list[str] = field(default_factory=list)  # targets that were loaded

    @property
    def draft(self) -> Path:
        return self.folder / "draft"

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def generate(self, *flags: object, model: object = None, draft: object = None) -> Any:
        return self.cli(
            "generate", "--model", model or self.target, "--draft-model", draft or self.draft, "--prompt", "x", *flags
        )

    def convert(self, *flags: object) -> Any:
        return self.cli("convert", "--hf-path", self.draft, "--mlx-path", self.out, *flags)

    def config(self, **changes: Any) -> None:
        """Change the draft's config; a value of None removes the key."""
        (self.draft / "config.json").write_text(json.dumps(draft_config(**changes)))

    def tensors(self, drop: str | None = None, **extra: mx.array) -> None:
        """Change the draft's tensors; `__` in a name stands for a dot."""
        arrays = mx.load(str(self.draft / FILE))
        mx.eval(arrays)
        arrays |= {name.replace("__", "."): array for name, array in extra.items()}
        mx.save_safetensors(str(self.draft / FILE), {name: a for name, a in arrays.items() if name != drop})

    def header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the header of the draft's file."""
        data = (self.draft / FILE).read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        text = json.dumps(change(header) or header).encode()
        (self.draft / FILE).write_bytes(struct.pack("<Q", len(text)) + text + data[end:])

    def index(self, weight_map: Any) -> None:
        (self.draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def target_config(self, **changes: Any) -> None:
        config = {**target_config("qwen3"), **changes}
        kept = {key: value for key, value in config.items() if value is not None}
        (self.target / "config.json").write_text(json.dumps(kept))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    save_draft(folder / "draft", make_draft(), draft_config())
    save_target(folder / "target", make_target(), target_config("qwen3"))
    (folder / "target" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def pair(originals, tmp_path, cli, monkeypatch) -> Pair:
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    pair = Pair(tmp_path, cli)

    def load(path: str, **options: Any) -> None:
        pair.heavy.append(path)
        raise Loaded(path)

    monkeypatch.setattr(mlx_lm, "load", load)
    return pair


def assert_refused(outcome: Any, *says: str, code: int = 1) -> None:
    """One line on stderr that holds all of `says`, nothing on stdout."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.endswith("\n"), outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("dflash-mlx")
    assert ": error: " in outcome.err
    assert len(outcome.err) < 700
    for part in says:
        assert part in outcome.err


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_pair_itself_is_taken(pair):
    """Without it the tests below would prove nothing: this one gets as far as the target."""
    outcome = pair.generate()
    assert pair.heavy == [str(pair.target)]
    assert_refused(outcome, "mlx-lm can't load it (Loaded: ")
    assert pair.convert().code == 0


# the draft's folder


def truncated(pair: Pair, size: int) -> None:
    os.truncate(pair.draft / FILE, size)


def add_codes(pair: Pair) -> None:
    pair.tensors(lm_head__weight=mx.zeros((128, 64)), d2t=mx.zeros((128,), mx.int64), t2d=mx.zeros((256,), mx.bool_))


def quantized(pair: Pair, mode: Any = "affine", **parts: mx.array | None) -> None:
    """Layer 0's k_proj in 4 bits by groups of 32, with some of its parts replaced."""
    weight, scales, biases = mx.quantize(mx.ones((32, 64)), 32, 4)
    found = {"weight": weight, "scales": scales, "biases": biases, **parts}
    names = {f"layers__0__self_attn__k_proj__{part}": array for part, array in found.items() if array is not None}
    pair.tensors(**names)
    pair.config(quantization={"bits": 4, "group_size": 32, "mode": mode})


# what is done to the draft, and what both commands must say
DRAFTS: dict[str, tuple[Callable[[Pair], Any], tuple[str, ...]]] = {
    "missing folder": (lambda p: shutil.rmtree(p.draft), ("draft", "no such folder", "org/name")),
    "a file": (lambda p: (shutil.rmtree(p.draft), p.draft.write_text("")), ("is a file; give the folder",)),
    "empty folder": (lambda p: (shutil.rmtree(p.draft), p.draft.mkdir()), ("config.json: no such file",)),
    "no config": (lambda p: (p.draft / "config.json").unlink(), ("config.json: no such file",)),
    "config is no JSON": (lambda p: (p.draft / "config.json").write_text("{"), ("config.json: not valid JSON",)),
    "config is no text": (lambda p: (p.draft / "config.json").write_bytes(b"\xff\xfe"), ("not valid JSON",)),
    "config is a list": (lambda p: (p.draft / "config.json").write_text("[]"), ("JSON list, expected an object",)),
    "config with a number of 5000 digits": (
        lambda p: (p.draft / "config.json").write_text('{"a": ' + "9" * 5000 + "}"),
        ("not valid JSON",),
    ),
    "config nested for ever": (
        lambda p: (p.draft / "config.json").write_text("[" * 100_000 + "]" * 100_000),
        ("config.json: ",),
    ),
    "config nested deep": (lambda p: p.config(layer_types=nested(200)), ("nested more than 64 deep",)),
    "no weights": (lambda p: (p.draft / FILE).unlink(), ("no safetensors file",)),
    "weights of PyTorch": (
        lambda p: (p.draft / FILE).rename(p.draft / "pytorch_model.bin"),
        ("pytorch_model.bin: ",),
    ),
    "data cut short": (lambda p: truncated(p, 100_000), (FILE, "cut short: 100000 bytes", "download it again")),
    "header cut short": (lambda p: truncated(p, 50), (FILE, "not a safetensors file, or cut short (50 bytes)")),
    "nothing in the file": (lambda p: truncated(p, 0), ("cut short (0 bytes)",)),
    "garbage": (lambda p: (p.draft / FILE).write_bytes(b"\x7f" * 4096), ("not a safetensors file",)),
    "a header length beyond the file": (
        lambda p: (p.draft / FILE).write_bytes(struct.pack("<Q", 2**62) + b"{}" * 99),
        ("not a safetensors file",),
    ),
    "a header that is no JSON": (
        lambda p: (p.draft / FILE).write_bytes(struct.pack("<Q", 8) + b"{]}     " + b"\0" * 9),
        ("its header is no JSON object",),
    ),
    "a header that is a list": (lambda p: p.header(lambda h: [h]), ("its header is no JSON object",)),
    "metadata of numbers": (lambda p: p.header(lambda h: h.update(__metadata__={"a": 1})), ("MLX can't read it",)),
    "an entry without a shape": (
        lambda p: p.header(lambda h: h["norm.weight"].update(shape=None)),
        ("malformed header entry for 'norm.weight'",),
    ),
    "offsets of text": (
        lambda p: p.header(lambda h: h["norm.weight"].update(data_offsets=["0", "9"])),
        ("malformed header entry for 'norm.weight'",),
    ),
    "offsets that don't fit the shape": (
        lambda p: p.header(lambda h: h["norm.weight"].update(data_offsets=[0, 8])),
        ("norm.weight has 8 bytes, its shape [64] needs 256",),
    ),
    "offsets beyond the file": (
        lambda p: p.header(lambda h: h["norm.weight"].update(data_offsets=[2**40, 2**40 + 256])),
        ("cut short", "download it again"),
    ),
    "NaN": (
        lambda p: p.tensors(fc__weight=mx.full((64, 128), float("nan"))),
        ("fc.weight holds NaN or infinite values; the file is damaged",),
    ),
    "infinity": (
        lambda p: p.tensors(norm__weight=mx.full((64,), float("inf")), hidden_norm__weight=mx.full((64,), -mx.inf)),
        ("and 1 more holds NaN or infinite values",),
    ),
    "wrong shape": (
        lambda p: p.tensors(norm__weight=mx.ones((63,))),
        ("norm.weight has shape [63], config.json asks for [64]",),
    ),
    "another number of layers": (lambda p: p.config(num_hidden_layers=3), ("tensors layers.2.", "more are missing")),
    "missing tensor": (lambda p: p.tensors(drop="hidden_norm.weight"), ("tensor hidden_norm.weight is missing",)),
    "unknown tensor": (
        lambda p: p.tensors(layers__0__surprise=mx.ones((2,))),
        ("unknown tensor 'layers.0.surprise'; it belongs to no layout of a draft that is read",),
    ),
    "gated attention": (
        lambda p: p.tensors(layers__0__self_attn__g_proj__weight=mx.ones((4, 64))),
        ("gated attention, but config.json does not say how",),
    ),
    "second generation, by its tensors": (
        lambda p: p.tensors(candidate_selector__weight=mx.ones((4, 64))),
        ("a DFlash 2 draft, but config.json describes a DFlash (v1) draft", "candidate_selector"),
    ),
    "second generation, by its config": (
        lambda p: p.config(architectures=["DFlash2DraftModel"]),
        ("config.json: conv_kernel_size: missing",),
    ),
    "second generation without its tensors": (
        lambda p: p.config(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4),
        ("this is a DFlash (v1) draft, but config.json describes DFlash 2",),
    ),
    "DSpark": (lambda p: p.tensors(markov_head__weight=mx.ones((4, 64))), ("a DSpark draft",)),
    "its own head and vocabulary": (
        add_codes,
        ("a draft with a reduced vocabulary, but config.json has no draft_vocab_size", "'d2t'"),
    ),
    "its own embedding": (
        lambda p: p.tensors(embed_tokens__weight=mx.ones((250, 64))),
        ("embed_tokens.weight has shape [250, 64]", "[256, 64]"),
    ),
    "toolkit layout": (
        lambda p: p.config(transformer_layer_config={"hidden_size": 64}),
        ("transformer_layer_config.", "missing"),
    ),
    "EAGLE": (
        lambda p: p.config(architectures=["LlamaForCausalLMEagle3"], dflash_config=None, eagle_config={}),
        ("an EAGLE draft",),
    ),
    "quantised by another tool": (
        lambda p: p.tensors(layers__0__mlp__up_proj__weight_scale=mx.ones((96, 1))),
        ("up_proj: weight of dtype F32 with weight, weight_scale is a scheme that is not read",),
    ),
    "a dtype that is not read": (
        lambda p: p.tensors(norm__weight=mx.ones((64,), mx.int64)),
        ("norm.weight is stored as I64, which is not read yet",),
    ),
    "a norm of whole numbers": (
        lambda p: p.tensors(norm__weight=mx.ones((64,), mx.uint32)),
        ("norm.weight is stored as U32",),
    ),
    "scales of another shape": (
        lambda p: quantized(p, scales=mx.ones((32, 3)), biases=mx.ones((32, 3))),
        ("k_proj.weight [32, 8] with scales [32, 3] is no affine form of [32, 64]",),
    ),
    "scales without columns": (
        lambda p: quantized(p, scales=mx.ones((32, 0)), biases=mx.ones((32, 0))),
        ("is no affine form",),
    ),
    "scales of a vector": (
        lambda p: p.tensors(norm__scales=mx.ones((2,))),
        ("unknown tensor 'norm.scales'",),
    ),
    "a quantised matrix of 7 bits": (
        lambda p: quantized(p, weight=mx.zeros((32, 14), mx.uint32)),
        ("k_proj.weight [32, 14]", "is no affine form"),
    ),
    "a mode that MLX lacks": (lambda p: quantized(p, mode="gguf"), ("quantization mode 'gguf' is not one of affine",)),
    "a mode that is no name": (lambda p: quantized(p, mode=[4]), ("quantization mode [4] is not one of affine",)),
    "a mode without its biases": (lambda p: quantized(p, biases=None), ("is no affine form",)),
    "a mode with biases it can't have": (lambda p: quantized(p, mode="mxfp4"), ("is no mxfp4 form",)),
    "quantization of text": (lambda p: p.config(quantization="4bit"), ("quantization: '4bit' is not an object",)),
    "a target": (
        lambda p: (shutil.rmtree(p.draft), shutil.copytree(p.target, p.draft)),
        ("qwen3 is not a DFlash draft", "a target goes to --model"),
    ),
    "an index with a missing file": (
        lambda p: p.index({"norm.weight": "model-00001-of-00002.safetensors"}),
        ("model-00001-of-00002.safetensors: named by model.safetensors.index.json but missing; download",),
    ),
    "an index with a file elsewhere": (
        lambda p: p.index({"norm.weight": "../target/model.safetensors"}),
        ("weight_map must name files of this folder", "../target"),
    ),
    "an index with an absolute file": (lambda p: p.index({"norm.weight": "/etc/passwd"}), ("files of this folder",)),
    "an index with numbers": (lambda p: p.index({"norm.weight": [1]}), ("weight_map must name files",)),
    "an index that is a list": (lambda p: p.index(["model.safetensors"]), ("weight_map must name files",)),
    "an index of nothing": (lambda p: p.index({}), ("weight_map must name files",)),
    "a tensor in two files": (
        lambda p: shutil.copy(p.draft / FILE, p.draft / "other.safetensors"),
        ("is also in model.safetensors",),
    ),
    "architectures of text": (lambda p: p.config(architectures="DFlashDraftModel"), ("architectures:", "not a list")),
    "dflash_config that is a list": (lambda p: p.config(dflash_config=[1]), ("dflash_config: [1] is not an object",)),
    "no dflash_config": (lambda p: p.config(dflash_config=None), ("target_layer_ids: missing",)),
    "layer_types that is an object": (lambda p: p.config(layer_types={"a": 1}), ("layer_types: expected a list",)),
    "a size of text": (lambda p: p.config(hidden_size="64"), ("hidden_size: '64' is not a positive whole number",)),
    "a size beyond counting": (lambda p: p.config(intermediate_size=10**40), ("intermediate_size:", "out of range")),
    "a million layers": (lambda p: p.config(num_hidden_layers=10**6), ("num_hidden_layers: 1000000 is out of range",)),
    "heads too wide together": (lambda p: p.config(head_dim=2**30), ("head_dim: 1073741824", "too large")),
    "taps too wide together": (lambda p: p.config(target_hidden_size=2**30), ("2 taps of width 1073741824",)),
    "an odd head": (lambda p: p.config(head_dim=15), ("head_dim: 15 is odd",)),
    "a rope base that is a list": (lambda p: p.config(rope_theta=[1e4]), ("rope_theta: [10000.0]",)),
    "a rope base of infinity": (lambda p: p.config(rope_theta=float("inf")), ("rope_theta: inf",)),
    "a rope type that is a list": (lambda p: p.config(rope_scaling={"rope_type": ["yarn"]}), ("rope_type: ['yarn']",)),
    "a flag of text": (lambda p: p.config(attention_bias="no"), ("attention_bias: 'no' is not true or false",)),
    "a line as long as a file": (lambda p: p.config(layer_types=["x" * 10_000] * 9), ("layer_types",)),
}  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", DRAFTS)
def test_a_bad_draft_is_refused_by_generate_before_the_target_loads(pair, name):
    damage, says = DRAFTS[name]
    damage(pair)
    assert_refused(pair.generate(), *says)
    assert pair.heavy == []


@pytest.mark.parametrize("name", DRAFTS)
def test_a_bad_draft_is_refused_by_convert_and_nothing_is_written(pair, name):
    damage, says = DRAFTS[name]
    damage(pair)
    before = files(pair.folder)
    for flags in ([], ["-q", "--q-group-size", "32"], ["--to-hf"]):
        assert_refused(pair.convert(*flags), *says)
    assert files(pair.folder) == before
    assert {p.name for p in pair.folder.iterdir()} <= {"draft", "target"}


# the pair: what is done, and both numbers


def ship_tokenizers(pair: Pair) -> None:
    for folder, mask in ((pair.draft, 255), (pair.target, 251)):
        tokens = [{"content": "<|end|>", "id": 0}, {"content": "<|mask|>", "id": mask}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))


def ship(pair: Pair, name: str, draft: dict[str, Any], target: dict[str, Any]) -> None:
    for folder, content in ((pair.draft, draft), (pair.target, target)):
        (folder / name).write_text(json.dumps(content))


def decoder(**tokens: str) -> dict[str, Any]:
    """A tokenizer_config.json; id as `_7` -> token."""
    return {"added_tokens_decoder": {number[1:]: {"content": token} for number, token in tokens.items()}}


PAIRS: dict[str, tuple[Callable[[Pair], Any], tuple[str, ...]]] = {
    "vocabulary": (lambda p: p.config(vocab_size=300), ("vocab_size 300 against 256",)),
    "width": (lambda p: p.target_config(hidden_size=128), ("hidden_size 64 against 128",)),
    "width of the taps": (lambda p: p.config(target_hidden_size=32), ("target_hidden_size 32 against 64",)),
    "depth": (lambda p: p.config(num_target_layers=6), ("num_target_layers 6 against 4",)),
    "taps deeper than the target": (
        lambda p: p.config(num_target_layers=None, dflash_config={"target_layer_ids": [0, 9], "mask_token_id": 255}),
        ("taps layer 9 of 4 layers",),
    ),
    "special tokens": (ship_tokenizers, ("made for another tokenizer: '<|mask|>' is 255 there, 251 here",)),
    "special tokens of tokenizer_config.json": (
        lambda p: ship(p, "tokenizer_config.json", decoder(_7="<a>"), decoder(_8="<a>")),
        ("made for another tokenizer: '<a>' is 7 there, 8 here",),
    ),
    "special tokens of added_tokens.json": (
        lambda p: ship(p, "added_tokens.json", {"<a>": 7}, {"<a>": 8}),
        ("made for another tokenizer: '<a>' is 7 there, 8 here",),
    ),
    "another special token at the same id": (
        lambda p: (
            ship(p, "added_tokens.json", {"<a>": 7}, {}),
            ship(p, "tokenizer_config.json", {}, decoder(_7="<b>", _255="<free>")),
        ),
        ("made for another tokenizer: 7 is '<a>' there, '<b>' here",),
    ),
    "a tokenizer_config.json with other tokens": (
        lambda p: ship(p, "tokenizer_config.json", {"added_tokens_decoder": {"a": {"content": "a"}}}, {}),
        ("tokenizer_config.json: added_tokens_decoder: ", "is not an object of ids with tokens"),
    ),
    "an added_tokens.json with other tokens": (
        lambda p: ship(p, "added_tokens.json", {"a": [1]}, {}),
        ("added_tokens.json: ", "is not an object of tokens with ids"),
    ),
    "a tokenizer that is no JSON": (
        lambda p: (p.draft / "tokenizer.json").write_text("{"),
        ("tokenizer.json: not valid JSON",),
    ),
    "a tokenizer with other tokens": (
        lambda p: (p.draft / "tokenizer.json").write_text('{"added_tokens": {"a": 1}}'),
        ("is not a list of tokens",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_does_not_fit_is_refused_with_both_numbers(pair, name):
    damage, says = PAIRS[name]
    damage(pair)
    assert_refused(pair.generate(), *says)
    assert pair.heavy == []


def test_the_mask_token_may_have_a_name_of_its_own(pair):
    ship(pair, "added_tokens.json", {"<|mask|>": 255}, {"<|reserved|>": 255})
    assert_refused(pair.generate(), "mlx-lm can't load it (Loaded: ")


def test_a_draft_of_another_tokenizer_is_refused_after_conversion_too(pair):
    ship_tokenizers(pair)
    ship(pair, "special_tokens_map.json", {"eos_token": "<|end|>"}, {})
    before = pair.generate()
    assert_refused(before, "made for another tokenizer")
    assert pair.convert().code == 0
    for name in ("tokenizer.json", "special_tokens_map.json"):
        assert (pair.out / name).read_bytes() == (pair.draft / name).read_bytes()
    after = pair.generate(draft=pair.out)
    assert_refused(after, before.err.strip().replace(str(pair.draft), str(pair.out)))
    assert pair.heavy == []


def test_a_tokenizer_file_that_is_a_pipe_or_leads_out_is_not_carried(pair):
    name = pair.draft / "added_tokens.json"
    os.mkfifo(name)
    assert_refused(pair.convert(), "added_tokens.json: no regular file")
    name.unlink()
    (pair.folder / "elsewhere").write_text("{}")
    name.symlink_to(pair.folder / "elsewhere")
    assert_refused(pair.convert(), "added_tokens.json: a link that leads out")
    assert not pair.out.exists()


# the target: what is done to it with an explicit draft beside it

TARGETS: dict[str, tuple[Callable[[Pair], Any], tuple[str, ...]]] = {
    "missing folder": (lambda p: shutil.rmtree(p.target), ("target", "no such folder", "org/name")),
    "a file": (lambda p: (shutil.rmtree(p.target), p.target.write_text("")), ("is a file; give the folder",)),
    "empty folder": (lambda p: (shutil.rmtree(p.target), p.target.mkdir()), ("no config.json in", "--model takes")),
    "config is no JSON": (lambda p: (p.target / "config.json").write_text("{"), ("config.json: not valid JSON",)),
    "config is a list": (lambda p: (p.target / "config.json").write_text("[]"), ("JSON list, expected an object",)),
    "a draft": (
        lambda p: (shutil.rmtree(p.target), shutil.copytree(p.draft, p.target)),
        ("is a DFlash draft, not a target; give it as --draft-model",),
    ),
    "a family that can't be driven": (
        lambda p: p.target_config(model_type="phi3small"),
        ("no draft can drive a phi3small model", "--draft-model none"),
    ),
    "an unknown family": (lambda p: p.target_config(model_type="qwen9"), ("mlx-lm has no model type 'qwen9'",)),
    "a family that is no name": (lambda p: p.target_config(model_type=["qwen3"]), ("no model type ['qwen3']",)),
    "a module that is no family": (lambda p: p.target_config(model_type="cache"), ("no model type 'cache'",)),
    "a family that wants a package": (
        lambda p: p.target_config(model_type="olmo"),
        ("mlx-lm can't import 'olmo': ", "pip install ai2-olmo"),
    ),
    "no family": (lambda p: p.target_config(model_type=None), ("mlx-lm has no model type",)),
    "no width": (lambda p: p.target_config(hidden_size=None), ("has no hidden_size, so no draft can be matched",)),
    "width of text": (lambda p: p.target_config(hidden_size="64"), ("hidden_size: '64' is not a number from 1",)),
    "a million layers": (lambda p: p.target_config(num_hidden_layers=10**6), ("num_hidden_layers: 1000000",)),
    "text_config that is a list": (lambda p: p.target_config(text_config=[1]), ("text_config: [1] is not an object",)),
    "a config that mlx-lm can't build": (
        lambda p: p.target_config(num_attention_heads=None),
        ("mlx-lm can't build a qwen3 from its config.json", "num_attention_heads"),
    ),
    "no tokenizer": (lambda p: (p.target / "tokenizer.json").unlink(), ("no tokenizer in", "copy the files")),
    "a broken generation config": (
        lambda p: (p.target / "generation_config.json").write_text("{"),
        ("generation_config.json: not valid JSON",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_bad_target_is_refused_before_it_loads(pair, name):
    damage, says = TARGETS[name]
    damage(pair)
    assert_refused(pair.generate(), *says)
    assert pair.heavy == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: os.truncate(p.target / FILE, 1000),
        lambda p: (p.target / FILE).write_bytes(b"\x7f" * 4096),
        lambda p: (p.target / FILE).unlink(),
        lambda p: p.target_config(num_hidden_layers=5),
        lambda p: p.target_config(num_attention_heads=None),
        lambda p: p.target_config(model_type=None),
        lambda p: p.target_config(model_type=["qwen3"]),
        lambda p: p.target_config(rope_scaling={"rope_type": "spiral"}),
        lambda p: p.target_config(quantization="4bit"),
        lambda p: p.target_config(eos_token_id="end"),
    ],
)
def test_what_mlx_lm_can_not_load_is_one_line_without_a_draft_too(pair, monkeypatch, damage):
    monkeypatch.undo()  # mlx-lm's own load
    damage(pair)
    outcome = pair.generate(draft="none")
    assert outcome.code == 1
    assert outcome.out == ""
    note, error = outcome.err.splitlines()
    assert note == "no draft: none was asked for"
    assert error.startswith(f"dflash-mlx: error: {pair.target}: mlx-lm can't load it (")


# flags

FLAGS: dict[str, tuple[list[str], str]] = {
    "--block-size 0": (["--block-size", "0"], "argument --block-size: 0 is out of range, 1 is the least"),
    "--block-size of text": (["--block-size", "many"], "argument --block-size: 'many' is not a number"),
    "--temp below 0": (["--temp", "-1"], "argument --temp: -1 is out of range"),
    "--temp nan": (["--temp", "nan"], "argument --temp: nan is out of range"),
    "--temp inf": (["--temp", "inf"], "argument --temp: inf is out of range"),
    "--max-tokens 0": (["--max-tokens", "0"], "argument --max-tokens/-m: 0 is out of range"),
    "--max-tokens of text": (["--max-tokens", "1e3"], "argument --max-tokens/-m: '1e3' is not a number"),
    "--seed below 0": (["--seed", "-1"], "argument --seed: -1 is out of range"),
    "--prefill-step-size 0": (["--prefill-step-size", "0"], "argument --prefill-step-size: 0 is out of range"),
    "--kv-bits 7": (["--kv-bits", "7"], "argument --kv-bits: invalid choice: 7"),
    "--top-p 2": (["--top-p", "2"], "argument --top-p: 2 is out of range, 1 is the most"),
    "--draft-window 0": (["--draft-window", "0"], "argument --draft-window: 0 is out of range"),
    "--attn-implementation": (["--attn-implementation", "flash"], "invalid choice: 'flash'"),
    "template arguments that are no JSON": (["--chat-template-config", "{a"], "--chat-template-config: not valid JSON"),
    "template arguments that are a list": (["--chat-template-config", "[]"], "expected a JSON object"),
    "a flag that is not there": (["--blocksize", "4"], "unrecognized arguments: --blocksize 4"),
    "a flag without its value": (["--seed"], "argument --seed: expected one argument"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_bad_flag_of_generate_is_one_line(pair, name):
    flags, says = FLAGS[name]
    assert_refused(pair.generate(*flags), says, "--help", code=2)
    assert pair.heavy == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "--prompt", "x"], "the following arguments are required: --model"),
        (["generate", "--model", "demo"], "the following arguments are required: --prompt"),
        (["convert"], "the following arguments are required: --hf-path"),
        (["convert", "--hf-path", "demo", "--q-bits", "four"], "argument --q-bits: invalid int value: 'four'"),
        (["translate"], "invalid choice: 'translate'"),
    ],
)
def test_a_command_without_what_it_needs_is_one_line(cli, argv, says):
    assert_refused(cli(*argv), says, "--help", code=2)


def test_a_block_larger_than_the_drafts_is_refused(pair):
    assert_refused(pair.generate("--block-size", "64"), "--block-size 64 is out of range", "blocks have 1 to 8 tokens")
    assert pair.heavy == []


def test_a_block_without_a_draft_is_refused(pair):
    outcome = pair.generate("--block-size", "4", draft="none")
    assert outcome.code == 1
    assert outcome.err.splitlines()[1:] == ["dflash-mlx: error: --block-size 4 is out of range: there is no draft"]
    assert pair.heavy == []


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_a_window_without_a_draft_is_refused(pair, draft):
    outcome = pair.generate("--draft-window", "64", draft=draft)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == (
        "dflash-mlx: error: --draft-window 64: there is no draft that could look back"
    )
    assert pair.heavy == []


def test_the_demo_pair_has_blocks_of_16(pair):
    assert_refused(pair.generate("--block-size", "64", model="demo", draft="demo"), "blocks have 1 to 16 tokens")
    assert pair.heavy == []


def test_missing_adapters_are_refused_before_anything_loads(pair):
    assert_refused(pair.generate("--adapter-path", pair.folder / "lora"), "no adapter_config.json there")
    assert pair.heavy == []


CONVERT_FLAGS: dict[str, tuple[list[str], str]] = {
    "bits": (["-q", "--q-bits", "7"], "--q-bits 7: mode affine has 2, 3, 4, 5, 6, 8"),
    "no bits": (["-q", "--q-bits", "0"], "--q-bits 0: mode affine has 2, 3, 4, 5, 6, 8"),
    "group": (["-q", "--q-group-size", "48"], "--q-group-size 48: mode affine has 32, 64, 128"),
    "no group": (["-q", "--q-group-size", "0"], "--q-group-size 0: mode affine has 32, 64, 128"),
    "bits of a mode": (["-q", "--q-mode", "mxfp8", "--q-bits", "4"], "--q-bits 4: mode mxfp8 has 8"),
    "group of a mode": (["-q", "--q-mode", "nvfp4", "--q-group-size", "32"], "--q-group-size 32: mode nvfp4 has 16"),
    "mode": (["-q", "--q-mode", "gguf"], "--q-mode gguf is not one of affine, mxfp4, nvfp4, mxfp8"),
    "bits without -q": (["--q-bits", "4"], "--q-bits, --q-group-size and --q-mode need -q"),
    "mode without -q": (["--q-mode", "mxfp4"], "--q-bits, --q-group-size and --q-mode need -q"),
    "nothing to quantise": (
        ["-q", "--q-group-size", "128"],
        "-q: no matrix has columns that --q-group-size 128 divides; choose a smaller one or another --q-mode",
    ),
    "dtype": (["--dtype", "int8"], "--dtype int8 is not one of float16, bfloat16, float32"),
    "back and quantised": (["--to-hf", "-q"], "--to hf writes unquantised weights; leave out -q"),
    "JSON of a conversion": (["--json"], "--json goes with --inspect"),
    "a look with -q": (["--inspect", "-q"], "--inspect writes nothing; leave out --quantize"),
    "a look with a dtype": (["--inspect", "--dtype", "float32"], "--inspect writes nothing; leave out --dtype"),
    "a look with --to-hf": (["--inspect", "--to-hf"], "--inspect writes nothing; leave out --to-hf"),
    "a look with an upload": (["--inspect", "--upload-repo", "a/b"], "--inspect writes nothing; leave out --upload"),
    "a look with a mode": (["--inspect", "--q-mode", "affine"], "--inspect writes nothing; leave out --q-mode"),
    "a look with --force": (["--inspect", "--force"], "--inspect writes nothing; leave out --force"),
    "a look with --to": (["--inspect", "--to", "mlx"], "--inspect writes nothing; leave out --to"),
    "a look with a folder": (["--inspect"], "--inspect writes nothing; leave out --mlx-path"),
    "--force alone": (["--force", "--dtype", "float32"], "--force goes with --dtype float16"),
    "two layouts": (["--to-hf", "--to", "mlx"], "--to-hf is --to hf; leave one of them out"),
    "revision of a folder": (["--revision", "main"], "--revision is a repo's, and"),
    "revision of the demo": (["--hf-path", "demo", "--revision", "main"], "--revision is a repo's, and demo is"),
    "an upload to no name": (["--upload-repo", "a b"], "--upload-repo 'a b' is no valid repo name"),
    "an upload to nothing": (["--upload-repo", ""], "--upload-repo '' is no valid repo name"),
    "a file in the way": (["--mlx-path", "{}/draft/config.json/a/out"], "draft/config.json is a file"),
}


@pytest.mark.parametrize("name", CONVERT_FLAGS)
def test_a_bad_flag_of_convert_is_one_line_and_nothing_is_written(pair, name):
    flags, says = CONVERT_FLAGS[name]
    before = files(pair.folder)
    assert_refused(pair.convert(*(flag.format(pair.folder) for flag in flags)), says)
    assert files(pair.folder) == before
    assert {p.name for p in pair.folder.iterdir()} == {"draft", "target"}


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to")
def test_a_destination_that_can_not_be_written_is_one_line(pair):
    assert_refused(pair.convert("--mlx-path", "/proc/self/out"), "/proc/self/")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_permissions_are_named(pair, mode):
    (pair.draft if mode == 0 else pair.folder).chmod(mode)
    try:
        assert_refused(pair.convert(), "Permission denied")
        if mode == 0:
            assert_refused(pair.generate(), "Permission denied")
    finally:
        (pair.draft if mode == 0 else pair.folder).chmod(0o700)
    assert pair.heavy == []


# prompts


def test_an_empty_prompt_is_refused_first(pair, monkeypatch):
    shutil.rmtree(pair.target)
    assert_refused(pair.generate("--prompt", ""), "the prompt is empty; give --prompt some text")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert_refused(pair.generate("--prompt", "-"), "the prompt is empty; give --prompt some text")


@pytest.mark.parametrize("flags", [["--system-prompt", "be brief"], ["--chat-template-config", '{"a": 1}']])
def test_what_only_a_chat_template_takes_is_refused_without_one(cli, flags):
    outcome = cli("generate", "--model", "demo", "--prompt", "x", *flags)
    assert_refused(outcome, "no chat template for --system-prompt", "--ignore-chat-template")


def test_a_template_that_refuses_is_quoted(tmp_path, cli):
    shutil.copytree(demo.TARGET, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ raise_exception('no system\nprompts') }}")
    outcome = cli("generate", "--model", tmp_path / "chat", "--draft-model", "demo", "--prompt", "x")
    assert_refused(outcome, "the chat template refused the prompt: no system prompts; --ignore-chat-template skips it")


# the hub, out of reach


@pytest.mark.parametrize("command", ["draft", "target", "convert", "inspect"])
def test_a_repo_without_the_hub_is_one_line(pair, monkeypatch, command):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name = "no-such-lab/no-such-model"
    outcome = {
        "draft": lambda: pair.generate(draft=name),
        "target": lambda: pair.generate(model=name),
        "convert": lambda: pair.convert("--hf-path", name),
        "inspect": lambda: pair.cli("convert", "--hf-path", name, "--inspect"),
    }[command]()
    assert_refused(outcome, name, "HF_HUB_OFFLINE is set; unset it once or give a local folder")
    assert pair.heavy == []
    assert not pair.out.exists()


# anything at all in config.json

KEYS = sorted({*draft_config(), "layer_types", "sliding_window", "rope_scaling", "rope_parameters", "quantization",
               "quantization_config", "is_causal", "use_swa", "target_hidden_size", "final_logit_softcapping",
               "input_embedding_scale", "torch_dtype", "base_model", "partial_rotary_factor", "causal"})  # fmt: skip
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
             "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"]  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 1024, 2**31 - 1, 2**31, 2**63, 10**400, 1e-320, 1e308, 0.5, -0.0]),
    st.floats(),
    st.integers(-(10**6), 10**6),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.sampled_from(["yarn", "llama3", "linear"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(ROPE_KEYS), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=8,
)
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), st.one_of(NUMBERS, VALUES), max_size=5)
CONFIGS = st.dictionaries(st.sampled_from(KEYS), st.one_of(VALUES, NUMBERS, ROPES), min_size=1, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "U32", "F64", "X9"]), VALUES),
        "shape": st.one_of(st.just([64]), VALUES),
        "data_offsets": st.one_of(st.just([0, 256]), VALUES),
    },
)
FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reset(pair: Pair, originals: Path) -> None:
    shutil.rmtree(pair.draft)
    shutil.copytree(originals / "draft", pair.draft)


def assert_no_surprise(pair: Pair) -> None:
    """Every command ends in one line or in an answer."""
    look = pair.cli("convert", "--hf-path", pair.draft, "--inspect", "--json")
    if look.code == 0:
        assert json.loads(look.out)["kind"] == "DFlash draft"
        assert look.err == ""
    else:
        assert_refused(look)
    outcome = pair.generate()
    if look.code == 0 and json.loads(look.out)["problem"]:
        assert pair.heavy == []
    assert_refused(outcome)
    assert pair.cli("convert", "--hf-path", pair.draft, "--inspect").code == look.code
    pair.heavy.clear()


@FUZZ
@given(changes=CONFIGS)
def test_no_config_ends_in_a_traceback(pair, changes):
    (pair.draft / "config.json").write_text(json.dumps({**draft_config(), **changes}))
    assert_no_surprise(pair)


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(["target_layer_ids", "mask_token_id", "block_size", "causal"]), VALUES))
def test_no_nested_config_ends_in_a_traceback(pair, changes):
    config = draft_config()
    config["dflash_config"] |= changes
    (pair.draft / "config.json").write_text(json.dumps(config))
    assert_no_surprise(pair)


@FUZZ
@given(
    name=st.sampled_from(["norm.weight", "fc.weight", "__metadata__", "layers.0.mlp.up_proj.scales"]),
    entry=st.one_of(VALUES, ENTRIES),
)
def test_no_header_ends_in_a_traceback(pair, originals, name, entry):
    reset(pair, originals)
    pair.header(lambda header: header.update({name: entry}))
    assert_no_surprise(pair)


@FUZZ
@given(value=VALUES)
def test_no_index_ends_in_a_traceback(pair, value):
    pair.index(value)
    assert_no_surprise(pair)


@FUZZ
@given(
    changes=st.dictionaries(
        st.sampled_from([*target_config("qwen3"), "text_config", "architectures", "eos_token_id", "rope_scaling",
                         "quantization", "dflash_config"]),
        st.one_of(VALUES, st.sampled_from([0, -1, 2**31, 10**400, 0.5])), min_size=1, max_size=2,
    )
)  # fmt: skip
def test_no_target_config_ends_in_a_traceback(pair, changes):
    (pair.target / "config.json").write_text(json.dumps({**target_config("qwen3"), **changes}))
    assert_refused(pair.generate())
