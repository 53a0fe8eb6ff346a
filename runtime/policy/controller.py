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

# Level, account, search gain, mean tokens (0: none seen yet).
START = (math.log(START_PRICE), 0.0, SEARCH_GAIN, 0.0)


class PriceController:
    """The price λ for a target ``epsilon`` of removed importance per real token and layer-step (0 < ε < 1).

    A function of the observations alone: ranks that observe the same hold the same price.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.state = START

    @property
    def price(self) -> float:
        """λ for the next layer-step."""
        return price(*self.state)

    def observe(self, removed: float, tokens: int) -> None:
        """A layer-step of ``tokens`` > 0 real tokens lost ``removed`` importance in all."""
        self.state = observe(*self.state, self.epsilon, removed, tokens)


# Scalars in, scalars out: the simulator compiles these two as they stand.


def price(level: float, account: float, search_gain: float, mean_tokens: float) -> float:
    """λ of a controller's state."""
    return math.exp(max(-LOG_PRICE_LIMIT, min(LOG_PRICE_LIMIT, level - ACCOUNT_GAIN * account)))


def observe(
    level: float, account: float, search_gain: float, mean_tokens: float, epsilon: float, removed: float, tokens: int
) -> tuple[float, float, float, float]:
    """The state after a layer-step of ``tokens`` > 0 real tokens that lost ``removed`` importance in all."""
    mean_tokens += (TOKENS_GAIN if mean_tokens > 0 else 1.0) * (tokens - mean_tokens)
    change = (epsilon * tokens - removed) / (epsilon * mean_tokens)
    account = max(-ACCOUNT_LIMIT, min(ACCOUNT_LIMIT, account + change))
    drift = LEVEL_GAIN * account + search_gain * max(-SEARCH_LIMIT, min(SEARCH_LIMIT, account))
    level = max(-LOG_PRICE_LIMIT, min(LOG_PRICE_LIMIT, level - drift))
    return level, account, search_gain * SEARCH_DECAY, mean_tokens
