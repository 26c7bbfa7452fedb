"""Start and end the processes of a run together.

A *launcher* starts and watches the clients of its host. The launcher of host 0 is the *leader*. Read `leader` first.

    options       the options of a launch
    hosts         the hosts of a run: this machine, a list, SLURM, Kubernetes
    visible_gpus  the GPUs that each client of a host sees
    processes     the processes on this machine: start, watch, end
    watchdog      the operations of each client, and the client that caused a failure
    agreements    agreements among clients, as their launcher sees them
    leader        the launcher that starts, ends and restarts all clients
    follower      the launcher of any other host
    launcher      `launch`: leads or follows
"""

from tfshard.launch.launcher import launch
from tfshard.launch.options import Launch

__all__ = ["Launch", "launch"]
