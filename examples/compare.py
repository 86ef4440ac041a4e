"""Prove that the draft changes no token, and show what each round accepted: python examples/compare.py"""

import mlx.core as mx
from mlx_lm.generate import generate_step as plain_step

from dflash_mlx import load, stream_generate

model, draft, tokenizer = load("demo")
prompt = "import os\n\n\ndef walk(root):\n"

plain = [token for token, _ in plain_step(mx.array(tokenizer.encode(prompt)), model, max_tokens=64)]
for block_size in (1, 4, 8, 16):
    *responses, last = stream_generate(model, tokenizer, prompt, 64, draft, block_size=block_size)
    tokens = [response.token for response in (*responses, last)]
    same = "identical" if tokens == plain[: len(tokens)] else "DIFFERENT"
    print(f"block {block_size:2}: {same}, {last.stats.rounds} rounds, tau {last.stats.tau:.2f}, {last.stats.accepted}")
