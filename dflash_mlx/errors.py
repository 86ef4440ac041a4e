"""Errors that a caller may want to catch; the text of each is one line for the person at the terminal.

Anything else that is raised is a fault of ours and keeps its traceback.
"""

__all__ = ["DFlashError", "DraftError", "TargetError"]


class DFlashError(ValueError):
    """Something the user can mend: it names the file, field or flag and what to do."""


class DraftError(DFlashError):
    """This draft can't be used: wrong folder, wrong tensors, wrong target, unknown layout."""


class TargetError(DFlashError):
    """This target can't be driven by a draft: its layers or its caches are not understood."""
