"""Start DTensor in separate processes, because TensorFlow fixes its devices once."""

import os
import subprocess
import sys

import pytest


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_too_late_is_a_clear_error():
    done = run("import tensorflow as tf, tfshard; tf.constant(1); tfshard.initialize(num_devices=4, device_type='CPU')")
    assert done.returncode == 1
    assert "InitializationError: TensorFlow has already fixed its devices (1 logical CPU)" in done.stderr


@pytest.mark.slow
@pytest.mark.on_cpu("processes that choose them by themselves")
def test_the_first_mesh_starts_as_many_devices_as_it_needs():
    done = run("import tfshard; print(tfshard.create_mesh(batch=3).shape(), tfshard.initialize())")
    assert "[3] Runtime(device_type='CPU', num_devices=3)" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [True, False])
def test_dtensor_logs_no_line_for_each_function_unless_the_user_wants_the_log(chosen):
    code = (
        "import os\nif not {chosen}: del os.environ['TF_CPP_MIN_LOG_LEVEL']\n"
        "import tfshard; tfshard.initialize(num_devices=2, device_type='CPU')\n"
        "tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))\n"
    )
    done = run(code.format(chosen=chosen), TF_CPP_MIN_LOG_LEVEL="0")
    assert done.returncode == 0, done.stderr
    assert ("DTensor cache key lookup missed" in done.stderr) == chosen


@pytest.mark.slow
def test_a_forbidden_switch_is_refused():
    code = "import os; os.environ['DTENSOR_ENABLE_MULTI_DEVICE_EXPANSION'] = '1'; import tfshard; tfshard.initialize(2)"
    done = run(code)
    assert "DTENSOR_ENABLE_MULTI_DEVICE_EXPANSION must not be set" in done.stderr


@pytest.mark.slow
def test_dtensor_that_ran_operations_before_is_refused_because_its_failures_would_not_be_seen():
    code = (
        "import tensorflow as tf, tfshard; from tensorflow.experimental import dtensor\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "dtensor.initialize_accelerator_system('CPU')\n"
        "mesh = dtensor.create_mesh([('batch', 2)])\n"
        "if {early}: dtensor.copy_to_mesh(tf.zeros(2), dtensor.Layout.replicated(mesh, 1))\n"
        "print(tfshard.initialize(num_devices=2, device_type='CPU'))\n"
    )
    done = run(code.format(early=True))
    assert "InitializationError: DTensor has run operations in this process already" in done.stderr
    done = run(code.format(early=False))
    assert "Runtime(device_type='CPU', num_devices=2)" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "environment", "threads"),
    [
        ("", {}, "3"),
        ("tf.config.threading.set_intra_op_parallelism_threads(5)", {}, "5"),
        ("", {"TF_NUM_INTRAOP_THREADS": "7"}, "0"),  # TensorFlow reports 0 if the number comes from the environment.
    ],
)
def test_operations_of_logical_devices_share_the_cores(before, environment, threads):
    code = (
        "import tensorflow as tf, tfshard; from tfshard.devices import startup\n"
        "startup._cores = lambda: 12\n"
        f"{before}\n"
        "tfshard.initialize(num_devices=4, device_type='CPU')\n"
        "print('threads', tf.config.threading.get_intra_op_parallelism_threads())\n"
    )
    done = run(code, **environment)
    assert f"threads {threads}\n" in done.stdout, done.stderr


SPLIT = """
import os
import tensorflow as tf, tfshard
from tfshard.devices import startup
gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
tf.config.list_physical_devices = lambda kind=None: [gpu] if kind == "GPU" else []
tf.config.get_visible_devices = tf.config.list_physical_devices
tf.config.get_logical_device_configuration = lambda device: {parts}
print(startup._validate_num_devices(None, "GPU"), startup._switches_of("GPU")["DTENSOR_GPU_USE_NCCL_COMMUNICATION"])
os.environ["DTENSOR_GPU_USE_NCCL_COMMUNICATION"] = startup._switches_of("GPU")["DTENSOR_GPU_USE_NCCL_COMMUNICATION"]
print(startup.scatters_what_it_reduces("GPU"), startup.scatters_what_it_reduces("CPU"))
startup._validate_num_devices(5, "GPU")
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("parts", "devices", "nccl"), [("None", 1, 1), ("[tf.config.LogicalDeviceConfiguration(9)] * 4", 4, 0)],
    ids=["whole", "parts"],
)  # fmt: skip
def test_parts_of_a_gpu_are_devices_and_go_without_nccl(parts, devices, nccl):
    done = run(SPLIT.format(parts=parts))
    assert f"{devices} {nccl}\n{bool(nccl)} False" in done.stdout, done.stderr
    assert f"InitializationError: Not enough GPU devices: this process sees {devices}. To try more" in done.stderr
    assert "tf.config.set_logical_device_configuration(tf.config.list_physical_devices('GPU')[0]" in done.stderr
