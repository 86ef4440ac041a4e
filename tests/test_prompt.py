"""Through the chat template: what nobody said is the template's own to decide, in every command."""

from __future__ import annotations

from argparse import Namespace

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving import TEMPLATE, save_tokenizer

from dflash_mlx.cli.chat import Chat
from dflash_mlx.cli.prompt import render
from dflash_mlx.prompt import apply_template
from dflash_mlx.serve.tokens import Front

OFF = """{% for m in messages %}{{ m.content }}{% endfor %}
{%- if enable_thinking is defined and enable_thinking %}<think>{% endif %}"""
USER = [{"role": "user", "content": "hi"}]


def generate_and_benchmark(tokenizer, options):
    args = Namespace(ignore_chat_template=False, system_prompt=None, chat_template_config=options)
    return tokenizer.decode(render(tokenizer, "hi", args).tolist())


def chat(tokenizer, options):
    conversation = Chat.__new__(Chat)  # loads nothing
    conversation.system, conversation.messages, conversation.tokenizer = None, USER, tokenizer
    conversation.args = Namespace(chat_template_config=options)
    return tokenizer.decode(conversation._ids())


def serve(tokenizer, options):
    return tokenizer.decode(
        Front(tokenizer, None, 1, "messages").apply_chat_template(USER, add_generation_prompt=True, **options)
    )


@pytest.mark.parametrize("command", [generate_and_benchmark, chat, serve])
@pytest.mark.parametrize(("template", "default"), [(OFF, False), (TEMPLATE, True)])
def test_the_templates_own_thinking_counts_unless_it_is_set(tmp_path, command, template, default):
    save_tokenizer(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_thinking
    for options, thinks in (
        ({}, default),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"other": 1}, default),
    ):
        assert command(tokenizer, options).endswith("<think>") == thinks


def test_a_template_in_python_is_told_what_mlx_lm_tells_it(tmp_path):
    save_tokenizer(tmp_path, OFF)
    tokenizer = load_tokenizer(tmp_path, {"chat_template_type": "deepseek_v32"})
    assert apply_template(tokenizer, USER, add_generation_prompt=True).endswith("<think>")
    assert apply_template(tokenizer, USER, add_generation_prompt=True, enable_thinking=False).endswith("</think>")


def test_a_renderer_of_the_tokenizers_own_decides_too_and_is_told_in_its_own_words(tmp_path):
    """Kimi's tokenizers render in Python and call it `thinking`."""
    save_tokenizer(tmp_path, OFF)
    inner = load_tokenizer(tmp_path)._tokenizer

    class Renderer(type(inner)):
        def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, thinking=False, **kwargs):
            assert "enable_thinking" not in kwargs
            return "<think>" if thinking else ""

    inner.__class__ = Renderer
    tokenizer = TokenizerWrapper(inner)
    assert apply_template(tokenizer, USER) == ""
    assert apply_template(tokenizer, USER, enable_thinking=True) == "<think>"
    assert apply_template(tokenizer, USER, thinking=True) == "<think>"
