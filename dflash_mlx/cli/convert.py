"""`dflash-mlx convert`: a draft to MLX, back to the PyTorch layout, or only a look at it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..demo import DRAFTS
from ..errors import DFlashError
from .progress import progress_bar

if TYPE_CHECKING:
    from ..convert import Conversion, Inspection

MLX_PATH = "mlx_draft"
# flags of a conversion, which a look ignores
WRITING = (
    "quantize", "q_bits", "q_group_size", "q_mode", "dtype", "force", "to", "to_hf", "target", "upload_repo",
    "mlx_path",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-path", required=True, help='the draft: a repo, a local folder or "demo"')
    parser.add_argument("--mlx-path", help=f"folder to write, must not exist; default: {MLX_PATH}")
    parser.add_argument("--revision", help="revision of the repo")
    parser.add_argument("-q", "--quantize", action="store_true", help="quantise the matrices")
    parser.add_argument("--q-bits", type=int, help="default: the mode's own, 4 for affine")
    parser.add_argument("--q-group-size", type=int, help="default: the mode's own, 64 for affine")
    parser.add_argument("--q-mode", help="affine (default), mxfp4, nvfp4 or mxfp8")
    parser.add_argument("--dtype", help="bfloat16, float32 or float16; default: as in the source")
    parser.add_argument("--force", action="store_true", help="allow float16 although it overflows in most drafts")
    parser.add_argument("--to", help="layout: mlx (default), hf (z-lab's, for PyTorch) or speculators")
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
            args.mlx_path or MLX_PATH,
            revision=args.revision,
            quantize=args.quantize,
            q_bits=args.q_bits,
            q_group_size=args.q_group_size,
            q_mode=args.q_mode or "affine",
            dtype=args.dtype,
            force=args.force,
            to=args.to or "mlx",
            to_hf=args.to_hf,
            target=args.target,
            upload_repo=args.upload_repo,
            progress=progress,
        )
    _report(result)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """A flag that the chosen job would ignore is refused."""
    if args.inspect and (flag := next((name for name in WRITING if getattr(args, name) not in (None, False)), None)):
        raise DFlashError(f"--inspect writes nothing; leave out --{flag.replace('_', '-')}")
    pinned = args.revision and (args.hf_path in DRAFTS or Path(args.hf_path).expanduser().is_dir())
    ignored = {
        "--json goes with --inspect": args.json and not args.inspect,
        "--to-hf is --to hf; leave one of them out": args.to_hf and args.to not in (None, "hf"),
        "--force goes with --dtype float16": args.force and args.dtype != "float16",
        "--q-bits, --q-group-size and --q-mode need -q": args.q_mode is not None and not args.quantize,
        f"--revision is a repo's, and {args.hf_path} is a folder; leave it out": pinned,
    }
    for problem, present in ignored.items():
        if present:
            raise DFlashError(problem)


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
