"""Published DFlash checkpoints to MLX and back; installed as `dflash_mlx.convert`."""

from .convert import Conversion, convert_draft
from .inspect import Inspection, inspect_draft

__all__ = ["Conversion", "Inspection", "convert_draft", "inspect_draft"]
