"""``python -m hyfreedp``: what it prints, and one clear line for bad input."""

import json

import pytest
from twins import by_hand

from hyfreedp import PRESETS
from hyfreedp.__main__ import main
from hyfreedp.accounting import NoiseSplit

CHEAP = "--epsilon 1 --delta 1e-5 --n 2000 --batch-size 200 --steps 20 --accountant rdp".split()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_gives_the_noise_of_its_run(preset, capsys):
    optimizer = by_hand(preset=preset, target_epsilon=3.0, steps=25)  # of 40 records, at delta 1e-3
    main(f"--epsilon 3 --delta 1e-3 --n 40 --batch-size 8 --steps 25 --preset {preset} --json".split())
    printed = json.loads(capsys.readouterr().out)
    del printed["shares"], printed["unit"]
    assert NoiseSplit.from_dict(printed) == optimizer.split


def test_a_non_private_run_is_strict_json(capsys):
    main([*CHEAP, "--epsilon", "inf", "--json"])
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert float(printed["target_epsilon"]) == float("inf")
    assert printed["sigma"] == 0
    main([*CHEAP, "--epsilon", "inf"])
    assert "NOT guaranteed: nothing is noised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--delta 0", "target_delta must be in (0, 1), got 0.0"),
        ("--preset paper --interval 21", "interval must be an integer of at least 1 and at most 20 (steps), got 21"),
        ("--batch-size 2001", "--batch-size must be an integer of at least 1 and at most 2000 (n), got 2001"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*CHEAP, *arguments.split()])
    output = capsys.readouterr()
    assert stopped.value.code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1 and message in output.err
