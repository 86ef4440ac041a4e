"""Which draft belongs to a target, and whether it fits: tables, names and look-ups. Knows no weights."""
