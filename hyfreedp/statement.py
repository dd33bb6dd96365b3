"""A privacy statement: what a run guarantees, for whom, and what it leaves open, as text to publish and as JSON.

It answers the checklists of NIST SP 800-226 and of Ponomareva et al. (2023), section 5.3; see docs/statement.md.
"""

import dataclasses
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context
from importlib import metadata
from typing import Any, Literal, Self

from hyfreedp.accounting import NoiseSplit
from hyfreedp.accounting.composition import epsilon_of_runs, epsilon_of_zcdp, spent, zcdp
from hyfreedp.checks import check_choice, check_count, check_flag, check_number, check_type

# Questions that only the user can answer, by the arguments of Statement.fill.
QUESTIONS = {
    "data": "What are the data, how were they collected, and under which rules?",
    "people": "How many records can one person have, and do records of several people depend on each other?",
    "earlier_use": "What else was released from these records, now or before, and at which epsilon?",
    "tuned": "What was chosen by looking at these records (model, settings, early stopping, the best of several runs)?",
    "pretrained": "On which data were the weights trained that the run began from?",
    "recipients": "What is published, and to whom; who has access to the records and to the run's key?",
}
_NOT_COVERED = (
    "Whoever knows the run's key: its seed, checkpoints or optimizer states.",
    "Raw diagnostics, errors, times, sizes of files and messages.",
    "Choices made by looking at the records, outside of the run.",
    "Other runs and other releases on the same records; `hyfreedp.total_epsilon` composes runs.",
    "N, the batch size, the plan and the code, which are taken to be public.",
    "What is learned of everybody: patterns that would be found without any one unit.",
)
_ACCOUNTANTS = {"pld": "privacy loss distributions", "rdp": "Renyi differential privacy"}
_PROBES = {"look": "look (noised votes on the learning rate)", "losses": "probe (three noised losses)"}


