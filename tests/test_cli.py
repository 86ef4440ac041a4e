"""The command line as a person meets it: streams, summary, --check, --json, Ctrl-C, help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as plain_step
from scripted import plain_tokens

from dflash_mlx import demo
from dflash_mlx.cli import COMMANDS, main
from dflash_mlx.pairs.families import families

DFLASH = [sys.executable, "-m", "dflash_mlx"]
GENERATE = ["generate", "--model", "demo", "--prompt", demo.PROMPT, "--max-tokens", "24"]


def test_text_on_stdout_and_the_summary_on_stderr(demo_pair, capsys):
    model, _, tokenizer = demo_pair
    assert main([*GENERATE, "--check"]) == 0
    out, err = capsys.readouterr()
    assert out == tokenizer.decode(plain_tokens(model, tokenizer.encode(demo.PROMPT), 24)) + "\n"
    summary, check = err.splitlines()[-2:]
    for part in ("draft demo", "block auto (", "rounds", "tau", "acceptance by position", "tokens/s", "peak memory"):
        assert part in summary
    assert check.startswith("check: identical to plain decoding (24 tokens")
    assert "x the speed of plain decoding" in check


def test_json_holds_text_tokens_statistics_and_verdict(demo_pair, capsys):
    model, _, tokenizer = demo_pair
    assert main([*GENERATE, "--check", "--json", "--block-size", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == plain_tokens(model, tokenizer.encode(demo.PROMPT), 24)
    assert report["text"] == tokenizer.decode(report["tokens"])
    assert report["finish_reason"] == "length"
    assert report["check"]["identical"]
    stats = report["stats"]
    assert stats["draft_used"]
    assert stats["block_size"] == 4
    assert stats["generation_tokens"] == 24 == 1 + sum(stats["accepted"]) + stats["bonus"]


@pytest.mark.parametrize("flags", [["--draft-model", "none"], ["--block-size", "1"]])
def test_a_run_without_a_draft_says_so(flags, capsys):
    assert main([*GENERATE, *flags]) == 0
    assert "no draft used" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_text_with_and_without_a_draft(capsys):
    texts = set()
    for flags in ([], ["--draft-model", "none"], ["--block-size", "3"]):
        assert main([*GENERATE, "--temp", "0.8", "--seed", "7", "--check", *flags]) == 0
        out, err = capsys.readouterr()
        texts.add(out)
        assert "identical" in err
    assert len(texts) == 1


def test_a_random_seed_is_reported(capsys):
    assert main([*GENERATE, "--temp", "1.0"]) == 0
    out, err = capsys.readouterr()
    seed = err.splitlines()[0].removeprefix("seed ")
    assert main([*GENERATE, "--temp", "1.0", "--seed", seed]) == 0
    assert capsys.readouterr().out == out


def test_verbose_shows_prompt_and_rounds(capsys):
    assert main([*GENERATE, "-v"]) == 0
    err = capsys.readouterr().err
    assert "prompt (27 tokens)" in err
    assert "round 1: 16 verified" in err


def test_the_prompt_may_come_from_stdin(monkeypatch, capsys):
    import io

    assert main(GENERATE) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(demo.PROMPT))
    assert main(["generate", "--model", "demo", "--prompt", "-", "--max-tokens", "24"]) == 0
    assert capsys.readouterr().out == expected


def test_a_chat_template_is_applied_and_can_be_skipped(tmp_path, capsys):
    import shutil

    folder = tmp_path / "chat"
    shutil.copytree(demo.TARGET, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if tone %}[{{ tone }}]{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    base = ["generate", "--model", str(folder), "--draft-model", "demo", "--prompt", "hi", "--max-tokens", "2", "-v"]
    rendered = {}
    for name, flags in {
        "chat": ["--system-prompt", "be brief", "--chat-template-config", '{"tone": "dry"}'],
        "plain": ["--system-prompt", "be brief", "--chat-template-config", '{"tone": "dry"}', "--draft-model", "none"],
        "raw": ["--ignore-chat-template"],
    }.items():
        assert main([*base, *flags]) == 0
        rendered[name] = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("prompt ("))
    assert "<|im_start|>system\\nbe brief<|im_end|>" in rendered["chat"]
    assert "[dry]<|im_start|>assistant" in rendered["chat"]
    assert rendered["plain"] == rendered["chat"], "the prompt does not depend on the draft"
    assert rendered["raw"].endswith("'hi'")


def test_auto_without_a_published_draft_decodes_plainly_and_visibly(tmp_path, capsys):
    import shutil

    folder = tmp_path / "unheard-of"
    shutil.copytree(demo.TARGET, folder)
    assert main(["generate", "--model", str(folder), "--prompt", "x = ", "--max-tokens", "4"]) == 0
    err = capsys.readouterr().err
    assert "no draft: no published draft is known" in err.splitlines()[0]
    assert "no draft used" in err


def test_benchmark_prints_a_table_and_writes_json(tmp_path, capsys):
    file, prompts = tmp_path / "figures.json", tmp_path / "prompts.txt"
    prompts.write_text("def a():\n---\nclass B:\n")
    flags = [
        "--block-sizes",
        "2,4",
        "--max-tokens",
        "12",
        "--repeat",
        "1",
        "--prompts",
        str(prompts),
        "--json",
        str(file),
    ]
    assert main(["benchmark", "--model", "demo", *flags]) == 0
    out = capsys.readouterr().out
    assert "speed-up" in out
    figures = json.loads(file.read_text())
    assert [row["block_size"] for row in figures["rows"]] == [1, 2, 4]
    assert all(row["lossless"] for row in figures["rows"])
    for row in figures["rows"]:
        assert row["speedup"] == pytest.approx(row["tau"] / row["rho"])
    assert figures["environment"]["mlx"]


def test_no_command_helps(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["convert", "--help"]])
def test_help_imports_nothing_that_takes_long(argv):
    """C34: it answers within a second; mlx-lm alone would take longer."""
    command = [sys.executable, "-X", "importtime", *DFLASH[1:], *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage: dflash-mlx" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "dflash_mlx" in imported
    assert not imported & {"mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "rich"}


def test_importing_the_package_needs_neither_torch_nor_a_gpu():
    code = "import dflash_mlx, sys; dflash_mlx.stream_generate; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_function_is_not_shadowed_by_a_module():
    code = "import dflash_mlx.api, dflash_mlx.cli.generate; from dflash_mlx import generate; generate.__call__"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_ends_with_the_summary():
    command = [*DFLASH, *GENERATE[:-1], "100000", "--prompt", "x = 1\n"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # under nohup it would be ignored
    )  # fmt: skip
    process.stdout.read(20)  # it streams
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert b"generated" in err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_is_no_error():
    command = " ".join([*DFLASH, "generate --model demo --max-tokens 3000 --prompt 'x = 1' | head -c 20"])
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=120)
    assert b"Traceback" not in done.stderr
    assert len(done.stdout) == 20


def test_models_lists_pairs_and_families(capsys):
    assert main(["models", "qwen3-8b", "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)
    assert {
        "target": "Qwen/Qwen3-8B",
        "draft": "z-lab/Qwen3-8B-DFlash-b16",
        "kind": "dflash",
        "block": 16,
    }.items() <= pairs[0].items()
    assert main(["models", "--families", "gemma", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gemma4"]["status"] == "verified"
    assert rows["gemma3n"]["status"] == "lookup only"
    assert rows["gemma3n"]["reason"]
    for flags in ([], ["--families"], ["nothing like this"]):
        assert main(["models", *flags]) == 0
        assert capsys.readouterr().out


def test_models_says_which_pairs_can_not_run_here(capsys, monkeypatch):
    assert main(["models", "--json"]) == 0
    problems = {row["draft"]: row["problem"] for row in json.loads(capsys.readouterr().out)}
    assert problems["z-lab/Qwen3-8B-DFlash-b16"] is None
    assert problems["deepseek-ai/dspark_qwen3_8b_block7"] == (
        "a DSpark draft with its own embedding and head, which is not supported"
    )
    assert problems["meta-models/Muse-Glimmer-30B-assistant"] == "a Muse assistant draft, which is not supported"
    assert problems["PixelML/Qwen3.8-Flash-Next-NVFP4-DFlash"] == "the installed mlx-lm has no model type 'qwen4_exp'"
    assert problems["z-lab/MiniMax-M2.5-DFlash"] is None  # a type that mlx-lm has under another name
    refused = replace(families()["qwen3"], status="refused", reason="its Cache can't be rewound")
    monkeypatch.setattr("dflash_mlx.pairs.fit.families", lambda: {"qwen3": refused})
    assert main(["models", "qwen3-8b-dflash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["problem"] == "qwen3 targets: its Cache can't be rewound"
    assert main(["models", "qwen3-8b-dflash"]) == 0
    assert "Cache can't be" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 200])
def test_models_fits_the_terminal_and_says_how_to_ask_for_an_older_generation(width, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["models", "qwen3.5-4b"]) == 0
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    table = [line for line in out.splitlines() if line[0] in "┃│"]
    assert max(map(len, table)) <= width
    assert "problem" in out
    assert ("original" in out) == (width >= 80)
    assert ("more columns in a wider window" in out) == (width < 200)
    assert "--draft-model auto --draft-revision 96899cc27094" in out


def test_a_family_that_is_known_not_to_work_is_refused_before_it_loads(tmp_path, capsys, monkeypatch):
    import matrix
    import mlx_lm

    config = {**matrix.CONFIGS["nanbeige"]["config"], "num_hidden_layers": 6, "hidden_size": 192, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(mlx_lm, "load", lambda *a, **k: pytest.fail("the target was loaded"))
    assert main(["generate", "--model", str(tmp_path), "--draft-model", "demo", "--prompt", "x"]) == 1
    err = capsys.readouterr().err
    assert "nanbeige" in err
    assert "called 2 times" in err


def test_json_gives_logprobs_of_the_target(demo_pair, capsys):
    model, _, tokenizer = demo_pair
    assert main([*GENERATE, "--json", "--logprobs", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    plain = list(plain_step(mx.array(tokenizer.encode(demo.PROMPT)), model, max_tokens=24))
    assert len(report["logprobs"]) == 24
    for entry, token, (expected, logprobs) in zip(report["logprobs"], report["tokens"], plain, strict=True):
        assert token == expected == entry["top"][0][0]
        assert entry["logprob"] == pytest.approx(logprobs[token].item(), abs=1e-5)
        assert [value for _, value in entry["top"]] == pytest.approx(sorted(logprobs.tolist())[:-4:-1], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--logit-bias", '{"-5000000": 5}'], "--logit-bias"),
        (["--logit-bias", '{"99999": 5}'], "--logit-bias"),
        (["--stop", ""], "--stop"),
        (["--extra-eos-token", "<|nothing|>"], "<|nothing|>"),
        (["--presence-penalty", "nan"], "--presence-penalty"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--chat-template-config", "[" * 5000], "--chat-template-config"),
        (["--prompt", "caf\udce9"], "UTF-8"),
        (["--kv-bits", "4", "--kv-group-size", "64"], "kv_group_size"),
        (["--acceptance", "rejection", "--temp", "1", "--check"], "--check"),
    ],
)
def test_decoding_flags_that_can_not_be_done_end_in_one_line(cli, flags, named):
    done = cli(*GENERATE, *flags)
    assert done.code != 0
    assert not done.out
    assert named in done.err
    assert "Traceback" not in done.err


def test_an_auto_draft_that_turns_out_damaged_is_left_out(tmp_path, monkeypatch):
    from dflash_mlx import DraftError, demo, loading

    def damaged(*args):
        raise DraftError("fc.weight holds NaN")

    monkeypatch.setattr(loading, "load_draft_folder", damaged)
    with pytest.warns(RuntimeWarning, match="NaN"):
        _, draft, _ = loading.load(demo.NAME)
    assert draft is None
    with pytest.raises(DraftError, match="NaN"):
        loading.load(demo.NAME, draft_model=demo.NAME)
