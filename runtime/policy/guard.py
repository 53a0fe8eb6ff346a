"""The automatic brake: when a sampled layer's error passes its budget, the router's own choice returns for a while.

A *shadow sample* is one layer-step whose output is computed twice, as the policy routes and as the router itself would;
its error is ‖policy − router‖ ÷ ‖router‖ over the real tokens. The caller takes the samples; here is only the logic, a
function of the errors observed, so that ranks that observe the same brake alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from probes.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BrakeSettings:
    """``budget``: the mean relative error of a layer's output that is allowed. The rest counts layer-steps or samples.

    One sample above ``alarm`` × ``budget`` brakes at once. ``hold`` is how long the first brake lasts; every further
    one within ``trial`` samples of the last lasts twice as long as the one before, up to ``longest_hold``.
    """

    budget: float
    sample_every: int = 64
    mean_over: int = 8
    alarm: float = 4.0
    hold: int = 512
    longest_hold: int = 16_384
    trial: int = 32

    def __post_init__(self) -> None:
        if not (math.isfinite(self.budget) and self.budget > 0):
            raise UsageError(f"a brake's budget of {self.budget} is not a positive number")
        if not self.alarm > 1:
            raise UsageError(f"a brake's alarm of {self.alarm} is not above 1")
        for name in ("sample_every", "mean_over", "hold", "longest_hold", "trial"):
            if getattr(self, name) < 1:
                raise UsageError(f"a brake's {name} of {getattr(self, name)} is not at least 1")


def parse_brake(text: str) -> BrakeSettings:
    """``BUDGET`` or ``BUDGET:key=value,key=value``, as on the command line. Raises ``UsageError``."""
    hint = "write an error budget and, if need be, settings: --brake 0.1 or --brake 0.1:sample_every=32,hold=256"
    budget, _, rest = text.partition(":")
    kinds = {field.name: float if field.name == "alarm" else int for field in dataclasses.fields(BrakeSettings)}
    del kinds["budget"]
    settings: dict[str, float] = {}
    try:
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            settings[key] = kinds[key](value)
        return BrakeSettings(budget=float(budget), **settings)  # type: ignore[arg-type]  # each of its field's kind
    except KeyError as error:
        raise UsageError(f"a brake has no setting {error}: it has {', '.join(kinds)}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"--brake {text}: {error}", hint=hint) from error
    except UsageError as error:
        raise UsageError(error.message, hint=hint) from error


class Brake:
    """Says for each layer-step whether the policy may act, and whether to sample; is told the sampled errors.

    Each layer-step: ``advance()``, then, where ``sample_due``, ``observe(error)``. No samples are due while braked.
    Samples lie ``distance`` layer-steps apart: the first distance from ``sample_every`` on that shares no divisor with
    the number of ``layers``, so that all layers are sampled in turn.
    """

    def __init__(self, settings: BrakeSettings, layers: int = 1) -> None:
        self.settings = settings
        self.distance = next(n for n in itertools.count(settings.sample_every) if math.gcd(n, layers) == 1)
        self.trips = 0
        self.samples = 0
        self.layer_steps = 0
        self.braked_steps = 0
        self.last_error: float | None = None
        self._steps = 0
        self._held = 0
        self._hold = settings.hold
        self._errors: list[float] = []
        self._samples_since_trip = settings.trial

    @property
    def engaged(self) -> bool:
        """Whether the router's own choice is in force."""
        return self._held > 0

    @property
    def sample_due(self) -> bool:
        """Whether this layer-step should be sampled."""
        return not self.engaged and self._steps % self.distance == 0

    @property
    def mean_error(self) -> float | None:
        """Mean of the last samples since the policy last came into force; None before the first."""
        return sum(self._errors) / len(self._errors) if self._errors else None

    def advance(self) -> bool:
        """A layer-step begins; True where the policy may act."""
        self.layer_steps += 1
        if self._held:
            self._held -= 1
        if self._held:
            self.braked_steps += 1
            return False
        self._steps += 1
        return True

    def observe(self, error: float) -> None:
        """A shadow sample's relative error; what is not finite counts as an alarm."""
        self.samples += 1
        self.last_error = error if math.isfinite(error) else None
        alarm = not math.isfinite(error) or error > self.settings.alarm * self.settings.budget
        self._samples_since_trip += 1
        self._errors = [*self._errors, error][-self.settings.mean_over :]
        full = len(self._errors) == self.settings.mean_over
        if alarm or (full and sum(self._errors) / len(self._errors) > self.settings.budget):
            self._trip()

    def _trip(self) -> None:
        relapse = self._samples_since_trip <= self.settings.trial and self.trips > 0
        self._hold = min(2 * self._hold, self.settings.longest_hold) if relapse else self.settings.hold
        self._held = self._hold + 1
        self._errors = []
        self._samples_since_trip = 0
        self.trips += 1
