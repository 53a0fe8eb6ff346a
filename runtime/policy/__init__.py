"""The decision: which experts are kept, and where the tokens go. Needs numpy, neither torch nor the store."""
