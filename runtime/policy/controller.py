"""Steers the price of importance so that ``budget`` removes what it is allowed to remove, and no more.

Two feedbacks on the logarithm of the price. The *account* is what may be removed so far less what was removed, in
layer-steps' worth of the target; it acts at once and keeps the sum on target, so that every window of a run is close
to it. The *level* drifts with the account and finds the price that suits the traffic, so that the account returns to 0.
"""

from __future__ import annotations

import math

START_PRICE = 4.0
ACCOUNT_GAIN = 0.02
LEVEL_GAIN = 0.0005
ACCOUNT_LIMIT = 200.0
LOG_PRICE_LIMIT = 30.0


class PriceController:
    """The price λ for a target ``epsilon`` of removed importance per real token and layer-step (0 < ε < 1).

    A function of the observations alone: ranks that observe the same hold the same price.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._level = math.log(START_PRICE)
        self._account = 0.0
        self._mean_tokens = 0.0

    @property
    def price(self) -> float:
        """λ for the next layer-step."""
        return math.exp(_clamp(self._level - ACCOUNT_GAIN * self._account, LOG_PRICE_LIMIT))

    def observe(self, removed: float, tokens: int) -> None:
        """A layer-step of ``tokens`` > 0 real tokens lost ``removed`` importance in all."""
        if self._mean_tokens == 0:
            self._mean_tokens = float(tokens)
        self._mean_tokens += 0.01 * (tokens - self._mean_tokens)
        allowed = self.epsilon * tokens
        self._account = _clamp(self._account + (allowed - removed) / (self.epsilon * self._mean_tokens), ACCOUNT_LIMIT)
        self._level = _clamp(self._level - LEVEL_GAIN * self._account, LOG_PRICE_LIMIT)


def _clamp(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))
