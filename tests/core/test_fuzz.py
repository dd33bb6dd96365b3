"""Any value for any public argument: it works, or an error names the argument, soon and without much memory.

One argument is wrong at a time, the others are good. A new argument, or a new public function, is tried by itself.
"""

import inspect
import math
import resource
import time
import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from twins import make_batches, make_data, make_model

import hyfreedp
from hyfreedp import AutomaticClipping, NoiseGenerator, PrivacyEngine, Statement
from hyfreedp.gradients.operations import tensors_in
from hyfreedp.preset import FIELDS

SECONDS, MEGABYTES = 5.0, 300.0  # a call may take; all calls of one function may add to the process
VALUES = [None, True, "", "x", b"x", 0, 1, -1, 0.5, -2.5, 1e-320, 1e308, 10**9, -(10**30)]
VALUES += [math.nan, math.inf, -math.inf, 1j, [], [1], ["x", "y"], {}, {"x": 1}, (0,), object(), len, Decimal("0.5")]
VALUES += [np.float64(0.5), np.int64(3), np.zeros(2), torch.tensor(0.5), torch.tensor([math.nan, 1.0])]
VALUES += [torch.zeros(0), torch.tensor(1j), np.nan]

RESULTS = {"Audit", "QuadraticFit", "StepRecord", "BudgetExhausted", "HyFreeDPOptimizer"}  # not for users to make


def wire(**changes):
    model = changes.pop("module", None) if "module" in changes else make_model()
    good = model if isinstance(model, torch.nn.Module) else make_model()
    settings = {"optimizer": torch.optim.SGD(good.parameters(), 0.1), "target_epsilon": 3.0, "target_delta": 1e-3}
    settings |= {"data_loader": DataLoader(make_data(), batch_size=8), "steps": None if "epochs" in changes else 4}
    return PrivacyEngine(seed=0).make_private_with_epsilon(module=model, **(settings | changes))


def step(**changes):
    """The first of a run; its loss works for any record."""

    def loss(record):
        return sum(t.sum() for t in [*model.parameters(), *(torch.isreal(t).any() for t in tensors_in(record))])

    model, optimizer, _ = wire(without_guarantee=True)
    optimizer.step(**({"loss": loss, "batch": make_batches([3])[0]} | changes))


OPTIMIZER = wire()[1]
FILE = {"path": "absent/run.pt", "module": OPTIMIZER.module, "optimizer": OPTIMIZER}
SPLIT, GENERATOR = OPTIMIZER.split, NoiseGenerator(0)
BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-3, "sample_rate": 0.2, "steps": 4}
LOSSES = {"losses": torch.ones(3), "threshold": 1.0}
PRIVATE_LOSSES = LOSSES | {"noise_multiplier": 1.0, "expected_batch_size": 3.0, "generator": GENERATOR}


def train(data):
    yield 3.0, lambda record: torch.zeros(())


# What is called, and good values for all arguments that have none.
CALLS = {
    "PrivacyEngine": (PrivacyEngine, {}),
    "make_private_with_epsilon": (wire, {}),
    "step": (step, {}),
    "save_checkpoint": (PrivacyEngine().save_checkpoint, FILE),
    "load_checkpoint": (PrivacyEngine().load_checkpoint, FILE),
    "from_json": (Statement.from_json, {}),
    "epsilon_spent": (OPTIMIZER.epsilon_spent, {}),
    "load_state_dict": (lambda **given: wire()[1].load_state_dict(**given), {}),
    "get_epsilon": (PrivacyEngine().get_epsilon, {}),
    "AutomaticClipping": (AutomaticClipping, {}),
    "AbadiClipping": (hyfreedp.AbadiClipping, {}),
    "calibrate_noise": (hyfreedp.calibrate_noise, BUDGET),
    "epsilon": (hyfreedp.epsilon, {"noise_split": SPLIT}),
    "NoiseSplit": (hyfreedp.NoiseSplit, {**vars(SPLIT)}),
    "NoiseGenerator": (NoiseGenerator, {}),
    "total_epsilon": (hyfreedp.total_epsilon, {"runs": [OPTIMIZER.statement()], "delta": 1e-3}),
    "Statement": (Statement, {**vars(OPTIMIZER.statement())}),
    "Statement.epsilon": (OPTIMIZER.statement().epsilon, {}),
    "privatize_loss": (hyfreedp.privatize_loss, PRIVATE_LOSSES),
    "clipping_bias": (hyfreedp.clipping_bias, LOSSES),
    "normal_clipping_bias": (hyfreedp.normal_clipping_bias, {"threshold": 1.0, "mean": 0.5, "std": 1.0}),
    "fit_quadratic": (hyfreedp.fit_quadratic, {"etas": [-1.0, 0.0, 1.0], "losses": [1.0, 0.5, 0.7]}),
    "replace_batch_norm": (hyfreedp.replace_batch_norm, {}),
    "token_budget": (hyfreedp.token_budget, {"tokens_of": len, "budget": 5}),
    "audit": (hyfreedp.audit, {"train": train, "records": make_data(8), "canaries": [*make_data(8)], "delta": 1e-3}),
}
SIGNATURES = {
    "make_private_with_epsilon": PrivacyEngine.make_private_with_epsilon,
    "step": hyfreedp.HyFreeDPOptimizer.step,
    "load_state_dict": hyfreedp.HyFreeDPOptimizer.load_state_dict,
}


def arguments(name):
    parameters = inspect.signature(SIGNATURES.get(name, CALLS[name][0])).parameters
    plain = [one.name for one in parameters.values() if one.kind is not one.VAR_KEYWORD and one.name != "self"]
    return plain + [*FIELDS] * (name == "make_private_with_epsilon")


def test_every_public_name_is_tried():
    assert {*hyfreedp.__all__} - RESULTS - {"PRESETS"} <= CALLS.keys() | {"Preset"}  # whose fields the engine takes


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", CALLS)
def test_any_value_works_or_is_refused_by_the_arguments_name(name, every, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, good = CALLS[name]
    before, unclear = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for place, argument in enumerate(arguments(name)):
        for value in VALUES[place % every :: every]:  # one in five of each argument's, or all
            start = time.process_time()
            try:
                with warnings.catch_warnings(action="ignore"):
                    call(**(good | {argument: value}))
            except OSError as error:  # of files, which it names
                assert argument in (*FILE, "checkpoint_dict"), error
            except Exception as error:
                if argument not in str(error) or not isinstance(error, TypeError | ValueError | RuntimeError):
                    unclear.append(f"{argument}={value!r}: {type(error).__name__}: {error}")
            if (spent := time.process_time() - start) > SECONDS:
                unclear.append(f"{argument}={value!r} took {spent:.1f} s")
    assert not unclear, "\n".join(unclear)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"{grown:.0f} MB"
