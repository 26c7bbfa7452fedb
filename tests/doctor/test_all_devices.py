"""`tfshard doctor --all-devices` runs each check in separate processes, and its report names faults and hangs."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import pytest

import launched
from tfshard import cli, command_line
from tfshard.doctor import all_devices, check_list, check_runs, failing_steps, outcome
from tfshard.doctor.check_list import FIRST, PlannedCheck
from tfshard.doctor.check_log import LOG_FILE, CheckLog
from tfshard.doctor.check_process import stacks_file
from tfshard.doctor.outcome import OUTPUT_FILE, CheckState, Outcome
from tfshard.doctor.written_report import DoctorReport
from tfshard.launch.options import Launch
from tools.fault_runs import watched

CHECK = PlannedCheck(name="parity-batch4", title="weights of one device", function="parity")
STACKS = """Thread 0x01 (most recent call first):
  File "other.py", line 1 in waits

Thread 0x02 (most recent call first):
  File "hangs.py", line 7 in planted_hang
  File "main.py", line 9 in <module>
"""
# Python imports this module when it starts.
SITE = """
import sys
if "tfshard.doctor.check_process" in sys.orig_argv:
    import planted_faults
    planted_faults.plant(sys.orig_argv[-1])
"""


def ended(
    folder: pathlib.Path, *, code: int | None = 0, output: str = "", stacks: str = "", faults=(), check=CHECK
) -> Outcome:
    """Return the outcome of a check of two clients that left some files."""
    log = CheckLog(folder / LOG_FILE)
    log.summarize("a headline")
    for each in faults:
        log.fault(each)
    (folder / OUTPUT_FILE).write_text(output)
    (folder / stacks_file(1)).write_text(stacks)
    return outcome.outcome_of(check, folder, code, 1.0, clients=2)


# --- outcomes ----------------------------------------------------------------------------------------


def test_a_check_without_faults_is_ok(tmp_path):
    found = ended(tmp_path)
    assert (found.state, found.is_bad, found.output) == (CheckState.OK, False, "")
    assert found.line() == "parity-batch4                ok                 1 s  a headline"


def test_a_check_with_faults_exits_with_0_and_is_bad(tmp_path):
    found = ended(tmp_path, faults=["One is wrong.", "Two is wrong."])
    assert (found.state, found.is_bad) == (CheckState.FAULT, True)
    assert found.line().endswith("FAULT              1 s  One is wrong. (and 1 more)")


def test_a_check_that_ends_with_an_error_says_why(tmp_path):
    found = ended(tmp_path, code=3, output="tfshard launch: Client 1 ended with exit code 3.\n[client 1] more")
    assert found.state is CheckState.FAILED
    assert found.faults == ("The check ended with exit code 3. Client 1 ended with exit code 3.",)
    assert found.output.endswith("[client 1] more")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"code": None}, "parity-batch4 did not end within its time limit."),
        ({"code": 1, "stacks": f"Timeout (0:02:00)!\n{STACKS}"}, "parity-batch4 did not end within its time limit."),
        (
            {"code": 1, "output": "tfshard launch: Clients (1,) did not reach training step 3 within 60 s: stuck (x)."},
            "Clients (1,) did not reach training step 3 within 60 s: stuck (x).",
        ),
    ],
    ids=["ended from outside", "ended by itself", "ended by the launcher"],
)
def test_a_check_that_hangs_says_who_and_where(tmp_path, options, said):
    found = ended(tmp_path, **{"stacks": STACKS, **options})
    assert found.state is CheckState.HUNG
    assert found.faults == (said, 'Client 1 was at "hangs.py", line 7, in planted_hang.')
    assert "planted_hang" in found.stacks[1]


STEP = PlannedCheck(
    name="failing-steps-a", title="a step", function="failing-steps", ends_with=("ValueError", "not finite")
)
OTHER = "The run ended with another error than ValueError: '... not finite ...': a step."


@pytest.mark.parametrize(
    ("code", "output", "faults"),
    [
        (1, "[client 1] ValueError: A step failed.\n[client 1] It is not finite\n", ()),
        (0, "", ("The step did not end the run: a step.",)),
        (1, "ValueError: other", (OTHER,)),
        (1, "TypeError: not finite", (OTHER,)),
    ],
    ids=["the error", "no error", "another message", "another type"],
)
def test_a_step_that_has_to_end_the_run_is_judged_by_its_error(code, output, faults, tmp_path):
    found = ended(tmp_path, check=STEP, code=code, output=output)
    assert (found.faults, found.is_bad) == (faults, bool(faults))


def test_a_step_that_the_devices_cannot_run_is_skipped(tmp_path):
    found = ended(tmp_path, check=STEP, output=f"[client 0] {failing_steps.SKIPPED}a step.\n[client 0] more")
    assert (found.state, found.is_bad, found.faults) == (CheckState.SKIPPED, False, ())
    assert found.log.headline == f"{failing_steps.SKIPPED}a step."


def test_a_step_of_a_launched_run_of_one_client_is_judged_by_its_log(tmp_path):
    """Such a run goes on after the step, as a process that was not launched."""
    CheckLog(tmp_path / LOG_FILE).fault("The step after the failed step raised an error.")
    found = outcome.outcome_of(STEP, tmp_path, 0, 1.0, clients=1)
    assert found.faults == ("The step after the failed step raised an error.",)
    CheckLog(tmp_path / LOG_FILE).summarize("1 of 1")
    assert outcome.outcome_of(STEP, tmp_path, 0, 1.0, clients=1).line().endswith("1 of 1")


# --- the report --------------------------------------------------------------------------------------


def test_the_report_is_written_after_each_check(tmp_path):
    folder = tmp_path / "check"
    folder.mkdir()
    report = DoctorReport(tmp_path, "tfshard doctor --all-devices")
    report.expect([CHECK, FIRST])
    report.add(
        ended(folder, code=1, stacks=STACKS, output="tfshard launch: Client 1 | is stuck.", faults=["A\nfault."])
    )
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["not run"] == ["environment"] and values["checks"][0]["state"] == "HUNG"
    text = (tmp_path / "report.md").read_text()
    assert "- command: tfshard doctor --all-devices" in text
    assert "| parity-batch4 | HUNG | 1.0 | A fault.; Client 1 \\| is stuck.; Client 1 was at" in text
    assert "| environment | not run |  |  |" in text
    assert "- **HUNG** A fault." in text and "planted_hang" in text.partition("Stacks of client 1")[2]


# --- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--report_dir=here",), "These flags need --all-devices."),
        (("--num_processes=2",), "These flags need --all-devices."),
        (("--all-devices", "--num_processes=2"), "Several processes need --devices_per_process."),
        (("--all-devices", "--devices_per_process=2"), "devices_per_process needs --num_processes."),
        (
            ("--all-devices", "--num_processes=2", "--devices_per_process=2", "--num_devices=4"),
            "num_devices is for one process.",
        ),
        (("--all-devices", "--check_timeout=0"), "check_timeout must be positive."),
        (("--all-devices", "--links=nowhere.json"), "--links must be an existing file"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, said):
    assert said in str(command_line.refusal(["doctor", *flags]))


def test_the_flags_are_the_options(tmp_path):
    flags = [f"--report_dir={tmp_path}", "--checks=parity,overlap", "--check_timeout=9"]
    assert command_line.refusal(["doctor"]) is None
    alone = cli._doctor_options(command_line.parse(["doctor", "--all-devices", "--num_devices=4", *flags]).values)
    assert (alone.folder, alone.names, alone.seconds) == (tmp_path, ("parity", "overlap"), 9.0)
    assert (alone.num_devices, alone.launch) == (4, None)
    several = ["doctor", "--all-devices", "--num_processes=2", "--devices_per_process=3", "--port=7000"]
    launch = cli._doctor_options(command_line.parse(several).values).launch
    assert (launch.num_processes, launch.devices_per_process, launch.port) == (2, 3, 7000)


def test_hosts_that_share_a_folder_write_to_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TFSHARD_SECRET", "s" * 32)
    several = ["doctor", "--all-devices", "--hosts=a,b", "--devices_per_process=1", f"--report_dir={tmp_path}"]
    folders = [
        cli._doctor_options(command_line.parse([*several, f"--host_index={index}"]).values).folder for index in (0, 1)
    ]
    assert folders == [tmp_path, tmp_path / "host-1"]


def test_a_doctor_that_a_launcher_started_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TFSHARD_CONTROL", "127.0.0.1:1")
    monkeypatch.setenv("TFSHARD_PID", str(os.getpid()))
    with pytest.raises(command_line.UsageError, match="Start it without 'tfshard launch'.*127.0.0.1:1"):
        all_devices.check_all_devices(check_runs.DoctorOptions(folder=tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_an_unknown_check_is_refused_before_anything_runs(tmp_path):
    launch = Launch(command=(), num_processes=2, devices_per_process=2)
    options = check_runs.DoctorOptions(folder=tmp_path / "none", names=("parities",), launch=launch)
    with pytest.raises(command_line.UsageError, match="There is no check 'parities'. Checks: .'environment', 'rank-"):
        all_devices.check_all_devices(options)
    assert not (tmp_path / "none").exists()


# --- runs --------------------------------------------------------------------------------------------


def test_hosts_that_a_check_does_not_need_pass_it_over(tmp_path):
    secret = "s" * 32
    launch = Launch(
        command=(), num_processes=2, devices_per_process=2, hosts=("a", "b"), host_index=1, secret=secret, port=7000
    )
    runs = check_runs.CheckRuns(check_runs.DoctorOptions(folder=tmp_path, launch=launch))
    checks = check_list.checks_of(8, (2, 4), is_launched=True)
    on_one_host = next(each for each in checks if each.name == "scaling-4")
    assert runs.run(on_one_host).state is CheckState.ELSEWHERE
    # Followers never meet the leader of the run before.
    assert [runs._port(launch, hosts) for hosts in (2, 1, 2, 2)] == [7001, 0, 7000, 7001]


def test_a_check_does_not_read_the_results_of_an_earlier_run(tmp_path, monkeypatch):
    """The folder has a fault and stacks of a time limit. The next process dies before it writes anything."""
    folder = tmp_path / CHECK.name
    folder.mkdir()
    assert ended(folder, code=1, stacks=f"Timeout (0:02:00)!\n{STACKS}", faults=["An old fault."]).log.faults
    monkeypatch.setattr(check_runs, "_MODULE", "no_such_module")
    found = check_runs.CheckRuns(check_runs.DoctorOptions(folder=tmp_path, num_devices=2)).run(CHECK)
    assert (found.state, found.stacks, found.log.to_dict()) == (CheckState.FAILED, {}, CheckLog().to_dict())
    assert "no_such_module" in found.faults[0] and "An old fault." not in found.faults


def test_a_signal_ends_all_checks_and_the_report_has_those_before(tmp_path, monkeypatch, capsys):
    def interrupted(runs, check):
        if check is FIRST:
            return Outcome(check=check, state=CheckState.OK)
        raise KeyboardInterrupt

    monkeypatch.setattr(check_runs.CheckRuns, "run", interrupted)
    launch = Launch(command=(), num_processes=2, devices_per_process=2)
    assert all_devices.check_all_devices(check_runs.DoctorOptions(folder=tmp_path, launch=launch)) == 1
    states = [each["state"] for each in json.loads((tmp_path / "report.json").read_text())["checks"]]
    assert states == ["ok", "interrupted"]
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_with_its_stacks(tmp_path, monkeypatch):
    """A process alone: it ends itself at the limit, or is ended a little later."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "def planted_hang(*arguments):\n    time.sleep(600)\n"
        "if 'tfshard.doctor.check_process' in sys.orig_argv:\n"
        "    import tfshard.doctor.environment as e\n    e.run = planted_hang\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{launched.ROOT}")
    runs = check_runs.CheckRuns(check_runs.DoctorOptions(folder=tmp_path, seconds=4.0, num_devices=2))
    found = runs.run(FIRST)
    assert found.state is CheckState.HUNG and found.seconds < 4 + check_runs._BEYOND + 30
    assert "in planted_hang" in found.faults[-1]


