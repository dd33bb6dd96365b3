"""The batch run: what runs, what is resumed, what is refused before anything runs, what is said."""

import re
import signal

import pytest

from hyfreedp.experiments.__main__ import main

pytest_plugins = ["batch"]


@pytest.fixture
def three(project):
    # A shell starts background commands with interrupts ignored, and all that these start inherit it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for stem in ("01_first", "02_second", "03_third"):
        project.write(stem)
    yield project
    signal.signal(signal.SIGINT, before)


@pytest.mark.whole
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


NOISE = """
import subprocess, sys, warnings
print("printed")
warnings.warn("warned")
for number in (1, 2):
    os.write(number, b"written\\n")
    subprocess.run(f"echo tokenized 91 tokens >&{number}", shell=True)
"""


@pytest.mark.whole
def test_what_notebooks_and_their_subprocesses_print_is_not_in_the_log(three, capfd, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with which kernels do not look at what subprocesses print
    three.write("01_first", NOISE)
    three.write("02_second", NOISE + "os.abort()")
    assert main(["reproduce", "--profile", "smoke"]) == 1
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["[1/3] 01_first", "[2/3] 02_second", "[3/3] 03_third"]
    assert lines[3] == "0 runs are committed records, 0 were trained here" and not err
    said = out[out.index("02_second failed:") :]  # a dead kernel has no notebook that could tell
    assert "DeadKernelError" in said and "tokenized 91 tokens" in said
    assert out.count("tokenized") == said.count("tokenized")


@pytest.mark.whole
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


@pytest.mark.whole
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


@pytest.mark.whole
def test_settings_reach_the_notebooks_that_have_them_with_the_type_of_the_default(three, in_process):
    three.write("03_third", parameters='profile = "laptop"\nepsilon = [1.0]\ntask = "digits"')
    settings = ["--set", "seeds=5", "--set", "task=3"]
    assert main(["reproduce", "--profile", "smoke", *settings, "--only", "01", "03_third"]) == 0
    assert three.log() == ["01_first", "03_third"]
    assert three.description("01_first")["parameters"] == {"profile": "smoke", "epsilon": 3.0, "task": "3"}
    assert main(["reproduce", "--profile", "gpu", "--set", "epsilon=inf", "--only", "01"]) == 0
    assert three.description("01_first", "gpu")["parameters"]["epsilon"] == float("inf")
    assert main(["reproduce", "--set", "epsilon=1,3", "--only", "03"]) == 0
    assert three.description("03_third", "laptop")["parameters"]["epsilon"] == [1, 3]


@pytest.mark.whole
def test_a_batch_writes_nothing_but_its_folder_and_cells(three, in_process, workspace, capsys):
    committed = workspace.root / "figures"
    committed.mkdir()
    (committed / "01_first.png").write_bytes(b"old")
    (committed / "01_first.json").write_text('{"parameters": {"profile": "smoke", "epsilon": 3.0, "task": "digits"}}')
    before = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    assert main(["reproduce", "--profile", "smoke", "--only", "01", "02"]) == 0
    after = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    new = after.keys() - before.keys()
    assert all(three.build in path.parents or three.cells in path.parents for path in new)
    assert all(after[path] == before[path] for path in before)
    told = "0 of 2 files are the committed ones, byte for byte; different: 01_first.json, 01_first.png"
    assert told in capsys.readouterr().out
    assert told in (three.build / "smoke" / "report.html").read_text()


@pytest.mark.whole
def test_a_wrong_command_is_refused_before_anything_runs(three, in_process, capsys):
    for arguments, message in (
        ("--set epsilonn=1", "no selected notebook has a parameter 'epsilonn'.*did you mean 'epsilon'"),
        ("--set epsilon=__import__('os')", 'parameter epsilon must be float, got "__import__'),
        ("--set seeds=1.5", "parameter seeds must be int, got 1.5"),
        ("--set epsilon", "must be NAME=VALUE, got 'epsilon'"),
        ("--only 02_secnd", "no notebook '02_secnd'.*did you mean '02_second'"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["reproduce", *arguments.split()])
        assert exit_.value.code == 2
        assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not three.log()
