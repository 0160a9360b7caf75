"""The shell scripts, run in a copy of the tree with a stand-in for python, which notes what it is asked to do."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"])
TOOLS = "bash cat chmod cp dirname flock mkdir mktemp rm sha256sum sleep timeout touch".split()

PYTHON = rf"""#!{shutil.which("bash")}
case "$1" in
  -c) [[ -z ${{FAIL_CODE:-}} || $2 != *"$FAIL_CODE"* ]] ; exit ;;
  -V|-VV) echo "Python ${{STUB_VERSION:-3.11.0}}"; exit ;;
  -) exec {sys.executable} "$@" ;;
esac
echo "$*" >>"$LOG"
case "$2" in
  venv)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    for tool in ruff mypy; do
      printf '#!{shutil.which("bash")}\necho "%s $*" >>"$LOG"; [[ ${{FAIL_TOOL:-}} != %s ]]' $tool $tool >"$3/bin/$tool"
      chmod +x "$3/bin/$tool"
    done ;;
  pip) sleep "${{PIP_S:-0}}"; exit "${{PIP_STATUS:-0}}" ;;
  fef.native.build) mkdir -p fef/native/lib; touch fef/native/lib/libfef.so; exit "${{BUILD_STATUS:-0}}" ;;
  -m) echo "trains in $PWD with ${{*:4}}"; exit 7 ;;
  pytest)
    for word in "$@"; do [[ $word == --junitxml=* ]] && report=${{word#*=}}; done
    [[ -n ${{COUNTS:-}} ]] && echo "<testsuites><testsuite $COUNTS/></testsuites>" >"$report"
    exit "${{PYTEST_STATUS:-0}}" ;;
esac
"""


SET_UP_FILES = (
    "setup.cfg", "pyproject.toml", "fef/native/a.cc", "fef/native/a.h", "fef/native/build.py", "fef/native/ucx/a.cc",
)  # fmt: skip


class Sandbox:
    """A copy of what the scripts need, and a PATH with nothing on it but a few tools, the stand-ins among them."""

    def __init__(self, folder: pathlib.Path):
        self.root, self.bin, self.log = folder / "tree", folder / "bin", folder / "log"
        for name in ["scripts", ".ci"]:
            shutil.copytree(ROOT / name, self.root / name)
        (self.root / "fef/native/ucx").mkdir(parents=True)
        for name in SET_UP_FILES:
            (self.root / name).write_text(name)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.add("python3", PYTHON)
        self.add("g++", f"#!{shutil.which('bash')}\n")

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, script: str, *words: str, **environment: str) -> subprocess.Popen:
        environment |= {"PATH": str(self.bin), "LOG": str(self.log), "TMPDIR": str(self.root.parent)}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [self.root / script, *words],
            env=environment,
            cwd=self.root.parent,
            text=True,
            start_new_session=True,
            **pipes,
        )

    def run(self, script: str, *words: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        process = self.start(script, *words, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """What python was asked to do since the last time, without details."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [" ".join(line.split()[:2]) for line in lines]


SET_UP = ["-m pip", "-m fef.native.build"]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax_and_mode(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")


def test_set_up_happens_once_and_again_when_something_changes(sandbox):
    assert sandbox.run("scripts/setup.sh")[0] == 0
    assert sandbox.calls() == ["-m venv", *SET_UP]
    assert sandbox.run("scripts/setup.sh") == (0, "", "")
    assert sandbox.calls() == []
    for name in SET_UP_FILES:
        (sandbox.root / name).write_text("changed")
        assert sandbox.run("scripts/setup.sh")[0] == 0
        assert sandbox.calls() == SET_UP, name
        assert sandbox.run("scripts/setup.sh") == (0, "", "")
    shutil.rmtree(sandbox.root / "fef/native/lib")
    assert sandbox.run("scripts/setup.sh")[0] == 0
    assert sandbox.calls() == SET_UP
    assert sandbox.run("scripts/setup.sh", STUB_VERSION="3.12.1")[0] == 0
    assert sandbox.calls() == SET_UP


@pytest.mark.parametrize("failure", [{"PIP_STATUS": "1"}, {"BUILD_STATUS": "1"}])
def test_a_set_up_that_failed_is_not_taken_for_done(sandbox, failure):
    status, out, err = sandbox.run("scripts/train.sh", **failure)
    assert status == 1 and "trains" not in out
    assert "PIP_STATUS" not in failure or "setup: pip could not install them" in err
    sandbox.calls()
    assert sandbox.run("scripts/setup.sh")[0] == 0
    assert sandbox.calls() == ["-m venv", *SET_UP]  # what it left is not trusted


def test_a_set_up_that_was_killed_is_not_taken_for_done(sandbox):
    process = sandbox.start("scripts/setup.sh", PIP_S="60")
    while not (sandbox.log.exists() and "-m pip" in sandbox.log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    sandbox.calls()
    assert sandbox.run("scripts/setup.sh")[0] == 0
    assert sandbox.calls() == ["-m venv", *SET_UP]


def test_two_set_ups_at_once_do_the_work_once(sandbox):
    first = sandbox.start("scripts/setup.sh", PIP_S="1")
    while not (sandbox.log.exists() and "-m pip" in sandbox.log.read_text()):
        assert first.poll() is None
        time.sleep(0.01)
    status, _, err = sandbox.run("scripts/setup.sh")
    first.communicate(timeout=60)
    assert (first.returncode, status) == (0, 0)
    assert err == "setup: waiting for another set-up of this folder to end\n"
    assert sandbox.calls() == ["-m venv", *SET_UP]


def test_missing_programs_are_one_line_that_says_what_to_install(sandbox):
    (sandbox.bin / "g++").unlink()
    assert sandbox.run("scripts/train.sh") == (
        1,
        "",
        "setup: needs a C++17 compiler and finds none (tried g++ clang++ c++); "
        "on Debian or Ubuntu: apt-get install g++\n",
    )
    sandbox.add("g++", f"#!{shutil.which('bash')}\n")
    _, _, err = sandbox.run("scripts/train.sh", CXX="icpx -fast")
    assert err.startswith("setup: needs a C++17 compiler and finds none (tried icpx -fast)") and err.count("\n") == 1
    status, _, err = sandbox.run("scripts/train.sh", FAIL_CODE="import ensurepip")
    assert (status, err) == (
        1,
        "setup: python3 lacks the venv module; on Debian or Ubuntu: apt-get install python3-venv\n",
    )
    status, _, err = sandbox.run("scripts/train.sh", FAIL_CODE="version_info", STUB_VERSION="3.9.2")
    assert (status, err) == (
        1,
        "setup: needs Python 3.11 or newer and finds Python 3.9.2; "
        "on Debian or Ubuntu: apt-get install python3 python3-venv\n",
    )
    (sandbox.bin / "python3").unlink()
    status, _, err = sandbox.run("scripts/test.sh")
    assert status == 1 and err.startswith("setup: needs Python 3.11 or newer and finds none;") and err.count("\n") == 1
    assert sandbox.calls() == []


def test_train_passes_words_directory_and_status_on(sandbox):
    status, out, _ = sandbox.run("scripts/train.sh", "--config.data.path=a b", "--fresh")
    assert status == 7
    assert out == f"trains in {sandbox.root.parent} with --config.data.path=a b --fresh\n"


@pytest.mark.parametrize(
    ("environment", "status", "last", "said"),
    [
        ({"COUNTS": 'tests="9" failures="0" errors="0" skipped="2"'}, 0, "7 passed, 0 failed, 2 skipped", ""),
        (
            {"COUNTS": 'tests="9" failures="2" errors="1" skipped="0"', "PYTEST_STATUS": "1"},
            1,
            "6 passed, 3 failed, 0 skipped",
            "",
        ),
        (
            {"COUNTS": 'tests="9" failures="0" errors="0" skipped="0"', "FAIL_TOOL": "mypy"},
            1,
            "9 passed, 1 failed, 0 skipped",
            "failed: .*/mypy ",
        ),
        (
            {"COUNTS": 'tests="0" failures="0" errors="0" skipped="0"', "PYTEST_STATUS": "5"},
            1,
            "0 passed, 1 failed, 0 skipped",
            "failed: pytest ended with status 5, no test was collected",
        ),
        ({"PYTEST_STATUS": "3"}, 1, "0 passed, 1 failed, 0 skipped", "failed: pytest ended with status 3"),
        (
            {"COUNTS": 'tests="2" failures="0" errors="0" skipped="0"', "PYTEST_STATUS": "124"},
            1,
            "2 passed, 1 failed, 0 skipped",
            "failed: pytest ended with status 124, it took too long",
        ),
    ],
)
def test_test_script_counts_and_exit_status(sandbox, environment, status, last, said):
    result, out, _ = sandbox.run(".ci/run" if said == "" else "scripts/test.sh", **environment)
    assert (result, out.splitlines()[-1]) == (status, last)
    assert re.search(said, out)
    calls = sandbox.calls()
    assert calls == ["-m venv", *SET_UP, "ruff check", "ruff format", "mypy --no-error-summary", "-m pytest"]
    assert not list(sandbox.root.parent.glob("tmp.*"))  # the report is removed


def test_test_script_passes_words_on(sandbox):
    sandbox.run("scripts/test.sh", "tests/test_a.py", "-k", "b c", COUNTS='tests="1"')
    assert "tests/test_a.py -k b c" in sandbox.log.read_text()


def test_the_slurm_template_starts_a_task_on_each_node(sandbox):
    status, out, err = sandbox.run("scripts/slurm.sh")
    assert (status, out, err) == (2, "", "slurm: this is no SLURM job; start it with sbatch scripts/slurm.sh\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_SUBMIT_DIR": str(sandbox.root)}
    status, _, err = sandbox.run("scripts/slurm.sh", **job)
    assert status == 2 and err.endswith("is missing; submit from the checkout, after scripts/setup.sh\n")
    assert err.count("\n") == 1
    sandbox.run("scripts/setup.sh")
    sandbox.add("srun", f"#!{shutil.which('bash')}\necho $PWD; printf '%s\\n' \"$@\"; exit 5\n")
    status, out, err = sandbox.run("scripts/slurm.sh", "--config.data.path=a b", **job)
    python, train = [".venv/bin/python", "-P", "-m", "experiments.train"], "--config.mesh.devices=12"
    words = ["--kill-on-bad-exit=1", "--label", *python, train, "--config.data.path=a b"]
    assert (status, out.splitlines(), err) == (5, [str(sandbox.root), *words], "")