def doctor(folder: pathlib.Path, *flags: str, plants: bool = False, host: int = 0) -> tuple[int, dict[str, dict], str]:
    """Run the command. Returns its exit code, the checks of its report by name, and its output."""
    environment = {**os.environ, "PYTHONPATH": str(launched.ROOT)}
    if plants:
        (folder / "sitecustomize.py").write_text(SITE)
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(launched.ROOT), str(launched.HERE)])
    command = [sys.executable, "-m", "tfshard", "doctor", "--all-devices", f"--report_dir={folder}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    report = folder / (f"host-{host}" if host else "") / "report.json"
    assert report.exists(), done.stderr
    values = json.loads(report.read_text())
    assert len(done.stdout.splitlines()) == len(values["checks"]) + 1
    return done.returncode, {each["check"]: each for each in values["checks"]}, done.stdout


PLACES = {
    "four devices": ("--num_devices=4",),
    "two clients": ("--num_processes=2", "--devices_per_process=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", PLACES.values(), ids=PLACES)
def test_all_checks_pass(flags, tmp_path):
    code, checks, out = doctor(tmp_path, *flags, "--check_timeout=300")
    assert {name: each["faults"] for name, each in checks.items() if each["state"] != "ok"} == {}, out
    assert code == 0
    layout = (4, 4) if len(flags) == 1 else (2, 4)
    planned = check_list.checks_of(4, layout, is_launched=len(flags) > 1)
    assert list(checks) == [each.name for each in planned]
    efficiencies = [row["efficiency"] for row in checks["scaling-4"]["tables"]["Step time"]]
    assert len(efficiencies) == 3 and all(each.endswith("%") for each in efficiencies)


@pytest.mark.slow
def test_two_hosts_go_through_the_same_checks(tmp_path, monkeypatch):
    """Two launchers run on two addresses of this machine. One check takes the first host only."""
    monkeypatch.setenv("TFSHARD_SECRET", os.urandom(32).hex())
    flags = [
        "--hosts=127.0.0.1,127.0.0.2", "--num_processes=1", "--devices_per_process=2",
        f"--port={watched.free_port()}", "--checks=rank-order,scaling-2,failing-steps-layer", "--check_timeout=200",
    ]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        hosts = [pool.submit(doctor, tmp_path, *flags, f"--host_index={index}", host=index) for index in (0, 1)]
    (code, first, out), (other_code, second, _) = (host.result() for host in hosts)
    assert (code, other_code) == (0, 0), out
    assert list(first) == list(second) == ["environment", "rank-order", "scaling-1", "scaling-2", "failing-steps-layer"]
    assert {each["state"] for each in first.values()} == {"ok"}
    assert [name for name, each in second.items() if each["state"] == "on other hosts"] == ["scaling-1", "scaling-2"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", PLACES.values(), ids=PLACES)
def test_planted_faults_are_named(flags, tmp_path):
    """The faults of planted_faults.py: permuted ranks, a slow link, a wrong result and sum, and a hang."""
    names = "--checks=rank-order,device-pairs,collective-values,parity-batch4,scaling-4"
    code, checks, out = doctor(tmp_path, *flags, names, "--check_timeout=60", plants=True)
    is_launched, last = len(flags) > 1, 1 if len(flags) > 1 else 0
    assert code == 1, out
    assert checks["environment"]["state"] == "ok"
    assert "in another order" in checks["rank-order"]["faults"][0]
    kind, pair = "within a process", "devices 1, 3"
    if is_launched:
        kind, pair = "between processes of a host", "devices 1, 3 (clients 0, 1)"
    [slow] = checks["device-pairs"]["faults"]
    assert slow.startswith(f"Slow link {kind} between {pair}: ")
    device = "device 1 (client 0)" if is_launched else "device 1"
    assert f"is wrong on {device}." in checks["collective-values"]["faults"][0]
    assert checks["parity-batch4"]["faults"][-1].startswith("On mesh batch=4 at ZeRO stage 3, weights differ")
    hung = checks["scaling-4"]
    assert hung["state"] == "HUNG"
    assert any(f"Client {last} was at " in fault and "planted_hang" in fault for fault in hung["faults"])
    assert "planted_hang" in hung["stacks"][str(last)]
    if is_launched:
        assert hung["faults"][0].startswith("Clients (1,) did not reach")
