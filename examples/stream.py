"""Stream text from a target with its draft. Runs anywhere: python examples/stream.py"""

import sys

from dflash_mlx import load, stream_generate

name = sys.argv[1] if len(sys.argv) > 1 else "demo"
prompt = sys.argv[2] if len(sys.argv) > 2 else "def read_lines(path):\n"

model, draft, tokenizer = load(name)
for response in stream_generate(model, tokenizer, prompt, max_tokens=64, draft_model=draft):
    print(response.text, end="", flush=True)
print()
print(response.stats.summary(), file=sys.stderr)
