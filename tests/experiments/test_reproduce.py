"""The batch run: what runs, what is resumed, what is said."""

import re
import signal

import pytest

from hyfreedp.experiments.__main__ import main

pytest_plugins, pytestmark = ["batch"], pytest.mark.whole


@pytest.fixture
def three(project):
    # A shell starts background commands with interrupts ignored, and all that these start inherit it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for stem in ("01_first", "02_second", "03_third"):
        project.write(stem)
    yield project
    signal.signal(signal.SIGINT, before)


def test_a_failed_notebook_is_named_at_the_end_and_the_others_run(three, capsys):
    three.write("02_second", "import colour_of_noise")
    assert main(["reproduce", "--profile", "smoke"]) == 1
    out = capsys.readouterr().out
    assert three.log() == ["01_first", "02_second", "03_third"]
    lines = out.splitlines()
    assert [re.sub("[0-9]+ s", "1 s", line) for line in lines[:3]] == [
        "[1/3] 01_first: done after 1 s; 02, 03 left",
        "[2/3] 02_second: failed after 1 s; 03 left",
        "[3/3] 03_third: done after 1 s; none left",
    ]
    assert re.search(r"02_second failed:.*No module named 'colour_of_noise'", out, flags=re.DOTALL)
    assert lines[-1] == "failed: 02_second"
    # The next batch runs the repaired one alone.
    three.write("02_second")
    assert main(["reproduce", "--profile", "smoke"]) == 0
    assert three.log()[3:] == ["02_second"]


def test_an_interrupted_batch_goes_on_where_it_was(three, capsys):
    # The kernel interrupts the batch, as Ctrl-C would, the first time that the second notebook runs.
    three.write(
        "02_second",
        "import signal, time\n"
        "if len(open(cells / 'log.txt').readlines()) == 2:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)\n",
    )
    assert main(["reproduce", "--profile", "smoke"]) == 130
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "interrupted; the same command goes on from here" and "Traceback" not in out
    assert three.log() == ["01_first", "02_second"]
    assert not list((three.build / "smoke").glob(".*")), "a half-written notebook was left behind"
    assert main(["reproduce", "--profile", "smoke"]) == 0
    assert three.log()[2:] == ["02_second", "03_third"]
    assert capsys.readouterr().out.startswith("[1/3] 01_first: up to date; 02, 03 left\n[2/3] 02_second: done")


def test_only_what_changed_runs_again(three, in_process):
    arguments = ["reproduce", "--profile", "smoke", "--only", "01", "02"]

    def again():
        before = len(three.log())
        assert main(arguments) == 0
        return three.log()[before:]

    assert again() == ["01_first", "02_second"] and again() == []
    three.write("01_first", "1 + 1")
    assert again() == ["01_first"]
    (three.package / "module.py").write_text("")
    assert again() == ["01_first", "02_second"]
    assert main(["reproduce", "--profile", "laptop", "--only", "01"]) == 0 and again() == []  # has a folder of its own
    arguments += ["--set", "epsilon=1"]
    assert again() == ["01_first", "02_second"]
