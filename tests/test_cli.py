"""The command line."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import tfshard
from tfshard import cli, command_line
from tfshard.doctor import parity_check
from tfshard.layouts import ZeroStage

MODEL = """
import keras
from absl import flags

# A user's script may have flags of the same names.
MESH = flags.DEFINE_string("mesh", "of the script", "")
LAYOUT = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
NUMBER = 3

def layout(axis):
    return {".*up/kernel": (None, axis)}

def build():
    assert MESH.value == "of the script"
    return keras.Sequential(
        [keras.Input((1024,)), keras.layers.Dense(1024, name="up"), keras.layers.Dense(1024, name="down")]
    )
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "keras_models.py"
    path.write_text(MODEL)
    return path


def command(*arguments, **kwargs) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "tfshard", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, **kwargs)


def test_the_command_line_knows_every_zero_stage():
    assert command_line.ZERO_STAGES == {stage.value: stage.adds for stage in ZeroStage}


def test_a_layout_map_may_be_what_a_function_returns(tmp_path):
    maps = tmp_path / "maps_of_functions.py"
    maps.write_text("def layout(axis='model'):\n    return {'.*up/kernel': (None, axis)}\n")
    assert cli._layout_map(f"{maps}:layout") == {".*up/kernel": (None, "model")}


@pytest.mark.slow
def test_plan_prints_json_for_a_mesh_larger_than_the_machine(script):
    done = command(
        *("plan", f"{script}:build", "--mesh=batch:64,model:8", "--zero_stage=2", "--optimizer=adam", "--json"),
        f"--layout_map={script}:LAYOUT",
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["mesh"], plan["zero_stage"]) == ({"batch": 64, "model": 8}, 2)
    layouts = {variable["path"]: variable["compute_layout"] for variable in plan["variables"]}
    assert layouts["sequential/up/kernel"] == [None, "model"]
    assert len(plan["slots"]) == 2 + 2 * 4


@pytest.mark.slow
def test_a_model_that_is_compiled_is_planned_and_simulated_with_its_optimizer(tmp_path):
    """The model is compiled, as for `tfshard verify`."""
    script = tmp_path / "compiled.py"
    compiled = "model = made()\n    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), 'mse')\n    return model"
    script.write_text(f"{MODEL.replace('def build', 'def made')}\n\ndef build():\n    {compiled}\n")
    done = command("plan", f"{script}:build", "--mesh=batch:4", "--json")
    assert done.returncode == 0, done.stderr
    slots = [slot["path"] for slot in json.loads(done.stdout)["slots"]]
    assert len([path for path in slots if "momentum" in path]) == 4, slots
    memory = {}
    for optimizer in ("", "--optimizer=sgd", "--optimizer=adam"):
        done = command(
            "simulate", f"{script}:build", "--cluster=a100", "--batch=64", "--devices=8", "--json", *optimizer.split()
        )
        assert done.returncode == 0, done.stderr
        memory[optimizer] = json.loads(done.stdout)["best"]["8"]["peak_bytes"]
    assert memory["--optimizer=sgd"] < memory[""] < memory["--optimizer=adam"]


