"""Expert caches: which experts each device holds, as a deterministic function of what was dispatched."""
