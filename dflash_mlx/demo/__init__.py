"""The bundled pair: a 2.8 M-parameter target trained on Python source and a DFlash draft for it.

It runs the main job on any machine without a download. Real acceptance, but no benchmark: the models are tiny.
"""

from __future__ import annotations

from pathlib import Path

NAME = "demo"  # what --model and load() call it
TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
