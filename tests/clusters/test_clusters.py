"""The run of a cluster is found in its variables: precedence, contradictions, and what is missing. No device."""

import json
import re
import socket

import pytest
import tensorflow as tf

import cluster_variables
import tfshard
from tfshard import cli, command_line
from tfshard.clusters import cluster_report, find_run, finding, kubernetes, slurm, torchrun
from tfshard.devices import clients, keras_devices, startup
from tfshard.launch import hosts as launch_hosts

HOSTS = ("10.0.0.1", "10.0.0.2")
# The system whose variables each table is read from.
TITLES = {"Vertex AI": "TF_CONFIG", "Kubeflow TFJob": "TF_CONFIG", "Ray Train": "TF_CONFIG"}
ERROR = tfshard.errors.ClusterError


def tf_config(task_type="worker", index=0, **cluster) -> dict[str, str]:
    cluster = cluster or {"worker": ["a:1", "b:2"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})}


@pytest.mark.parametrize("system", cluster_variables.SYSTEMS)
def test_both_members_find_the_same_run(system):
    runs = [find_run(cluster_variables.SYSTEMS[system](index, HOSTS, 2222)) for index in (0, 1)]
    for index, run in enumerate(runs):
        assert run.system == TITLES.get(system, system)
        assert (run.index, run.num_members, run.local_index, run.num_local) == (index, 2, 0, 1)
        assert run.coordinator == HOSTS[0] and run.port > 1024
    assert runs[0].identity == runs[1].identity and runs[0].port == runs[1].port and runs[0].names == runs[1].names
    # Only torchrun's own store takes the port that the variables name.
    expected = {"torchrun": 2223, "SageMaker": 29870}.get(system, 2222)
    assert system in ("SLURM", "Open MPI") or runs[0].port == expected


@pytest.mark.parametrize("system", cluster_variables.SYSTEMS)
def test_a_launcher_on_each_host_takes_the_members_as_hosts(system):
    found = launch_hosts.find_hosts(None, None, cluster_variables.SYSTEMS[system](1, HOSTS, 2222))
    assert found.index == 1 and found.names in (HOSTS, (HOSTS[0], ""))
    assert found.identity["members"] == 2


@pytest.mark.parametrize("system", ["SLURM", "torchrun", "Open MPI"])
def test_members_of_one_machine_are_numbered_and_a_launcher_among_them_is_refused(system):
    environment = cluster_variables.SYSTEMS[system](1, ("127.0.0.1", "127.0.0.1"), 2222)
    run = find_run(environment)
    assert (run.local_index, run.num_local, run.has_own_gpus) == (1, 2, False)
    assert run.coordinator == "127.0.0.1"
    with pytest.raises(ERROR, match=r"started 2 launchers on this machine.*tfshard.initialize\(\)"):
        launch_hosts.find_hosts(None, None, environment)


