"""`dflash-mlx chat`: a conversation in the terminal; each turn feeds only what the caches do not hold."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .options import (
    add_end_tokens,
    add_generation_arguments,
    add_pair_arguments,
    json_object,
    logits_processors,
    sampling_options,
)
from .pair import cache_options, load_pair

HELP = """/reset          start over
/system TEXT    set the system message and start over (no TEXT: none)
/stats          figures of the last answer
/help           this
/quit           leave (or Ctrl-D); Ctrl-C stops an answer, not the chat"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument("--system-prompt", help="system message")
    parser.add_argument("--chat-template-config", type=json_object, default={}, metavar="JSON", help="for the template")
    add_generation_arguments(parser, max_tokens=2048)


def run(args: argparse.Namespace) -> int:
    plan, model, draft, tokenizer = load_pair(args)
    add_end_tokens(tokenizer, args.extra_eos_token)
    chat = Chat(args, model, draft, tokenizer)
    print(f"{args.model} with draft {plan.draft or 'none'}; /help lists the commands", file=sys.stderr)
    while True:
        try:
            line = input(">> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not line.strip():
            continue
        if line.startswith("/"):
            if not chat.command(line):
                return 0
        else:
            try:
                chat.answer(line)
            except KeyboardInterrupt:  # a second one, or before the answer began
                chat.forget_turn()
                print(" [stopped]", file=sys.stderr)


class Chat:
    """History, caches and the figures of the last answer."""

    def __init__(self, args: argparse.Namespace, model: Any, draft: Any, tokenizer: Any):
        from ..prompt_cache import PromptCache

        self.args, self.model, self.draft, self.tokenizer = args, model, draft, tokenizer
        self.system: str | None = args.system_prompt
        self.messages: list[dict[str, str]] = []
        self.cache = PromptCache(model, draft, args.max_kv_size)
        self.last = "no answer yet"

    def command(self, line: str) -> bool:
        """Run a slash command; False ends the chat."""
        name, _, text = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name in ("/reset", "/system"):
            self.system = (text.strip() or None) if name == "/system" else self.system
            self.messages = []
        elif name == "/stats":
            print(self.last, file=sys.stderr)
        else:
            print(HELP, file=sys.stderr)
        return True

    def answer(self, text: str) -> None:
        """One turn, streamed. Ctrl-C ends the answer; what was said stays in the history."""
        from ..api import stream_generate
        from ..decode import GenerationStats

        self.messages.append({"role": "user", "content": text.encode("utf-8", "replace").decode()})
        try:
            ids = self._ids()
            rest = self.cache.rest(ids)
        except Exception as error:  # a template is the checkpoint's own code and raises what it likes
            self.messages.pop()
            print(f"that could not be rendered: {' '.join(str(error).split())}", file=sys.stderr)
            return
        cached, stats = len(ids) - len(rest), GenerationStats()
        answer, tokens, fed = "", [], [0]  # how much of the prompt the caches hold
        responses = stream_generate(
            self.model,
            self.tokenizer,
            rest,
            self.args.max_tokens,
            self.draft,
            temp=self.args.temp,
            seed=self.args.seed,
            acceptance=self.args.acceptance,
            logits_processors=logits_processors(self.args),
            stop=self.args.stop,
            block_size=self.args.block_size if self.draft is not None else None,
            prefill_step_size=self.args.prefill_step_size,
            prompt_cache=self.cache.caches,
            prompt_progress_callback=lambda done, total: fed.append(min(done, total - 1)),
            stats=stats,
            keep_costs=True,
            **sampling_options(self.args, self.tokenizer),
            **cache_options(self.args),
        )
        try:
            for response in responses:
                tokens.append(response.token)
                answer += response.text
                print(response.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
            responses.close()
        print(flush=True)
        if stats.cache_lost:
            self.cache.reset()
        else:
            self.cache.extend(rest if tokens else rest[: fed[-1]], tokens)
        if tokens:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        self.last = f"{stats.summary()}; {cached} prompt tokens cached"

    def forget_turn(self) -> None:
        """Without the question that has no answer; the caches are filled anew."""
        self.cache.reset()
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def _ids(self) -> list[int]:
        from ..prompt import apply_template

        messages = ([{"role": "system", "content": self.system}] if self.system else []) + self.messages
        if not self.tokenizer.has_chat_template:
            text = "".join(message["content"] + "\n" for message in messages)
            return self.tokenizer.encode(text)
        options = self.args.chat_template_config
        rendered = apply_template(self.tokenizer, messages, add_generation_prompt=True, **options)
        return self.tokenizer.encode(rendered, add_special_tokens=False)
