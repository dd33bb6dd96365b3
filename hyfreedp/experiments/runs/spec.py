"""The spec of one training run: frozen, validated, hashable, and readable from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from hyfreedp.checks import check_choice, check_count, check_number, nearest
from hyfreedp.experiments.data.texts import checksum_of
from hyfreedp.experiments.models.image_models import Model, Tuning
from hyfreedp.experiments.models.language_models import LanguageModel
from hyfreedp.experiments.runs.methods import BASES, CLIPPED, METHODS
from hyfreedp.experiments.store.files import key_of
from hyfreedp.experiments.tasks.language_tasks import OF_DOCUMENTS, LanguageTask
from hyfreedp.experiments.tasks.registry import TASKS, Task
from hyfreedp.experiments.tasks.scores import Evaluation


@dataclass(frozen=True)
class Spec:
    """Everything that determines a run, its seed included.

    Attributes:
        task, method: names in ``TASKS`` and ``METHODS``.
        epsilon: target; ``inf`` for no privacy. The task sets delta.
        learning_rate: the rate, or its first value if it is learned; for D-Adaptation and Prodigy, a factor on the rate
            that they estimate, usually 1.
        interval: K, for methods that learn the rate by probes; at most the number of steps.
        evaluation: scores are on "test" data, or on "validation" data, held out of the training part.
        steps: length of the run; None: the task's.
        clipping_threshold: R_g for method "vanilla", or its first value for method "adaptive".
        base: base optimizer, a name in ``BASES``; None: the method's.
        model: one of the task's models, by its name in ``MODELS`` or ``LANGUAGE_MODELS``; None: the first of them.
        tuning: which parameters are trained, see ``models.image_models.choose_trainable``; None: all.
        source: for the task "reports", a file of documents to train on instead, see
            :func:`hyfreedp.experiments.data.texts.documents_from`.

    Raises:
        ValueError: a name or number that is not allowed.
    """

    task: str = "digits"
    method: str = "robust"
    epsilon: float = 3.0
    seed: int = 0
    learning_rate: float = 1e-4
    interval: int = 5
    evaluation: Evaluation = "test"
    steps: int | None = None
    clipping_threshold: float | None = None
    base: str | None = None
    model: str | None = None
    tuning: Tuning | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        check_choice("method", self.method, METHODS)
        check_choice("evaluation", self.evaluation, Evaluation)
        if self.source is not None and not (self.task == OF_DOCUMENTS and isinstance(self.source, str)):
            raise ValueError(f"source must be a text for task {OF_DOCUMENTS}, and None for others, got {self.source!r}")
        if self.base is not None:
            check_choice("base", self.base, BASES)
        if self.model is not None:
            check_choice("model", self.model, TASKS[self.task].models)
        if self.tuning is not None:
            check_choice("tuning", self.tuning, self.architecture.tunings)
        absent = [name for name in ("clipping_threshold", "steps") if getattr(self, name) is None]
        for name in ("epsilon", "learning_rate", "clipping_threshold"):
            if name not in absent:  # stored as a float, so that 1 and 1.0 have the same key
                object.__setattr__(self, name, check_number(name, getattr(self, name), "(0, inf]"))
        for name in ("seed", "interval", "steps"):
            if name not in absent:
                check_count(name, getattr(self, name), 0 if name == "seed" else 1)
        length = self.steps or self.problem.steps
        if METHODS[self.method].learns and self.interval > length:
            raise ValueError(f"interval must be at most the {length} steps of the run, got {self.interval}")
        if not math.isfinite(self.learning_rate):
            raise ValueError(f"learning_rate must be finite, got {self.learning_rate!r}")
        if (self.clipping_threshold is not None) != (self.method in CLIPPED):
            raise ValueError(
                f"clipping_threshold must be given exactly for the methods {', '.join(CLIPPED)}, "
                f"got {self.clipping_threshold!r} for {self.method!r}"
            )

    def __str__(self) -> str:
        """One line with the fields in which runs of a table differ."""
        named = ", ".join(filter(None, (self.task, self.model, self.tuning, self.method, self.evaluation)))
        return f"{named}, epsilon {self.epsilon:g}, rate {self.learning_rate:g}, seed {self.seed}"

    @property
    def key(self) -> str:
        """The name of the cell's files: a hash of the spec, of pre-trained weights and documents, and of how the rate
        is learned. Fields that specs got later count only if they are set, so that old keys stay.
        """
        later = ("clipping_threshold", "base", "model", "tuning", "source")
        named = {name: value for name, value in asdict(self).items() if name not in later or value is not None}
        if (learning := METHODS[self.method].learning) is not None:
            named["learning"] = learning
        if self.weights is not None:
            named["weights"] = self.weights
        if self.source is not None:
            named["source"] = checksum_of(self.source)
        return key_of(named)

    @property
    def problem(self) -> Task | LanguageTask:
        """The task, with the documents of ``source`` if that is set."""
        task = TASKS[self.task]
        return task.with_source(self.source) if self.source is not None and isinstance(task, LanguageTask) else task

    @property
    def architecture(self) -> Model | LanguageModel:
        """The architecture that is trained."""
        return TASKS[self.task].architecture(self.model)

    @property
    def weights(self) -> str | None:
        """Checksum of the pre-trained weights that the run starts from; None if they are random or timm's."""
        return self.architecture.checksum()

    def to_json(self) -> str:
        """JSON for :meth:`from_json`; an infinite epsilon is written ``Infinity``."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec from the text of a JSON object (else ValueError), see :meth:`from_fields`."""
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the spec is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"a spec must be a JSON object, got {type(given).__name__}")
        return cls.from_fields(given)

    @classmethod
    def from_fields(cls, given: dict[str, Any]) -> Spec:
        """The spec with these fields; all but ``task`` and ``method`` may be missing.

        Raises:
            ValueError: ``task`` or ``method`` is missing, or a value is not allowed.
            TypeError: an unknown field.
        """
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in names]:
            hint = nearest(unknown[0], names)
            raise TypeError(f"a spec has no field {unknown[0]!r}: it has {', '.join(names)}{hint}")
        if missing := {"task", "method"} - given.keys():
            raise ValueError(f"a spec must name its {' and '.join(sorted(missing))}")
        return cls(**given)
