"""Synthetic traces: a load profile's marginals, a real trace's rhythm. ``docs/trace-format.md`` gives the model."""