def test_the_chief_is_the_first_member_and_parameter_servers_are_left_out():
    cluster = {"worker": {"0": "w0:1", "1": "w1:1"}, "ps": ["p:1"], "chief": ["c:5"]}
    run = find_run(tf_config("worker", 1, **cluster))
    assert (run.index, run.addresses, run.port) == (2, ("c", "w0", "w1"), 5)
    assert "['ps'] take no part" in run.notes[0]
    assert find_run(tf_config("master", 0, master=["m:1"], worker=["w:1"])).addresses == ("m", "w")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (tf_config("evaluator"), r"this task is an evaluator.*fit\(validation_data=.*TFSHARD_CLUSTER=none"),
        (tf_config("ps", ps=["p:1"], worker=["w:1"]), "this task is a parameter server"),
        (tf_config("boss"), r"Types: \('chief'.*'evaluator'\).*Received: 'boss'"),
        (tf_config("worker", 2), r"does not list this task.*\('worker', 1\)\].*Received: task=\('worker', 2\)"),
        (tf_config("worker", None), r"does not list this task.*Received: task=\('worker', None\)"),
        (tf_config(worker=["a", "b"]), "HOST:PORT, with a port from 1 to 65535.*Received: 'a'"),
        (tf_config(worker="a:1"), "list of HOST:PORT.*Received: 'a:1'"),
        ({"TF_CONFIG": "{'cluster'"}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG must look like"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG must look like"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not.*Received: RANK=0, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "torchrun needs MASTER_PORT"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK must be an integer from 0 to 1",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "does not tell the address of rank 0.*-x TFSHARD_COORDINATOR",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "needs SLURM_STEP_NODELIST"),
        (
            {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0"},
            "contradict each other: 3 tasks on 2 nodes",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-", "SLURM_PROCID": "0"}, "cannot be parsed"),
        (
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"},
            r"not one of the hosts. Hosts: \['a', 'b'\].*Received: 'c'",
        ),
        (
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "SM_RESOURCE_CONFIG": '{"current_host": "b"}'},
            "SM_RESOURCE_CONFIG contradicts",
        ),
        ({"JOB_COMPLETION_INDEX": "0"}, "Set the environment variable TFSHARD_NUM_PROCESSES"),
        (
            {"JOB_COMPLETION_INDEX": "0", "TFSHARD_NUM_PROCESSES": "2", "HOSTNAME": "other"},
            "must end with its index.*Set TFSHARD_COORDINATOR",
        ),
        ({"TFSHARD_CLUSTER": "nomad"}, r"TFSHARD_CLUSTER must be one of \('auto', 'none', 'tfshard'"),
        ({"TFSHARD_CLUSTER": "slurm", **tf_config()}, "chooses SLURM, whose variables describe no run"),
        ({"TFSHARD_NUM_PROCESSES": "3", **tf_config()}, "TFSHARD_NUM_PROCESSES contradicts TF_CONFIG.*says 2"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_an_error_with_the_variable_and_the_remedy(environment, message):
    with pytest.raises(ERROR, match=f"(?s){message}") as error:
        find_run(environment)
    assert "Received" in str(error.value)


def test_two_systems_that_disagree_on_this_member_are_an_error_until_one_is_chosen():
    both = {**cluster_variables.slurm(1, HOSTS, 0), **cluster_variables.torchrun(0, HOSTS, 2222)}
    with pytest.raises(ERROR, match=r"torchrun and SLURM both describe.*TFSHARD_CLUSTER=slurm.*torchrun: 0, SLURM: 1"):
        find_run(both)
    assert find_run({**both, "TFSHARD_CLUSTER": "slurm"}).index == 1
    assert find_run({**both, "TFSHARD_CLUSTER": "torchrun"}).index == 0
    assert find_run({**both, "TFSHARD_CLUSTER": "none"}) is None


def test_the_system_that_started_the_process_inside_another_one_decides():
    inner = cluster_variables.torchrun(1, ("127.0.0.1", "127.0.0.1"), 2222)
    inner |= {"WORLD_SIZE": "4", "RANK": "3"}
    outer = cluster_variables.slurm(1, HOSTS, 0)
    assert find_run({**outer, **inner}).index == 3
    states = {found.system.name: found.state for found in finding.findings({**outer, **inner})}
    assert states["torchrun"] == "chosen"
    assert states["slurm"] == "ignored: torchrun decides, which started its members inside"
    # torchrun with one process, in each of two tasks of SLURM: two runs.
    assert find_run({**outer, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_own_variables_go_before_all_others_and_complete_them():
    own = {"TFSHARD_COORDINATOR": "10.1.0.1:7000", "TFSHARD_NUM_PROCESSES": "3", "TFSHARD_PROCESS_ID": "2"}
    run = find_run({**own, **cluster_variables.vertex_ai(0, HOSTS, 2222), "TFSHARD_CLUSTER": "tfshard"})
    assert (run.coordinator, run.port, run.num_members, run.index) == ("10.1.0.1", 7000, 3, 2)
    other = find_run({"TFSHARD_COORDINATOR": "10.1.0.1", **cluster_variables.slurm(1, HOSTS, 0)})
    assert other.coordinator == "10.1.0.1" and other.names == ("10.1.0.1", "")
    assert other.port == find_run(cluster_variables.slurm(0, HOSTS, 0)).port


def test_flags_of_the_launcher_go_before_the_cluster():
    found = launch_hosts.find_hosts(["x", "y"], 1, cluster_variables.vertex_ai(0, HOSTS, 2222))
    assert (found.names, found.index, found.identity) == (("x", "y"), 1, None)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": ""},
        tf_config("worker", 0, worker=["a:1"]),
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[1-2]"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0"},
        {"PMI_RANK": "0"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    ],
)
def test_a_process_without_other_members_runs_alone(environment):
    assert find_run(environment) is None


def test_pmi_of_mpich_is_read_and_pmi_of_srun_is_slurm():
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert (find_run(mpich).system, find_run(mpich).coordinator) == ("PMI", "127.0.0.1")
    srun = {**cluster_variables.slurm(1, HOSTS, 0), "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert find_run(srun).system == "SLURM"


def test_kubernetes_names_pod_0_with_its_service(monkeypatch):
    pod = {"JOB_COMPLETION_INDEX": "11", "HOSTNAME": "big-train-11", "TFSHARD_NUM_PROCESSES": "12"}
    assert kubernetes.read(pod, "big-train-11.svc.ns.svc.cluster.local").coordinator == (
        "big-train-0.svc.ns.svc.cluster.local"
    )
    jobset = {**pod, "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "set-workers-0-1"}
    assert kubernetes.read(jobset, "set-workers-0-1.set").coordinator == "set-workers-0-0.set"
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.asked")
    assert find_run(pod).coordinator == "big-train-0.asked"


def test_where_the_resolvers_of_tensorflow_are_right_both_find_the_same(monkeypatch):
    resolvers = tf.distribute.cluster_resolver
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 1, chief=["c:5"], worker=["a:1", "b:2"])["TF_CONFIG"])
    theirs, ours = resolvers.TFConfigClusterResolver(), find_run()
    assert (theirs.task_type, theirs.task_id) == ("worker", 1) and ours.index == 2
    assert theirs.cluster_spec().task_address("worker", 1) == f"{ours.addresses[2]}:2"
    for name, value in cluster_variables.slurm(1, HOSTS, 0).items():
        monkeypatch.setenv(name, value)
    step = resolvers.SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False)
    assert [address.split(":")[0] for address in step.cluster_spec().as_dict()["worker"]] == list(HOSTS)


def test_tensorflows_resolver_sorts_nodes_where_slurm_does_not(monkeypatch):
    """The reason not to use it. If this fails, TensorFlow has mended it: then look at clusters/slurm.py."""
    for name, value in cluster_variables.slurm(0, ("n2", "n10"), 0).items():
        monkeypatch.setenv(name, value)
    resolvers = tf.distribute.cluster_resolver
    step = resolvers.SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False)
    assert [address.split(":")[0] for address in step.cluster_spec().as_dict()["worker"]] == ["n10", "n2"]
    assert find_run(cluster_variables.slurm(0, ("n2", "n10"), 0)).addresses == ("n2", "n10")
    with pytest.raises(ValueError):
        resolvers.SlurmClusterResolver(gpus_per_node=2)._jobs and monkeypatch.setenv(
            "SLURM_STEP_NODELIST", "rack[1-2]n[1-2]"
        ) or resolvers.SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1)
    assert slurm.expand_nodes("rack[1-2]n1") == ["rack1n1", "rack2n1"]


