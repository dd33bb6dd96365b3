"""The cases of each record, on a CPU (profile "laptop") and on an accelerator ("gpu")."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from hyfreedp.experiments.benchmark.workloads import MODELS, Shape, Tuning

STEPS = "steps"
RUN = 100  # the steps of a whole run


@dataclass(frozen=True)
class Case:
    """A model and its trained parameters, measured with several contenders.

    Attributes:
        model: a name in ``MODELS``.
        tuning: which of its parameters are trained.
        contenders: names in ``CONTENDERS``.
        varied: a field of the model's shape that is set to ``value``; or "steps", for whole runs of ``value`` steps.
    """

    model: str
    tuning: Tuning
    contenders: tuple[str, ...]
    varied: str = ""
    value: int = 0

    @property
    def whole_run(self) -> bool:
        """Whether whole runs are measured, not single steps."""
        return self.varied == STEPS

    @property
    def shape(self) -> Shape:
        """The model's shape, with the varied field."""
        varied: dict[str, Any] = {self.varied: self.value} if self.varied and not self.whole_run else {}
        return replace(MODELS[self.model], **varied)

    @property
    def key(self) -> dict[str, str]:
        """The columns of a record that identify a case, as texts."""
        return {"model": self.model, "tuning": self.tuning, "varied": self.varied, "value": str(self.value)}


GROWTH_MODEL = {"laptop": "vit_d192", "gpu": "vit_small"}
GROWTH = {
    "laptop": {
        "batch_size": (4, 8, 16, 32, 64),
        "depth": (1, 2, 4, 8),
        "width": (96, 192, 384, 576),
        "tokens": (17, 65, 145, 257),
    },
    "gpu": {
        "batch_size": (8, 16, 32, 64, 128),
        "depth": (3, 6, 12, 24),
        "width": (192, 384, 768, 1152),
        "tokens": (50, 197, 401, 785),
    },
}
TABLE_MODELS = {
    "laptop": ("vit_d384", "vit_d192", "gpt2_d256", "llama_d256"),
    "gpu": ("vit_small", "vit_base", "gpt2", "gpt2_t512", "llama2_7b"),
}
PEER_MODELS = ("vit_d192", "gpt2_d256", "mlp_b256", "mlp_b1000", "convnet_b32", "convnet_b128")
SMALL_AND_LARGE = ("vit_d192", "mlp_b256", "convnet_b32")
OPACUS = ("opacus_hooks", "opacus_ghost")
UNSAFE = "ours_torch_noise"
IN_TABLE = ("plain", *OPACUS, "opacus_functorch", "ours", "ours_k1", "ours_k5", "ours_k10")
PARTS = {
    "table": "efficiency.csv",
    "growth": "efficiency_growth.csv",
    "peers": "efficiency_peers.csv",
    "runs": "efficiency_runs.csv",
    "noise": "efficiency_noise.csv",
}


def cases(part: str, profile: str) -> list[Case]:
    """The cases of one of ``PARTS``; on an accelerator only "table" and "growth" have any."""
    contenders: tuple[str, ...]
    if part == "table":
        contenders = IN_TABLE if profile == "laptop" else (*IN_TABLE, UNSAFE)
        return [Case(model, tuning, contenders) for model in TABLE_MODELS[profile] for tuning in MODELS[model].tunings]
    if part == "growth":
        contenders, model = ("plain", *OPACUS, "ours"), GROWTH_MODEL[profile]
        grid = GROWTH[profile].items()
        return [Case(model, "full", contenders, varied, value) for varied, values in grid for value in values]
    if profile != "laptop":
        return []
    if part == "peers":
        here = {"opake": find_spec("opake") is not None, "fastdp": "HYFREEDP_FASTDP" in os.environ}
        contenders = ("plain", *OPACUS, *(name for name in here if here[name]), "ours")
        return [Case(model, "full", contenders) for model in PEER_MODELS]
    if part == "runs":
        contenders = ("plain", "opacus_hooks", "ours", "robust")
        return [Case(model, "full", contenders, STEPS, RUN) for model in SMALL_AND_LARGE]
    return [Case(model, "full", ("plain", "ours", UNSAFE)) for model in SMALL_AND_LARGE]