def _versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute and account; "not installed" if run from a source tree."""
    versions = {"Python": platform.python_version()}
    for package in ("hyfreedp", "torch", "dp-accounting"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a run guarantees so far. Made by :meth:`HyFreeDPOptimizer.statement`; ``str`` is :meth:`markdown`.

    Attributes:
        split: the plan: noise, sample rate, number of steps, and which of them probe.
        steps: how many steps have released something; all epsilons are for these.
        unit, number: what is sampled ("record" or "owner"), and how many of them the data have: N, which is public.
        sampled: whether all batches were Poisson samples of the private loader.
        clipping: the clipping rule, as text.
        noise: "standard", or "secure" against floating-point attacks.
        versions, answers: of the libraries; to some of ``QUESTIONS``, see :meth:`fill`.
    """

    split: NoiseSplit
    steps: int
    unit: Literal["record", "owner"]
    number: int
    sampled: bool
    clipping: str
    noise: str
    versions: Mapping[str, str] = field(default_factory=_versions)
    answers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """ValueError or TypeError for facts that no run has, say from an edited file."""
        check_type("split", self.split, NoiseSplit, "what calibrate_noise returned")
        check_type("answers", self.answers, Mapping, "a dictionary of texts")
        check_count("steps", self.steps, 0, self.split.steps, "the plan's")
        check_choice("unit", self.unit, ("record", "owner"))
        check_count("number", self.number, 1)
        check_flag("sampled", self.sampled)
        if math.isfinite(self.split.target_epsilon):
            self.split.check_noise()
        for name in self.answers:
            check_choice("each name of answers", name, QUESTIONS)

    def fill(self, **answers: str) -> Self:
        """A copy with the user's answers: data, people, earlier_use, tuned, pretrained, recipients."""
        return dataclasses.replace(self, answers={**self.answers, **answers})

    @property
    def without_guarantee(self) -> str:
        """Why the run has no guarantee; "" if it has one."""
        if math.isinf(self.split.target_epsilon):
            return "nothing was noised (target_epsilon=inf)"
        return "" if self.sampled else "batches were not Poisson samples of the private loader (without_guarantee=True)"

    @property
    def protects(self) -> str:
        """What neighbouring data sets differ in, as text."""
        return "one owner with all their records" if self.unit == "owner" else self.split.unit

    def epsilon(self, delta: float | None = None) -> float:
        """Proven epsilon of the steps made, at ``delta`` (None: the plan's); infinite without a guarantee."""
        if self.without_guarantee:
            return math.inf
        return spent(self.split, self.steps, target_delta=delta)

    @property
    def deltas(self) -> tuple[float, float, float]:
        """The deltas at which the statement gives epsilon: the plan's, a tenth and a hundredth of it."""
        tenth, hundredth = (float(f"{self.split.target_delta / divisor:.12g}") for divisor in (10, 100))  # no 9.99e-07
        return self.split.target_delta, tenth, hundredth

    @property
    def rho(self) -> float:
        """rho of zCDP of the steps made, without amplification by sampling; infinite without a guarantee."""
        return math.inf if self.without_guarantee else zcdp(self.split, self.steps)

    @property
    def headline(self) -> str:
        """The first line: epsilon, or that there is no guarantee."""
        if self.without_guarantee:
            return f"NO privacy guarantee: {self.without_guarantee}"
        delta = self.split.target_delta
        return f"Differentially private: epsilon {_up(self.epsilon())} at delta {delta:g}, of {self.protects}"

    def markdown(self) -> str:
        """The statement as a page of Markdown."""
        rows = [f"| {name} | {value} |" for name, value in self._rows().items()]
        uncovered = [*_NOT_COVERED]
        if self.split.probe == "none":
            uncovered.append("How the learning rate was found, which this run did not learn.")
        if self.steps < self.split.steps and not self.without_guarantee:
            whole = _up(spent(self.split, self.split.steps))
            uncovered.append(f"An early end chosen by what the run showed: epsilon is then the plan's, {whole}.")
        answers = [f"{question} **{self.answers.get(name, '(open)')}**" for name, question in QUESTIONS.items()]
        lines = [f"# {self.headline}", "", "| What | Of this run |", "| --- | --- |", *rows, ""]
        lines += ["## Not covered", "", *(f"* {text}" for text in uncovered), ""]
        return "\n".join([*lines, "## Answered by whoever publishes", "", *(f"* {text}" for text in answers), ""])

    __str__ = markdown

    def _rows(self) -> dict[str, str]:
        """The rows of the table: name and value."""
        split = self.split
        delta, *smaller = self.deltas
        noised = math.isfinite(split.target_epsilon)
        rows = {
            "Unit of privacy": f"{self.protects}; N = {self.number:,} {self.unit}s",
            "Neighbouring data sets": "with and without that unit (add or remove)",
            "Trust": "central: whoever trains has the records and the key, and keeps to the procedure",
        }
        if not self.without_guarantee:
            bound = _up(epsilon_of_zcdp(self.rho, delta))
            rows["Epsilon"] = f"{_up(self.epsilon())} at delta {delta:g}, by {_ACCOUNTANTS[split.accountant]}"
            rows["At other deltas"] = ", ".join(f"{_up(self.epsilon(delta))} at {delta:g}" for delta in smaller)
            rows["By zCDP"] = f"rho {_up(self.rho)}, so epsilon {bound} at {delta:g}, were all batches known"
            if not split.guarantee:
                rows["Target"] = f"epsilon {split.target_epsilon:g}, **not kept** by noise made elsewhere (split=)"
        plan = f"T = {split.steps:,} steps, of which {self.steps:,} are made"
        rows["Plan"] = f"{plan}; {split.probe_steps} with a {_PROBES[split.probe]}" if split.probe_steps else plan
        how = "noised " if noised else ""
        rows["Released"] = f"{how}gradients, probes and looks; so weights and rates of all steps"
        batch = f"{split.sample_rate * self.number:,.6g} on average"
        poisson = f"Poisson: each {self.unit} with q = {split.sample_rate:.6g}, apart from others and anew each step"
        rows["Sampling as done"] = f"{poisson}; {batch}" if self.sampled else "**batches of the user's own**"
        rows["Clipping"] = f"{self.clipping}, of each {self.unit} alone"
        rows["Noise"] = f"Gaussian ({self.noise}), multiplier {split.sigma_gradient:.6g}" if noised else "**none**"
        if noised and split.probe_steps:
            each = f"{split.sigma_loss:.6g} on each of its numbers"
            rows["Noise"] += f"; in a step with a probe or look {split.sigma_gradient_probe:.6g}, and {each}"
        rows["Versions"] = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values; everything else is computed from them."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return facts | {"split": self.split.to_dict(), "versions": {**self.versions}, "answers": {**self.answers}}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`, which ignores other entries. ValueError if facts are missing or wrong."""
        try:
            values = {field.name: facts[field.name] for field in dataclasses.fields(cls)}
            infinite = {name: float(values["split"][name]) for name in ("target_epsilon", "epsilon")}
            return cls(**values | {"split": NoiseSplit.from_dict({**values["split"], **infinite})})
        except (KeyError, TypeError) as error:
            raise ValueError(f"the text must be a privacy statement of hyfreedp, which it is not: {error!r}") from None

    def to_json(self) -> str:
        """The facts, and headline, epsilons and rho for other programs; infinite numbers become the string "inf"."""
        epsilons = [{"delta": delta, "epsilon": self.epsilon(delta)} for delta in self.deltas]
        computed = {"headline": self.headline, "guarantee": not self.without_guarantee, "epsilons": epsilons}
        return as_json({**computed, "rho": self.rho, **self.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of :meth:`to_json`; ValueError for other texts."""
        try:
            facts = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"text must be what to_json() gave: {error}") from None
        return cls.from_dict(facts)


def total_epsilon(runs: Sequence[Any], delta: float) -> float:
    """Epsilon at ``delta`` of several runs on the same records together, by privacy loss distributions.

    It is mostly less than the sum of their epsilons, and holds at ``delta``, not at the sum of deltas. A run may use
    what earlier ones released, but budgets, batch sizes and lengths of all runs must be fixed before the first.

    Args:
        runs: a list of statements, or of private optimizers, whose steps so far count.
        delta: in (0, 1).

    ValueError or TypeError if runs protect different units, one has no guarantee, or two optimizers draw their batches
    by the same seed (which is not checked for statements).
    """
    delta = check_number("delta", delta, "(0, 1)")
    if not isinstance(runs, list | tuple) or not runs:
        raise TypeError(f"runs must be a list of statements or private optimizers, got {runs!r}")
    for run in runs:
        if not isinstance(run, Statement) and not hasattr(run, "statement"):
            raise TypeError(f"runs must be statements or private optimizers, but one is a {type(run).__name__}")
    statements = [run if isinstance(run, Statement) else run.statement() for run in runs]
    for number, run in enumerate(statements, 1):
        if run.without_guarantee:
            raise ValueError(f"run {number} has no guarantee, so all runs together have none: {run.without_guarantee}")
        if run.protects != statements[0].protects:
            raise ValueError(
                f"runs must protect the same unit, but run 1 protects {statements[0].protects} and run {number} "
                f"{run.protects}: train all with the same owners= or records_per_person="
            )
    seeds = {id(run): run.sampler.seed for run in runs if not isinstance(run, Statement)}  # one run may be given twice
    if len(set(seeds.values())) < len(seeds):
        raise ValueError(
            "runs must draw batches by different seeds, but two have one: make all by one engine, or without seed="
        )
    return epsilon_of_runs([(run.split, run.steps) for run in statements], delta)


def as_json(values: Mapping[str, Any]) -> str:
    """Indented JSON, in which infinite numbers, for which JSON has no word, are the string "inf"."""
    return json.dumps(json.loads(json.dumps(values), parse_constant=lambda word: "inf"), indent=2)


def _up(number: float) -> str:
    """``number`` to four significant digits, rounded up so that no epsilon is understated."""
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(number)):g}"
