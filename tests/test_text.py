"""Case C12: streamed chunks join to exactly what the tokenizer decodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_mlx import demo
from dflash_mlx.decode.text import TextStream

TEXTS = [
    " leading space", " ", "  double  spaces  ",
    "emoji 👩‍👩‍👧‍👦 and 🇨🇭", "日本語のテキスト", "שלום עולם", "naïve café é",
    "a\n\n\nb\r\n\tc", "don't stop . really , no ! I 'm sure ?", "x" * 300, "mixed 日本 👍 ok\n", "",
]  # fmt: skip
SPECIAL = ["<|end|>", "<|user|>"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece_style(clean: bool = False) -> PreTrainedTokenizerFast:
    """Byte fallback and a decoder that strips the first space, as Llama 2's."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    letters = sorted(set("".join(TEXTS).replace(" ", "▁")) - set("👩‍👧👦日本שלום"))
    pieces += [*letters, "▁", "▁leading", "▁space", "▁don", "▁.", "▁,", "▁stop", "'m", "n't", "▁'", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=clean)


TOKENIZERS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece_style(),
    "sentencepiece with clean-up": sentencepiece_style(clean=True),
    "bundled": AutoTokenizer.from_pretrained(demo.TARGET),
}


def stream(tokenizer, ids) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.add(i) for i in ids), text.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_come_out_as_decoded(name):
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        ids = tokenizer.encode(text.replace(" ", "▁") if name.startswith("sentencepiece") else text)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_500_random_id_lists(name):
    """Invalid bytes, special tokens in the middle, byte runs that turn out broken: all of it."""
    tokenizer, dice = TOKENIZERS[name], random.Random(0)
    for _ in range(500):
        ids = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(60))]
        chunks = stream(tokenizer, ids)
        assert "".join(chunks) == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 258), min_size=1, max_size=12), st.lists(st.integers(3, 400), max_size=80))
def test_what_was_sent_is_never_taken_back(head, tail):
    for tokenizer in TOKENIZERS.values():
        ids = [min(i, len(tokenizer) - 1) for i in (*head, *tail, *head)]
        text, sent = TextStream(tokenizer), ""
        for n, token in enumerate(ids, 1):
            sent += text.add(token)
            assert tokenizer.decode(ids).startswith(sent), f"sent {sent!r} after {n} tokens"


def test_a_long_text_is_decoded_over_a_short_window():
    """Whole-text decoding at every token would be quadratic."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("the quick brown fox\n" * 200)
    decoded = []

    class Counting:
        clean_up_tokenization_spaces = False
        convert_ids_to_tokens = staticmethod(tokenizer.convert_ids_to_tokens)

        @staticmethod
        def decode(part):
            decoded.append(len(part))
            return tokenizer.decode(part)

    assert "".join(stream(Counting, ids)) == tokenizer.decode(ids)
    assert max(decoded) < 64


def test_mlx_lms_wrapper_is_accepted():
    tokenizer = TokenizerWrapper(TOKENIZERS["bundled"])
    ids = tokenizer.encode("def read(path):\n    return open(path)")
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
