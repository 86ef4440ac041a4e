"""Writes the tensors of a draft, an output file at a time, cast, quantised or dequantised on the way.

Knows tensors and files; which draft, layout and options is settled by `convert.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from dflash_mlx.checkpoint.tensor_info import FLOATS, TensorInfo
from dflash_mlx.checkpoint.weights import Layout, Quantized, make, refuse_bad_ids, refuse_non_finite, target_ids
from dflash_mlx.draft.config import DraftConfig
from dflash_mlx.errors import DFlashError

SHARD_BYTES = 5 * 10**9  # of the source; mlx-lm's own limit
KEPT = {  # matrices that are never quantised, by a part of their names, and why
    "fc.weight": "reads the target's raw hidden states",
    "embed_tokens.weight": "looked up by rows, so its size costs no time",
    "lm_head.weight": "picks the tokens",
    "_codebook": "a table of the candidate selector, looked up by rows",
    "base_kernel": "a convolution of a few rows",
    "kernel_projection": "makes the kernels of the convolution",
    "hidden_projection": "scores the candidates",
}
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass
class Conversion:
    """What was written: `nbytes` of tensors in `files`, and matrices left unquantised with the reason."""

    path: Path
    config: DraftConfig
    tensors: int = 0
    nbytes: int = 0
    quantized: int = 0
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Writer:
    """Streams tensors from source files to output files, about one file's worth in memory."""

    tensors: Mapping[str, TensorInfo]
    layout: Layout
    scheme: Quantized | None
    dtype: str | None
    to: str
    result: Conversion

    def write(self, folder: Path, progress: Callable[[int, int], None]) -> None:
        groups = list(self._groups())
        total, done = sum(recipe.nbytes for recipe in self.layout.recipes.values()), 0
        index: dict[str, str] = {}
        for i, names in enumerate(groups, 1):
            file = "model.safetensors" if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
            arrays = self._convert(names)
            try:
                mx.save_safetensors(
                    str(folder / file), arrays, metadata={"format": "mlx" if self.to == "mlx" else "pt"}
                )
            except RuntimeError as error:
                raise DFlashError(f"{self.result.path}: can't be written ({error}); is the disk full?") from None
            index.update(dict.fromkeys(arrays, file))
            self.result.tensors += len(arrays)
            self.result.nbytes += sum(array.nbytes for array in arrays.values())
            done += sum(self.layout.recipes[name].nbytes for name in names)
            del arrays
            mx.clear_cache()
            progress(done, total)
        if len(groups) > 1:
            meta = {"metadata": {"total_size": self.result.nbytes}, "weight_map": dict(sorted(index.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(meta, indent=4) + "\n")

    def _groups(self) -> Iterator[list[str]]:
        """Names by output file; the parts of a quantised matrix stay together."""

        def module(name: str) -> str:
            return name.rpartition(".")[0]

        group: list[str] = []
        size = 0
        for _, parts in itertools.groupby(sorted(self.layout.recipes, key=module), module):
            names = sorted(parts)
            more = sum(self.layout.recipes[name].nbytes for name in names)
            if group and size + more > SHARD_BYTES:
                yield group
                group, size = [], 0
            group += names
            size += more
        yield group

    def _convert(self, names: list[str]) -> dict[str, mx.array]:
        arrays = make(names, self.layout.recipes, self.tensors)  # lazy
        folder = self.layout.recipes[names[0]].file.parent
        refuse_non_finite(arrays, folder)
        refuse_bad_ids(arrays, self.layout, self.tensors, folder)
        out: dict[str, mx.array] = {}
        for name, array in arrays.items():
            path, _, kind = name.rpartition(".")
            if path in self.layout.quantized:
                if self.to == "mlx":
                    out[name] = array
                elif kind == "weight":
                    out[name] = self._dequantized(path, arrays)
                elif kind == "bias":
                    out[name] = self._cast(array)
            elif self.scheme and kind == "weight" and self._quantizable(name):
                parts = mx.quantize(self._cast(array), self.scheme.group_size, self.scheme.bits, mode=self.scheme.mode)
                out.update(zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=False))
                self.result.quantized += 1
            else:
                out[name] = self._cast(array)
        if self.to == "speculators" and "d2t" in out:
            out["t2d"] = target_ids(out["d2t"], self.layout.config.vocab_size)
            out["d2t"] = out["d2t"].astype(mx.int64)
        return out

    def _quantizable(self, name: str) -> bool:
        assert self.scheme is not None
        shape = self.layout.recipes[name].shape
        if len(shape) != 2:
            return False
        if reason := next((why for part, why in KEPT.items() if part in name), None):
            self.result.kept.append(f"{name} ({reason})")
            return False
        if shape[1] % self.scheme.group_size:
            self.result.kept.append(f"{name} ({shape[1]} columns, no multiple of {self.scheme.group_size})")
            return False
        return True

    def _dequantized(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        how = self.layout.quantized[path]
        weight = mx.dequantize(
            arrays[f"{path}.weight"], arrays[f"{path}.scales"], arrays.get(f"{path}.biases"),
            how.group_size, how.bits, mode=how.mode,
        )  # fmt: skip
        self.result.notes.append(f"{path} dequantised from {how.bits} bits")
        own = FLOATS[self.layout.recipes["norm.weight"].dtype]  # mxfp4 and its like don't keep it
        return self._cast(weight.astype(own))

    def _cast(self, array: mx.array) -> mx.array:
        return array.astype(DTYPES[self.dtype]) if self.dtype and mx.issubdtype(array.dtype, mx.floating) else array
