"""Hugging Face models: loading without experts, and the adapter that hands their experts to the runtime."""