def test_a_resolver_is_an_argument_of_initialize():
    spec = tf.train.ClusterSpec({"worker": ["10.0.0.1:5", "10.0.0.2:5"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    run = startup._find_run(resolver)
    assert (run.index, run.coordinator, run.port, run.system) == (1, "10.0.0.1", 5, "cluster_resolver")
    wrong = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=2)
    with pytest.raises(ERROR, match="cluster_resolver does not list this task"):
        startup._find_run(wrong)


def test_a_process_that_a_client_started_is_no_member(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config()["TF_CONFIG"])
    assert startup._find_run(None) is not None, "premise"
    monkeypatch.setenv("TFSHARD_PID", "1")
    assert startup._find_run(None) is None


def test_keras_distribution_knows_the_member_of_a_cluster_before_the_members_meet(monkeypatch):
    assert (keras_devices.process_id(), keras_devices.num_processes()) == (0, 1)
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 1, worker=["a:1", "b:1", "c:1"])["TF_CONFIG"])
    assert (keras_devices.process_id(), keras_devices.num_processes()) == (1, 3)
    with pytest.raises(tfshard.errors.InitializationError, match="a cluster started this process as client 1 of 3"):
        keras_devices.initialize(num_processes=2)


def test_a_process_that_failed_to_start_in_a_run_does_not_go_on_alone(monkeypatch):
    class Client(clients.Alone):
        is_launched = True

    with clients.replaced(Client()):
        with pytest.raises(tfshard.errors.InitializationError, match="has joined a run, and DTensor did not start"):
            startup._find_run(None)


