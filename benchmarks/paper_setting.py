"""The setting and the figures of arXiv:2606.29982, and the parameters with which ``benchmarks/paper.py`` meets them.

The parameters were fixed before any result was compared with the paper's.
"""

from __future__ import annotations

# The synthetic trace of DeepSeek-R1: 160 sequences, so that 128 can run together for a while.
TOP_K = 8
SEQUENCES = 160
TOKENS = 32_000
SEED = 0

# Offloading (section V.B): 8 devices, 1,024 of 58 × 256 experts cached in each, LFU, 43 MB per expert.
DEVICES = 8
CACHE_EXPERTS = 1_024
LAYERS = 58
EXPERTS = 256
EXPERT_BYTES = 43_000_000
BATCHES = (1, 4, 8, 16)
THETAS = (0.9, 0.8, 0.7)
# The host link is not named: PCI Express 4.0 x16 as it is commonly measured with large pinned copies.
HOST_BYTES_PER_S = 25e9

# On-device (section V.C): 16 devices; the chip is not named: the data sheet of an A100 SXM stands for its memory.
ON_DEVICE_DEVICES = 16
ON_DEVICE_MACHINE = "a100-sxm"

# The caches fill while 1,600 tokens pass; then at most 400 steps are measured.
WARMUP_TOKENS = 1_600
STEPS = 400

# Table II: seconds per output token by batch size, the baseline and then by THETAS.
TABLE_2 = {
    1: (0.819, 0.768, 0.704, 0.645),
    4: (0.957, 0.914, 0.824, 0.765),
    8: (1.024, 0.979, 0.849, 0.796),
    16: (1.377, 1.317, 1.143, 1.057),
}

# Table IV: milliseconds per output token by concurrency, the baseline (None) and then by θ.
TABLE_4: dict[int, dict[float | None, float]] = {
    64: {None: 59.29, 0.3: 58.46, 0.4: 56.08, 0.5: 55.72, 0.6: 54.58, 0.7: 53.15, 0.8: 52.30, 0.9: 51.66},
    128: {
        **{None: 68.78, 0.3: 68.92, 0.4: 66.63, 0.5: 65.70, 0.6: 64.55, 0.7: 62.95, 0.8: 62.18, 0.9: 61.66},
        **{1.0: 60.79, 1.1: 60.33, 1.2: 59.42},
    },
}

# Fig. 4: batch 16, 100 decode steps; Fig. 5: 8 devices; Fig. 10: these of the 58 MoE layers, from 0.
FIGURE_4_BATCH = 16
FIGURE_4_STEPS = 100
FIGURE_BATCH = 16
FIGURE_10_LAYERS = (2, 8, 16, 24, 30, 32, 39, 57)
FIGURE_10_THETA = 0.8
