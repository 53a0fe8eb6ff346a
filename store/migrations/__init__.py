"""Schema migrations, one file each, applied in order of their number."""