# --- tfshard doctor --cluster ---------------------------------------------------------------------------------


def report(environment: dict[str, str]) -> tuple[str, int]:
    lines, code = cluster_report.report(environment, seconds=2.0)
    return "\n".join(lines), code


def test_the_report_names_what_was_chosen_and_what_was_ignored_and_why():
    environment = {**cluster_variables.torchrun(1, ("127.0.0.1", "127.0.0.1"), 2222), "SM_HOSTS": "[]"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        environment["MASTER_PORT"] = str(listening.getsockname()[1])
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        text, code = report({**environment, "TFSHARD_SECRET": "s" * 40})
    assert code == 0
    assert re.search(r"torchrun +member 1 of 2, by RANK, WORLD_SIZE.*: chosen", text)
    assert re.search(r"sagemaker +cannot be read, by SM_HOSTS: ignored: torchrun decides", text)
    assert re.search(r"tf_config +not set", text)
    assert "secret       40 characters" in text and "s" * 40 not in text
    assert "a program listens there" in text


def test_the_report_of_the_coordinator_says_whether_it_can_listen():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = listening.getsockname()[1]
    environment = cluster_variables.kubeflow(0, ("127.0.0.1", "127.0.0.1"), free)
    text, code = report(environment)
    assert code == 0 and "free. This member is the coordinator" in text
    assert "secret       none: the coordinator sends each member one" in text
    text, code = report(cluster_variables.kubeflow(0, ("name.invalid", "127.0.0.1"), free))
    assert code == 1 and "address      name.invalid: FAILED" in text


def test_the_report_of_no_run_and_of_a_contradiction():
    text, code = report({})
    assert code == 0 and "run          none: this process runs alone" in text
    text, code = report(tf_config("evaluator"))
    assert code == 1 and "error        TF_CONFIG says that this task is an evaluator" in text


def test_the_command_prints_the_report_and_starts_no_device(monkeypatch, capsys):
    for name in tf_config("ps", 0, ps=["a:1"], worker=["b:1"]):
        monkeypatch.setenv(name, tf_config("ps", 0, ps=["a:1"], worker=["b:1"])[name])
    monkeypatch.setattr(startup, "initialize", None)
    assert cli._run(["doctor", "--cluster"]) == 1
    assert "this task is a parameter server" in capsys.readouterr().out
    assert "--cluster takes no other flags" in command_line.refusal(["doctor", "--cluster", "--all-devices"])


def test_torchruns_store_and_the_control_channel_have_two_ports():
    variables = cluster_variables.torchrun(0, HOSTS, 29400)
    assert torchrun.read(variables).port == 29401
    assert torchrun.read({**variables, "TORCHELASTIC_USE_AGENT_STORE": "False"}).port == 29400
