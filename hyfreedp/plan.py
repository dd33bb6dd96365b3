"""The plan of a run: what each step releases, with how much noise, and how the learning rate falls. It is public."""

from __future__ import annotations

from dataclasses import dataclass

from hyfreedp.accounting import NoiseSplit
from hyfreedp.preset import Preset
from hyfreedp.schedule import decay_factor


@dataclass(frozen=True)
class RunPlan:
    """What step t = 0, 1, ... of a run releases, and its learning-rate factor; ``split`` is as accounted for."""

    preset: Preset
    split: NoiseSplit

    @property
    def learns_rate(self) -> bool:
        """Whether the learning rate is learned, from looks or probes."""
        return self.split.probe != "none"

    @property
    def decays(self) -> bool:
        """Whether the run lowers the rate by a schedule of its own."""
        return self.preset.decay != "none"

    def votes_before(self, t: int) -> bool:
        """Whether step t begins with votes on the rate (a look)."""
        return self.split.probe == "look" and self.split.is_probe_step(t)

    def probes_after(self, t: int) -> bool:
        """Whether three losses are released along the update of step t (a line search)."""
        return self.split.probe == "losses" and self.split.is_probe_step(t)

    def rate_factor(self, t: int) -> float:
        """Factor of the decay on the learning rate at step t."""
        return decay_factor(t, self.split.steps, self.preset.decay, self.preset.decay_start)
