"""``python -m hyfreedp``: the noise that a budget needs; the privacy statement of a run; the epsilon of several."""

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, get_args

import torch

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.calibrate import calibrate_noise
from hyfreedp.accounting.composition import shares
from hyfreedp.accounting.split import Allocation, NoiseSplit, Probe
from hyfreedp.checks import check_count, check_delta
from hyfreedp.preset import FIELDS, PRESETS, resolve
from hyfreedp.statement import Statement, as_json, total_epsilon


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit status 2, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hyfreedp",
        description="Split a privacy budget between gradients and probes, and print what each share costs. "
        "'statement FILE' prints the privacy statement of a run instead, 'total FILE ...' the epsilon of several runs.",
    )
    add = parser.add_argument
    add("--epsilon", type=float, required=True, help="target epsilon; inf for a non-private run")
    add("--delta", type=float, required=True, help="target delta, customarily below 1/n")
    add("--n", type=int, required=True, help="number of training records")
    add("--batch-size", type=int, required=True, help="expected size of a Poisson batch")
    add("--steps", type=int, required=True, help="number of optimizer steps T")
    add("--records-per-person", type=int, default=1, help="how many records one person may have; default: %(default)s")
    add("--preset", choices=PRESETS, default="robust", help="default: %(default)s")
    add("--json", action="store_true", help="print JSON; infinite numbers appear as the string 'inf'")
    fields = parser.add_argument_group("changes of the preset")
    add = partial(fields.add_argument, default=argparse.SUPPRESS)
    add("--interval", type=int, help="probe every K-th step")
    add("--warmup", type=float, help="share of the run, from its start, in which every step probes")
    add("--gamma", type=float, help="mean increase of the gradient noise, which pays for probes or looks")
    for name, choices in (("--probe", Probe), ("--accountant", Accountant), ("--allocation", Allocation)):
        add(name, choices=get_args(choices))
    return parser


def _report(split: NoiseSplit, records: int, batch_size: int, epsilons: dict[str, float]) -> str:
    lines = [
        f"epsilon {split.target_epsilon:g} at delta {split.target_delta:g}, of {split.unit}, "
        f"accountant {split.accountant}",
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
            f"  {split.sigma_loss:10.6f}  probe ({split.probe}), in units of its clip",
        ]
    lines += ["", "epsilon at the whole delta", f"  {epsilons['gradients']:10.6f}  gradients alone"]
    if split.probe != "none":
        lines += [
            f"  {epsilons['probes']:10.6f}  probes alone",
            f"  {epsilons['together']:10.6f}  both together",
            f"  {epsilons['vanilla']:10.6f}  DP-SGD at sigma",
        ]
    return "\n".join([*lines, "", "guaranteed" if split.guarantee else "NOT guaranteed: nothing is noised"])


def _statement_in(path: str) -> Statement:
    """The statement in a file: JSON, or a checkpoint of this package, of transformers' Trainer or of Lightning."""
    with open(path, "rb") as file:
        is_json = file.read(64).lstrip().startswith(b"{")
    if is_json:
        return Statement.from_json(Path(path).read_text(encoding="utf-8"))
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        states = [saved, saved.get("optimizer_state_dict"), *saved.get("optimizer_states", ())]
        facts = next(state["statement"] for state in states if state and "statement" in state)
    except Exception:  # any kind, since the file may hold anything
        raise ValueError(
            f"{path} must hold a statement's JSON, or be a checkpoint with a statement, as those of save_checkpoint, "
            "PrivateTrainer (optimizer.pt) and PrivateModule are since version 0.3"
        ) from None
    return Statement.from_dict(facts)


def _of_files(command: str, arguments: Sequence[str]) -> int:
    """The commands ``statement FILE`` and ``total FILE ...``."""
    parser = _Parser(prog=f"python -m hyfreedp {command}", description=_of_files.__doc__)
    parser.add_argument("files", nargs=1 if command == "statement" else "+", help="JSON of a statement, or checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if command == "total":
        parser.add_argument("--delta", type=float, required=True, help="of all runs together")
    options = parser.parse_args(arguments)
    try:
        statements = [_statement_in(path) for path in options.files]
        if command == "statement":
            print(statements[0].to_json() if options.json else statements[0].markdown())
            return 0
        total, alone = total_epsilon(statements, options.delta), [one.epsilon(options.delta) for one in statements]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        print(as_json({"delta": options.delta, "epsilon": total, "of_each": alone}))
        return 0
    for path, epsilon in zip(options.files, alone, strict=True):
        print(f"{epsilon:10.6f}  {path}")
    print(f"{math.fsum(alone):10.6f}  sum, at {len(alone)} times the delta")
    print(f"{total:10.6f}  all together at delta {options.delta:g}, of {statements[0].protects}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ("statement", "total"):
        return _of_files(arguments[0], arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    changes = {name: value for name, value in vars(options).items() if name in FIELDS}
    try:
        check_count("--n", options.n, 1)
        check_count("--batch-size", options.batch_size, 1, options.n, "n")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if math.isfinite(options.epsilon):
                check_delta(options.delta, options.n)
            plan = resolve(options.preset, changes, options.steps).releases(options.steps)
            plan |= {"sample_rate": options.batch_size / options.n, "records_per_person": options.records_per_person}
            split = calibrate_noise(target_epsilon=options.epsilon, target_delta=options.delta, **plan)
    except ValueError as error:
        parser.error(str(error))
    for warning in caught:
        print(f"{parser.prog}: warning: {warning.message}", file=sys.stderr)
    epsilons = shares(split)
    if options.json:
        print(as_json({**split.to_dict(), "unit": split.unit, "shares": epsilons}))
    else:
        print(_report(split, options.n, options.batch_size, epsilons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
