"""Record what the reference MLX implementation (`dflash` 0.1.0) accepts with the bundled drafts.

Run where it is installed (`pip install --no-deps dflash==0.1.0`, with mlx-lm and transformers):

    python tests/reference/record_mlx.py

Writes `accepted_mlx.json`; the test that reads it needs none of this.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import dflash.model_mlx as reference
import mlx.core as mx
from mlx_lm import load

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "dflash_mlx" / "demo"
PROMPTS = [
    "def read_text(path):\n    with open(",
    "import os\nimport sys\n\n\n"
    "class Parser:\n    def __init__(self, stream, encoding=None):\n        self.stream = stream\n",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    a, b = 0, 1\n    for i in range(n):\n        ',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "try:\n    import json\nexcept ImportError:\n    json = None\n\n\ndef dump(obj, fp, *, indent=None):\n",
    "    def test_equal(self):\n        self.assertEqual(1, 1)\n\n    def test_not_equal(self):\n",
]
DRAFTS = ("draft", "draft2")
BLOCKS = (4, 8, 16)
TOKENS = 96


def main() -> None:
    reference.snapshot_download = lambda path, **_: path  # it takes repos only; the pair is a folder
    model, tokenizer = load(str(DEMO / "target"))
    model.set_dtype(mx.float32)
    drafts = {name: reference.load_draft(str(DEMO / name)) for name in DRAFTS}
    runs = []
    for (name, draft), prompt, block in itertools.product(drafts.items(), PROMPTS, BLOCKS):
        draft.set_dtype(mx.float32)
        responses = list(
            reference.stream_generate(model, draft, tokenizer, prompt, block_size=block, max_tokens=TOKENS)
        )
        runs.append(
            {
                "draft": name,
                "prompt": prompt,
                "block_size": block,
                "tokens": [token for r in responses for token in r.tokens],
                # its `accepted` counts the bonus token
                "emitted": [r.accepted for r in responses if r.accepted is not None],
            }
        )
    (HERE / "accepted_mlx.json").write_text(json.dumps({"max_tokens": TOKENS, "runs": runs}) + "\n")
    for name, block in itertools.product(DRAFTS, BLOCKS):
        rounds = [n for run in runs if (run["draft"], run["block_size"]) == (name, block) for n in run["emitted"]]
        print(f"{name}, block {block}: {len(rounds)} rounds, tau {sum(rounds) / len(rounds):.3f}")


if __name__ == "__main__":
    main()
