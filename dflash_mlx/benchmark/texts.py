"""The built-in prompts, of our own writing. Data only.

Each is there twice: as a request, for models with a chat template, and as the beginning of a text, for models
that complete one. "copy" prompts ask for text that is mostly in the prompt already.
"""

from __future__ import annotations

# (kind, request, beginning)
TEXTS: tuple[tuple[str, str, str], ...] = (
    (
        "chat",
        "A friend asks how a bicycle stays upright while it rolls. Explain it to her in a few sentences.",
        "Why does a bicycle stay upright while it rolls? The short answer is that",
    ),
    (
        "code",
        "Write a Python function merge_sorted(left, right) that merges two sorted lists without calling sort.",
        "def merge_sorted(left, right):\n    result = []\n    i = j = 0\n    while i < len(left):\n",
    ),
    (
        "math",
        "A train leaves at 9:40 and covers 84 km at 56 km/h. When does it arrive? Work it out step by step.",
        "A train leaves at 9:40 and covers 84 km at 56 km/h. When does it arrive?\nStep 1: the time it takes is",
    ),
    (
        "copy",
        "Repeat this list and add two entries of the same form:\n- alpha = 1\n- beta = 2\n- gamma = 3\n- delta = 4\n",
        "- alpha = 1\n- beta = 2\n- gamma = 3\n- delta = 4\nThe same list again, with two more entries:\n- alpha = 1\n",
    ),
    (
        "chat",
        "My neighbour's dog barks every night at eleven. Help me write a short, friendly note to him.",
        "Dear neighbour,\n\nI hope you are well. I am writing about your dog, who",
    ),
    (
        "code",
        "Write a Python class Stack with push, pop, peek and a length, and a docstring for each method.",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    ),
    (
        "math",
        "A garden is twice as long as it is wide and its fence measures 48 m. What is its area? Show each step.",
        "A garden is twice as long as it is wide and its fence measures 48 m.\nLet w be the width. Then the fence is",
    ),
    (
        "copy",
        "Rename the variable `count` to `total` and give the whole function back:\n\n"
        "def tally(rows):\n    count = 0\n    for row in rows:\n        if row.valid:\n            count += row.size\n"
        "    return count\n",
        "def tally(rows):\n    count = 0\n    for row in rows:\n        if row.valid:\n            count += row.size\n"
        "    return count\n\n\ndef tally_invalid(rows):\n    count = 0\n    for row in rows:\n",
    ),
    (
        "chat",
        "What should someone know before they walk in the mountains for the first time? Give five points.",
        "Five things to know before you walk in the mountains for the first time:\n1.",
    ),
    (
        "code",
        "Write a Python function that reads a CSV file and returns the mean of each numeric column as a dict.",
        "import csv\n\n\ndef column_means(path):\n    with open(path) as file:\n        rows = csv.DictReader(file)\n",
    ),
    (
        "math",
        "A price rises by 20 % and then falls by 25 %. By how many per cent has it changed? Explain each step.",
        "A price rises by 20 % and then falls by 25 %. If it was 100 at first, then after the rise it is",
    ),
    (
        "copy",
        "Correct the three spelling mistakes and give the whole paragraph back: The river rises in the hills, runs "
        "thruogh two lakes and reaches the sea after ninety miles. Its water is cold and claer, and the people who "
        "live on its banks fish there form April to October.",
        "The river rises in the hills, runs through two lakes and reaches the sea after ninety miles. Its water is "
        "cold and clear.\nThe same two sentences once more: The river rises in the hills,",
    ),
)
