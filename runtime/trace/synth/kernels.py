"""The compiled inner loops of synthesis. Shape legend: T tokens, N experts, K slots, M draws."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(cache=True)
def choose(level_N, offset_N, weights, decays, states_AN, noise_TAN, ids_TK):  # type: ignore[no-untyped-def]  # compiled
    """Run the latent propensities of one layer over T tokens and write each token's K highest.

    They are ordered by propensity + ``offset_N``, highest first, as shares will be handed out.

    Propensity = ``level_N`` + Σ_a ``weights[a]`` · state a, where state a goes on as decay·state + √(1−decay²)·noise.
    ``states_AN`` is carried from call to call.
    """
    tokens, components, experts = noise_TAN.shape
    slots = ids_TK.shape[1]
    fresh = np.empty(components, dtype=np.float32)
    for a in range(components):
        fresh[a] = np.float32(math.sqrt(1.0 - decays[a] * decays[a]))
    best = np.empty(slots, dtype=np.float32)
    propensity = np.empty(experts, dtype=np.float32)
    for t in range(tokens):
        propensity[:] = level_N
        for a in range(components):
            decay, new, weight = decays[a], fresh[a], weights[a]
            for e in range(experts):
                state = decay * states_AN[a, e] + new * noise_TAN[t, a, e]
                states_AN[a, e] = state
                propensity[e] += weight * state
        _highest(propensity, best, ids_TK[t])
        _order(propensity, offset_N, best, ids_TK[t])


@njit(cache=True)
def order(propensity_MN, offset_N, ids_MK):  # type: ignore[no-untyped-def]  # compiled
    """Order each row's ids by propensity + ``offset_N``, highest first."""
    best = np.empty(ids_MK.shape[1], dtype=np.float32)
    for m in range(len(propensity_MN)):
        _order(propensity_MN[m], offset_N, best, ids_MK[m])


@njit(cache=True)
def _order(propensity_N, offset_N, key_K, ids_K):  # type: ignore[no-untyped-def]  # compiled
    for slot in range(len(ids_K)):
        expert = ids_K[slot]
        key = propensity_N[expert] + offset_N[expert]
        place = slot
        while place > 0 and key > key_K[place - 1]:
            key_K[place] = key_K[place - 1]
            ids_K[place] = ids_K[place - 1]
            place -= 1
        key_K[place] = key
        ids_K[place] = expert


@njit(cache=True)
def highest(propensity_MN, ids_MK):  # type: ignore[no-untyped-def]  # compiled
    """The K highest of each row, best first (ties: lower id)."""
    best = np.empty(ids_MK.shape[1], dtype=np.float32)
    for m in range(len(propensity_MN)):
        _highest(propensity_MN[m], best, ids_MK[m])


@njit(cache=True)
def _highest(propensity_N, best_K, ids_K):  # type: ignore[no-untyped-def]  # compiled
    slots = len(best_K)
    best_K[:] = -np.inf
    ids_K[:] = -1
    for e in range(len(propensity_N)):
        value = propensity_N[e]
        if value <= best_K[slots - 1]:
            continue
        place = slots - 1
        while place > 0 and value > best_K[place - 1]:
            best_K[place] = best_K[place - 1]
            ids_K[place] = ids_K[place - 1]
            place -= 1
        best_K[place] = value
        ids_K[place] = e
