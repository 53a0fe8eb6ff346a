"""Trace-driven runs: bytes of a model's experts, moved and multiplied as a trace routes them, without a checkpoint."""
