"""`tfshard doctor --all-devices`: checks of all devices of a user, for a bug report.

The command's process starts no device. It runs each check in separate processes with a time limit.

    all_devices         runs all checks, in order
    check_list          the list of checks for a number of devices
    check_runs          the processes of each check
    outcome             the outcome of a check
    written_report      all outcomes, as Markdown and JSON
    check_process       the program of a check's processes
    check_log           the results of a check, written one by one

The checks:

    environment         versions, hosts, devices
    rank_order          the order of the devices
    collective_values   results of collectives
    device_pairs        links between pairs of devices
    axis_bandwidth      bandwidth of collectives by mesh axis
    parity_check        weights after training, compared with one device
    scaling             step time on 1 to n devices
    small_models        the models of `scaling`
    step_memory         peak of a step, beside the plan
    step_overlap        communication that computation hides
    large_layers        the model of `step_memory` and `step_overlap`
    failing_steps       steps that fail
"""
