"""``python -m hyfreedp.accounting``: print the noise that a budget allows and what each share of it costs."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.calibrate import calibrate_noise
from hyfreedp.accounting.composition import UnsoundAccountingWarning, shares
from hyfreedp.accounting.split import Allocation, Composition, NoiseSplit
from hyfreedp.sensitivity import LossMechanism, Probe


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit status 2, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hyfreedp.accounting",
        description="Split a privacy budget between gradients and probes, and print what each share costs.",
    )
    add = parser.add_argument
    add("--epsilon", type=float, required=True, help="target epsilon; inf for a non-private run")
    add("--delta", type=float, required=True, help="target delta, customarily below 1/n")
    add("--n", type=int, required=True, help="number of training records")
    add("--batch-size", type=int, required=True, help="expected size of a Poisson batch")
    add("--steps", type=int, required=True, help="number of optimizer steps T")
    add("--interval", type=int, default=5, help="probe every K-th step (default: %(default)s)")
    add("--vote-steps", type=int, nargs="+", default=[], metavar="STEP", help="of --probe votes: the steps that vote")
    add("--warmup-steps", type=int, default=0, help="first steps that all probe (default: %(default)s)")
    add(
        "--gamma",
        type=float,
        help="increase of the gradient noise that pays for the probes (default: 1.02; constant: 1.01)",
    )
    for name, choices, default in (
        ("--probe", Probe, "contrasts"),
        ("--accountant", Accountant, "pld"),
        ("--allocation", Allocation, "per_step"),
        ("--composition", Composition, "same_batch"),
        ("--loss-mechanism", LossMechanism, "gaussian"),
    ):
        add(name, choices=get_args(choices), default=default, help="default: %(default)s")
    add("--json", action="store_true", help="print JSON; infinite numbers appear as the string 'inf'")
    return parser


def _report(split: NoiseSplit, records: int, batch_size: int, epsilons: dict[str, float]) -> str:
    lines = [
        f"epsilon {split.target_epsilon:g} at delta {split.target_delta:g}, "
        f"accountant {split.accountant}, composition {split.composition}",
        f"{split.steps} steps on Poisson batches of {batch_size:,} expected from {records:,} records "
        f"(sample rate {split.sample_rate:.6g})",
        "",
        "noise multiplier",
        f"  {split.sigma:10.6f}  DP-SGD without probes (sigma)",
    ]
    if split.probe != "none":
        lines += [
            f"  {split.sigma_gradient:10.6f}  gradient, {split.steps - split.probe_steps} steps without probe",
            f"  {split.sigma_gradient_probe:10.6f}  gradient, {split.probe_steps} steps with probe",
            f"  {split.sigma_loss:10.6f}  probe ({split.probe}, {split.loss_mechanism}), in units of its clip",
        ]
    lines += ["", "epsilon at the whole delta", f"  {epsilons['gradients']:10.6f}  gradients alone"]
    if split.probe != "none":
        lines += [
            f"  {epsilons['probes']:10.6f}  probes alone",
            f"  {epsilons['together']:10.6f}  both together",
            f"  {epsilons['vanilla']:10.6f}  DP-SGD at sigma",
        ]
    return "\n".join(
        [*lines, "", "guaranteed for Algorithm 1" if split.guarantee else f"NOT guaranteed: {split.reason}"]
    )


def _json_ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    return "inf" if value == math.inf else value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.n < 1:
        parser.error(f"--n must be at least 1, got {options.n}")
    if not 1 <= options.batch_size <= options.n:
        parser.error(f"--batch-size must be from 1 to n={options.n}, got {options.batch_size}")
    if options.probe == "votes" and not options.vote_steps:
        parser.error("--probe votes needs --vote-steps; those of preset robust are hyfreedp.votes.vote_steps(STEPS)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsoundAccountingWarning)  # the report says it itself
            split = calibrate_noise(
                target_epsilon=options.epsilon,
                target_delta=options.delta,
                sample_rate=options.batch_size / options.n,
                steps=options.steps,
                interval=options.interval,
                warmup_steps=options.warmup_steps,
                vote_steps=options.vote_steps,
                probe=options.probe,
                gamma=options.gamma,
                accountant=options.accountant,
                allocation=options.allocation,
                composition=options.composition,
                loss_mechanism=options.loss_mechanism,
            )
    except ValueError as error:
        parser.error(str(error))
    epsilons = shares(split)
    if options.json:
        print(json.dumps(_json_ready({**split.to_dict(), "shares": epsilons}), indent=2, allow_nan=False))
    else:
        print(_report(split, options.n, options.batch_size, epsilons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
