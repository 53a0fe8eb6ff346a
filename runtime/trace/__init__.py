"""Routing traces: the Parquet format, importers for other tools' dumps, statistics and synthesis."""
