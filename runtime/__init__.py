"""Decision, cost model, caches, traces, simulator, transfers and the live engine. The third floor."""
