"""`dflash-mlx convert`: a draft to MLX, back to the PyTorch layout, or only a look at it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from ..errors import DFlashError
from .progress import progress_bar

if TYPE_CHECKING:
    from ..convert import Conversion, Inspection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-path", required=True, help='the draft: a repo, a local folder or "demo"')
    parser.add_argument("--mlx-path", default="mlx_draft", help="folder to write, must not exist; default: %(default)s")
    parser.add_argument("--revision", help="revision of the repo")
    parser.add_argument("-q", "--quantize", action="store_true", help="quantise the matrices")
    parser.add_argument("--q-bits", type=int, help="default: the mode's own, 4 for affine")
    parser.add_argument("--q-group-size", type=int, help="default: the mode's own, 64 for affine")
    parser.add_argument("--q-mode", default="affine", help="affine (default), mxfp4, nvfp4 or mxfp8")
    parser.add_argument("--dtype", help="bfloat16, float32 or float16; default: as in the source")
    parser.add_argument("--force", action="store_true", help="allow float16 although it overflows in most drafts")
    parser.add_argument("--to", default="mlx", help="layout: mlx (default), hf (z-lab's, for PyTorch) or speculators")
    parser.add_argument("--to-hf", action="store_true", help="the same as --to hf")
    parser.add_argument("--target", help="the draft's target for --to speculators; default: as its card says")
    parser.add_argument("--upload-repo", help="also upload the result to this repo")
    parser.add_argument("--inspect", action="store_true", help="only say what the draft is (reads headers only)")
    parser.add_argument("--json", action="store_true", help="with --inspect: one JSON object")


def run(args: argparse.Namespace) -> int:
    from ..convert import convert_draft, inspect_draft

    _check_flags(args)
    if args.inspect:
        inspection = inspect_draft(args.hf_path, revision=args.revision)
        if args.json:
            print(json.dumps(dataclasses.asdict(inspection)))
        else:
            _show(inspection)
        return 0
    with progress_bar("bytes") as progress:
        result = convert_draft(
            args.hf_path,
            args.mlx_path,
            revision=args.revision,
            quantize=args.quantize,
            q_bits=args.q_bits,
            q_group_size=args.q_group_size,
            q_mode=args.q_mode,
            dtype=args.dtype,
            force=args.force,
            to=args.to,
            to_hf=args.to_hf,
            target=args.target,
            upload_repo=args.upload_repo,
            progress=progress,
        )
    _report(result)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """A flag that the chosen job would ignore is refused."""
    if not args.inspect:
        if args.json:
            raise DFlashError("--json goes with --inspect")
        return
    for name in ("quantize", "q_bits", "q_group_size", "dtype", "to", "to_hf", "target", "upload_repo"):
        if getattr(args, name) not in (None, False, "mlx"):
            raise DFlashError(f"--inspect writes nothing; leave out --{name.replace('_', '-')}")


def _report(result: Conversion) -> None:
    for line in (*result.notes, *(f"kept unquantised: {name}" for name in result.kept)):
        print(line, file=sys.stderr)
    quantized = f", {result.quantized} matrices quantised" if result.quantized else ""
    print(f"{result.path}: {result.tensors} tensors, {result.nbytes / 1e6:.1f} MB{quantized}")


def _show(inspection: Inspection) -> None:
    print(f"{inspection.source}: {inspection.kind}")
    if inspection.problem:
        print(f"can't be run: {inspection.problem}")
    print(f"tensors: {inspection.tensors}, parameters: {inspection.parameters:,}, {inspection.nbytes / 1e6:.1f} MB")
    for dtype, count in inspection.census.items():
        print(f"  {dtype}: {count['tensors']} tensors, {count['parameters']:,} numbers, {count['nbytes'] / 1e6:.1f} MB")
    if inspection.quantized:
        print(f"  quantised matrices: {inspection.quantized}")
    for name, value in (inspection.config or {}).items():
        if value is not None:
            print(f"{name}: {value}")
    if inspection.fits:
        print("fits targets with: " + ", ".join(f"{k} {v}" for k, v in inspection.fits.items() if v is not None))
