"""`python -m dflash_mlx` is `dflash-mlx`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
