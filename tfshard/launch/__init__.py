"""Start and end the processes of a run together.

A *launcher* starts and watches the clients of its host. The launcher of host 0 is the *leader*. Read `leader` first.

    options       the options of a launch
    hosts         the hosts of a run: this machine, a list, or the members of a cluster's run
    processes     the processes on this machine: start, watch, end
    watchdog      the operations of each client, and the client that caused a failure
    agreements    agreements among clients, as their launcher sees them
    leader        the launcher that starts, ends and restarts all clients
    coordinator   the leader of clients that a cluster started
    coordinator_process   the program of the coordinator's process
    follower      the launcher of any other host
    launcher      `launch`: leads or follows
    spawning      `spawn`: a function in the processes of a local run
    spawned       the program of each process of `spawn`
"""

from tfshard.launch.launcher import launch
from tfshard.launch.options import Launch

__all__ = ["Launch", "launch"]
