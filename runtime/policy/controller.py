"""Steers the price of importance so that ``budget`` removes what it is allowed to remove, and no more.

The *account* is what was allowed so far less what was removed, counted in layer-steps of the target. It acts on the
price at once, so that every stretch of a run stays near the target. The *level*, the price at a balanced account,
drifts until the account needs no correction. The level starts high and comes down: removing too little at first can be
made up for, removing too much cannot. While it searches, in the first hundred layer-steps or so, it moves faster.
"""

from __future__ import annotations

import math

START_PRICE = 64.0
ACCOUNT_GAIN = 0.01
ACCOUNT_LIMIT = 100.0
LEVEL_GAIN = 1e-4
SEARCH_GAIN = 0.01
SEARCH_DECAY = 0.99
SEARCH_LIMIT = 10.0
LOG_PRICE_LIMIT = 30.0
TOKENS_GAIN = 0.01


class PriceController:
    """The price λ for a target ``epsilon`` of removed importance per real token and layer-step (0 < ε < 1).

    A function of the observations alone: ranks that observe the same hold the same price.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._level = math.log(START_PRICE)
        self._account = 0.0
        self._search_gain = SEARCH_GAIN
        self._mean_tokens = 0.0

    @property
    def price(self) -> float:
        """λ for the next layer-step."""
        return math.exp(_clamp(self._level - ACCOUNT_GAIN * self._account, LOG_PRICE_LIMIT))

    def observe(self, removed: float, tokens: int) -> None:
        """A layer-step of ``tokens`` > 0 real tokens lost ``removed`` importance in all."""
        self._mean_tokens += (TOKENS_GAIN if self._mean_tokens else 1.0) * (tokens - self._mean_tokens)
        change = (self.epsilon * tokens - removed) / (self.epsilon * self._mean_tokens)
        self._account = _clamp(self._account + change, ACCOUNT_LIMIT)
        drift = LEVEL_GAIN * self._account + self._search_gain * _clamp(self._account, SEARCH_LIMIT)
        self._level = _clamp(self._level - drift, LOG_PRICE_LIMIT)
        self._search_gain *= SEARCH_DECAY


def _clamp(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))
