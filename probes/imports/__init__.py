"""Readers for other tools' outputs (nvbandwidth, nvidia-smi, spec sheets): from text to probe records."""