def test_plan_prints_a_table_for_an_importable_module(script):
    done = command("plan", "--mesh=batch:4", "keras_models:build", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "Plan for 4 devices (batch=4), ZeRO stage 3" in done.stdout


def test_doctor_trains_on_two_devices_and_agrees_with_one():
    done = command("doctor")
    assert done.returncode == 0, done.stderr
    for part in (
        "tensorflow   2.21",
        "2 x CPU",
        "1, for one operation",
        "switch       DTENSOR_ENABLE_COMBINE",
        "Trainer.compile: takes strategy=",
        "parity       ok",
    ):
        assert part in done.stdout


def run(*arguments) -> int:
    """Run the command in this process, without absl."""
    with pytest.raises(SystemExit) as exit_:
        cli._main(["tfshard", *arguments])
    return exit_.value.code


def test_doctor_fails_when_the_numbers_differ(monkeypatch, capsys):
    monkeypatch.setattr(parity_check, "parity", lambda: 0.5)
    assert run("doctor") == 1
    assert (
        "parity       FAILED: weights on 4 devices differ from those on one device by at most 5.0e-01"
        in capsys.readouterr().out
    )


def test_help_has_a_line_for_each_command(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name, each in command_line.COMMANDS.items():
        assert f"  {name} " in text and each.summary.split(". ")[0][:40] in text
    assert "--mesh" not in text


@pytest.mark.parametrize("name", command_line.COMMANDS)
@pytest.mark.parametrize("arguments", [("{}", "--help"), ("help", "{}"), ("{}", "--mesh=batch:4", "-h")])
def test_help_of_a_command_names_its_flags_and_no_others(capsys, name, arguments):
    assert run(*(each.format(name) for each in arguments)) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: tfshard {name}")
    options = command_line.COMMANDS[name].options()
    assert {line.split()[0] for line in text.splitlines() if line.startswith("  --")} == {
        f"--{flag}" for flag in options
    }
    assert command_line.COMMANDS[name].example.startswith(name)


def test_help_behind_a_launched_program_belongs_to_the_program():
    assert command_line.answer(["launch", "--num_processes=2", "train.py", "--help"]) is None
    assert command_line.answer(["launch", "--num_processes=2", "--help"]) == command_line.command_help("launch")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--version",), f"tfshard {tfshard.__version__}"), (("plan", "--help"), "Usage: tfshard plan MODULE:FUNCTION")],
)
def test_help_and_version_import_no_tensorflow(arguments, text):
    """Checks `python -m tfshard` and the installed script."""
    imported = "import atexit, sys; atexit.register(lambda: print('imported', 'tensorflow' in sys.modules)); "
    script = f"{imported} sys.argv[0] = 'bin/tfshard'; from tfshard.command_line import main; main()"
    as_script = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert as_script.stdout.startswith(text) and as_script.stdout.endswith("imported False\n"), as_script.stderr
    timed = [sys.executable, "-X", "importtime", "-m", "tfshard", *arguments]
    as_module = subprocess.run(timed, capture_output=True, text=True, timeout=60)
    assert as_module.stdout.startswith(text)
    assert "absl.flags" in as_module.stderr and "tensorflow" not in as_module.stderr


REFUSED = {
    ("plan", "SCRIPT:build", "--mash=batch:4"): "Did you mean: mesh",
    ("plan", "--mesh=batch:4"): "takes 1 positional arguments",
    ("plan", "SCRIPT:build", "--mesh=batch=4"): "--mesh must be axes with sizes",
    ("lint", "SCRIPT:build"): "--mesh must be axes with sizes",
    ("verify", "SCRIPT:build", "--mesh=batch:0"): "must be a positive integer",
    ("verify", "SCRIPT:build", "--mesh=batch:4", "--batch=batch"): "Write MODULE:NAME",
    ("plan", "SCRIPT:build", "--mesh=batch:4", "--zero_stage=4"): "Unknown ZeRO stage",
    (
        "plan",
        "SCRIPT:build",
        "--mesh=batch:4",
        "--layout_map=maps.py:MAP",
    ): "The file does not exist. Received: maps.py",
    ("plan", "SCRIPT:build", "--mesh=batch:4", "--links=nowhere.json"): "--links must be an existing file",
    ("plan", "nowhere.py:build", "--mesh=batch:4"): "The file does not exist",
    ("plan", "no_such_module.models:build", "--mesh=batch:4"): "No module named 'no_such_module'",
    ("advise", "SCRIPT:build", "--devices=4"): "Missing: --memory_per_device, --batch",
    ("advise", "SCRIPT:build", "--devices=0", "--memory_per_device=1GiB", "--batch=8"): "devices must be at least 1",
    ("advise", "SCRIPT:build", "--devices=4", "--memory_per_device=1XB", "--batch=8"): "positive number of bytes",
    ("advise", "SCRIPT:build", "--devices=4", "--memory_per_device=1GiB", "--batch=8", "--machine=b100"): "'a100'",
    ("simulate", "SCRIPT:build", "--batch=8"): "Missing: --cluster",
    ("simulate", "SCRIPT:build", "--batch=8", "--cluster=a100", "--devices=8,many"): "--devices must be numbers",
    ("simulate", "SCRIPT:build", "--batch=8", "--cluster=a100", "--plot=no/folder/a.png"): "in an existing folder",
    ("calibrate", "--save=no/folder/machine.yaml"): "in an existing folder",
    ("calibrate", "machine.yaml"): "takes 0 positional arguments",
    ("profile-network", "--sizes=1k"): "--sizes must be numbers",
    ("launch", "--num_processes=0", "SCRIPT"): "num_processes must be at least 1",
    ("launch", "--step_timeout=0", "SCRIPT"): "step_timeout must be positive",
    ("launch", "--num_process=2", "SCRIPT"): "Did you mean: num_processes",
    ("launch", "nowhere.py"): "The file does not exist",
}


def test_a_wrong_command_line_is_refused_without_importing_tensorflow(script):
    """Runs as the installed script: `import tfshard` reads the command line, too."""
    lines = [["bin/tfshard", *(each.replace("SCRIPT", str(script)) for each in line)] for line in REFUSED]
    program = f"""
import sys
lines = {lines!r}
sys.argv = lines[0]
from tfshard import command_line
for sys.argv in lines:
    try:
        command_line.main()
    except SystemExit as exit_:
        print(exit_.code, "tensorflow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["2 False"] * len(REFUSED), done.stderr
    for line, said in zip(REFUSED, done.stderr.splitlines(), strict=True):
        assert said.startswith("tfshard: error: ") and REFUSED[line] in said, (line, said)


@pytest.mark.slow
def test_advise_recommends_a_mesh_and_a_stage(script):
    done = command("advise", f"{script}:build", "--devices=4", "--memory_per_device=1GiB", "--batch=64")
    assert done.returncode == 0, done.stderr
    assert "{'batch': 4}" in done.stdout or "batch=4" in done.stdout
    assert command("advise", f"{script}:build", "--devices=4", "--memory_per_device=1MB", "--batch=64").returncode == 1


def test_pages_that_errors_name_are_printed(capsys):
    assert run("docs", "layers") == 0
    assert capsys.readouterr().out.startswith("# Which Keras layers can be sharded")
    assert run("docs") == 0
    assert {"layers", "launching", "security"} <= set(re.split(r"[, ]+", capsys.readouterr().out.strip()))
    # Every page that a message of the package names.
    package = pathlib.Path(tfshard.__file__).parent
    named = {name for path in package.rglob("*.py") for name in re.findall(r"tfshard docs ([a-z_]+)", path.read_text())}
    assert len(named) >= 3 and named <= set(command_line.pages())


@pytest.mark.parametrize(
    ("text", "bytes_"), [("16GiB", 16 << 30), ("80 GB", 80 * 10**9), ("1.5g", 15 * 10**8), ("123", 123), ("4KiB", 4096)]
)
def test_sizes_are_written_with_units(text, bytes_):
    assert command_line.memory(text) == bytes_


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("plam",),
            "Unknown command. Commands: ('plan', 'advise', 'lint', 'verify', 'launch', 'docs', 'doctor', "
            "'profile-network', 'calibrate', 'simulate'). Did you mean 'plan'? Received: plam",
        ),
        (("plan", "--mesh=batch:4"), "takes 1 positional arguments"),
        (("advise", "SCRIPT:build"), "Give --devices, --memory_per_device and --batch"),
        (
            ("advise", "SCRIPT:build", "--devices=4", "--batch=8", "--memory_per_device=much"),
            "--memory_per_device must be a positive number of bytes, such as '16GiB'",
        ),
        (("launch",), "takes 1 positional arguments ('SCRIPT',)"),
        (("launch", "nowhere.py"), "The file does not exist."),
        (("launch", "--num_processes=0", "SCRIPT"), "num_processes must be at least 1"),
        (("launch", "--hosts=a,b", "SCRIPT"), "does not know which of the hosts this is"),
        (("launch", "--steps=3", "SCRIPT"), "Unknown command line flag 'steps'"),
        (("profile-network", "--sizes=1k"), "--sizes must be numbers"),
        (("plan", "SCRIPT:build", "--mash=batch:4"), "Unknown command line flag 'mash'"),
        (("plan", "SCRIPT:build"), "--mesh must be axes with sizes"),
        (("plan", "SCRIPT:build", "--mesh=batch:four"), "Received: mesh='batch:four'"),
        (("plan", "SCRIPT:build", "--mesh=batch:0"), "positive integer"),
        (("plan", "SCRIPT:build", "--mesh=batch:4", "--zero_stage=4"), "Unknown ZeRO stage"),
        (("plan", "SCRIPT:build", "--mesh=batch:4", "--zero_stage=x"), "invalid literal"),
        (("plan", "SCRIPT:build", "--mesh=batch:4", "--optimizer=adamm"), "Received: optimizer='adamm'"),
        (("plan", "SCRIPT:NUMBER", "--mesh=batch:4"), "must name a function"),
        (("plan", "SCRIPT:nothing", "--mesh=batch:4"), "has no 'nothing'"),
        (("plan", "SCRIPT", "--mesh=batch:4"), "Write MODULE:NAME"),
        (("plan", "SCRIPT:build", "--mesh=model:2", "--layout_map=SCRIPT:layout"), "a LayoutMap, not a function"),
        (("plan", "SCRIPT:build", "--mesh=batch:4", "--zero_stage=5"), "2 (and gradients), 3 (and parameters)"),
        (("plan", "nowhere.py:build", "--mesh=batch:4"), "The file does not exist. Received: nowhere.py"),
        (("plan", "no_such_module:build", "--mesh=batch:4"), "Cannot import 'no_such_module'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(script, capsys, arguments, message):
    plain = script.with_name("plain_models.py")
    # Without flags, which a process can define only once.
    plain.write_text(MODEL.replace("from absl import flags", "").replace("MESH = ", "# ").replace("assert MESH", "# "))
    assert run(*(argument.replace("SCRIPT", str(plain)) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("tfshard: error: ") and error.count("\n") == 1
    assert message in error
