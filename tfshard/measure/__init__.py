"""Measurements: what devices really store and send.

report             what every device stores, and how gradients are reduced
consistency        checks that copies on different devices are bitwise equal
step_profile       the collectives of a step, by TensorFlow's trace; compared with a plan
timeline           operations and collectives of a step in time, and how much of the collectives is hidden
peak_memory        the memory of a step at its peak, by the same trace
network_profile    latency and bandwidth of the collectives
"""

from tfshard.measure.network_profile import NetworkProfile, profile_network
from tfshard.measure.report import Report
from tfshard.measure.step_profile import StepProfile, assert_matches_plan, profile_step
from tfshard.measure.timeline import Timeline

__all__ = [
    "NetworkProfile",
    "Report",
    "StepProfile",
    "Timeline",
    "assert_matches_plan",
    "profile_network",
    "profile_step",
]
