"""The bundled pair: a 2.8 M-parameter target trained on Python source and a DFlash draft for it, and a DFlash 2 one.

It runs the main job on any machine without a download. Real acceptance, but no benchmark: the models are tiny.
"""

from __future__ import annotations

from pathlib import Path

NAME = "demo"  # what --model and load() call it
TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
DRAFTS = {NAME: DRAFT, "demo2": Path(__file__).parent / "draft2"}  # what --draft-model calls them
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
