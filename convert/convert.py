"""Convert a draft: any published layout to z-lab's names, for MLX (optionally quantised), PyTorch or `speculators`.

The options are checked, then everything is written (`writer.py`); the result appears whole or not at all. Knows
folders; the draft's facts and checks are `dflash_mlx.checkpoint`'s.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dflash_mlx.checkpoint.folder import TOKENIZER_FILES, regular_files
from dflash_mlx.checkpoint.readers import read_headers
from dflash_mlx.checkpoint.tensors import canonical_name
from dflash_mlx.checkpoint.weights import MODES, Layout, Quantized, check_tensors, folder_config
from dflash_mlx.draft.config import READ_HERE_ONLY, DraftConfig
from dflash_mlx.errors import DFlashError, DraftError
from dflash_mlx.loading import fetch_draft

from .card import check_repo_name, upload, write_card
from .export import find_verifier, speculators_config
from .licence import read_terms
from .unfinished import whole
from .writer import DTYPES, Conversion, Writer

LAYOUTS = ("mlx", "hf", "speculators")


def convert_draft(
    hf_path: str | Path,
    mlx_path: str | Path,
    *,
    revision: str | None = None,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    force: bool = False,
    to: str = "mlx",
    to_hf: bool = False,
    target: str | None = None,
    upload_repo: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Convert a draft.

    Args:
        hf_path: a repo of the hub or a local folder, in any layout that loads.
        mlx_path: folder to write; must not exist.
        quantize, q_bits, q_group_size, q_mode: quantise the matrices of attention and MLP. Norms and `writer.KEPT`
            keep their dtype; matrices whose columns the group size does not divide are kept and listed.
        dtype: "bfloat16", "float16" or "float32" for what is not quantised; default: as in the source.
        force: allow float16 for a bfloat16 draft, which is known to overflow.
        to: layout to write: "mlx", "hf" (z-lab's) or "speculators"; for the last two, quantised matrices are
            dequantised. to_hf: the same as `to="hf"`.
        target: for "speculators", repo or folder of the target; default: what the source's card or the pair list says.
        upload_repo: also upload the result to this repo.
        progress: called with (bytes read, bytes in all).

    Raises:
        DFlashError: a bad option, or `mlx_path` exists. DraftError: the source is not a draft we can read.
    """
    destination = Path(mlx_path).expanduser()
    _check_destination(destination)
    if upload_repo is not None:
        check_repo_name(upload_repo)
    to = _destination_layout(to, to_hf, target)
    scheme = _scheme(quantize, q_bits, q_group_size, q_mode)
    if dtype is not None and dtype not in DTYPES:
        raise DFlashError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    folder = fetch_draft(str(hf_path), revision)
    stated = folder_config(folder)
    tensors = read_headers(folder)
    layout = check_tensors(stated, tensors, folder)
    _check_options(hf_path, layout, scheme, dtype, force, to)
    config = _new_config(layout, scheme, dtype, to)
    unused = {name: why for name, why in layout.unused.items() if to != "speculators" or canonical_name(name) != "t2d"}
    result = Conversion(destination, config, notes=[f"{name} left out: {why}" for name, why in unused.items()])
    terms = read_terms(str(hf_path), revision, folder, result.notes)
    if upload_repo is not None:
        terms.check_upload()
    tokenizer = [file for name in TOKENIZER_FILES for file in regular_files(folder, name)]
    writer = Writer(tensors, layout, scheme, dtype, to, result)
    if to == "speculators":
        verifier = find_verifier(config, str(hf_path), terms.base_model, target, result.notes)
        written = speculators_config(config, verifier, result.notes)
    else:
        written = config.to_dict()
    if to == "hf":
        last = ("taps_before_norm",) if config.num_target_layers else ()  # else the last layer is hardly among them
        result.notes += [
            f"only dflash-mlx reads {name}; z-lab's own code would run another model"
            for name in (*READ_HERE_ONLY, *last)
            if name in {**written, **written["dflash_config"]}
        ]
    with whole(destination, result.notes) as temporary:
        writer.write(temporary, progress)
        if scheme and not result.quantized:
            why = f"no matrix has columns that --q-group-size {scheme.group_size} divides"
            raise DFlashError(f"-q: {why}; choose a smaller one or another --q-mode, or leave out -q")
        (temporary / "config.json").write_text(json.dumps(written, indent=4) + "\n")
        for file in tokenizer:  # by which a target of another tokenizer is known
            shutil.copyfile(file, temporary / file.name)
        write_card(temporary, revision, terms, to, result)
    if upload_repo is not None:
        upload(destination, upload_repo)
    return result


def _destination_layout(to: str, to_hf: bool, target: str | None) -> str:
    if to not in LAYOUTS:
        raise DFlashError(f"--to {to} is not one of {', '.join(LAYOUTS)}")
    if to_hf and to == "speculators":
        raise DFlashError("--to-hf is --to hf; leave it out with --to speculators")
    if target is not None and to != "speculators":
        raise DFlashError("--target goes with --to speculators")
    return "hf" if to_hf else to


def _check_destination(destination: Path) -> None:
    if destination.exists() or destination.is_symlink():
        raise DFlashError(f"{destination} exists already; remove it or choose another --mlx-path")
    nearest = next(parent for parent in destination.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise DFlashError(f"{nearest} is a file, so {destination} can't be made in it; choose another --mlx-path")


def _scheme(quantize: bool, bits: int | None, group_size: int | None, mode: str) -> Quantized | None:
    if not quantize:
        if bits is not None or group_size is not None or mode != "affine":
            raise DFlashError("--q-bits, --q-group-size and --q-mode need -q")
        return None
    if mode not in MODES:
        raise DFlashError(f"--q-mode {mode} is not one of {', '.join(MODES)}")
    all_bits, all_sizes = MODES[mode]
    scheme = Quantized(all_bits[0] if bits is None else bits, all_sizes[0] if group_size is None else group_size, mode)
    if scheme.bits not in all_bits:
        raise DFlashError(f"--q-bits {bits}: mode {mode} has {', '.join(map(str, sorted(all_bits)))}")
    if scheme.group_size not in all_sizes:
        raise DFlashError(f"--q-group-size {group_size}: mode {mode} has {', '.join(map(str, sorted(all_sizes)))}")
    return scheme


def _check_options(
    source: object, layout: Layout, scheme: Quantized | None, dtype: str | None, force: bool, to: str
) -> None:
    config, quantized, recipes = layout.config, layout.quantized, layout.recipes
    if quantized and scheme:
        raise DraftError(f"{source} is quantised already; quantise the original, a second time only loses precision")
    if to != "mlx" and scheme:
        raise DFlashError(f"--to {to} writes unquantised weights; leave out -q")
    if quantized and dtype and to == "mlx":
        raise DFlashError("--dtype can't change a quantised draft; convert the original")
    wide = config.dtype in ("bfloat16", "float32") or any(
        recipe.dtype in ("BF16", "F32") for recipe in recipes.values()
    )
    if dtype == "float16" and wide and not force:
        raise DFlashError(
            "--dtype float16 overflows in DFlash drafts and makes acceptance 0 without a message; "
            "use bfloat16 or float32, or --force if you know that this one does not"
        )


def _new_config(layout: Layout, scheme: Quantized | None, dtype: str | None, to: str) -> DraftConfig:
    quantization = layout.config.quantization if layout.quantized and to == "mlx" else None
    if scheme:
        quantization = vars(scheme)
    return replace(layout.config, dtype=dtype or layout.config.dtype, quantization=quantization)
