"""Convert a draft to 8 bits and run it: python examples/convert_and_run.py [draft] [target]"""

import sys
import tempfile
from pathlib import Path

from dflash_mlx import convert_draft, inspect_draft, load, stream_generate

source = sys.argv[1] if len(sys.argv) > 1 else "demo"
target = sys.argv[2] if len(sys.argv) > 2 else "demo"

with tempfile.TemporaryDirectory() as folder:
    converted = Path(folder) / "draft-8bit"
    result = convert_draft(source, converted, quantize=True, q_bits=8, q_group_size=32)
    print(f"{result.quantized} matrices quantised, kept: {result.kept}")
    print(f"{inspect_draft(source).nbytes:,} bytes before, {inspect_draft(converted).nbytes:,} after")

    model, draft, tokenizer = load(target, draft_model=str(converted))
    for response in stream_generate(model, tokenizer, "class Queue:\n", max_tokens=48, draft_model=draft):
        print(response.text, end="", flush=True)
    print()
    print(response.stats.summary())
