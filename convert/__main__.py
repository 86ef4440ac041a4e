"""`python -m dflash_mlx.convert` is `dflash-mlx convert`."""

import sys

from dflash_mlx.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
