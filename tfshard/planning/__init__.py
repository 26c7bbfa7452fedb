"""Predict the storage and the traffic of a training step, and find faults in its layouts, before anything is allocated.

Read `sharding_plan` first: it defines the contents of a plan.

    sharding_plan         `ShardingPlan`: the storage and the traffic of a step
    analyzer              `plan`
    variable_traffic      the collectives of variables and gradients in a step
    gather_counts         how often a step gathers a variable or a group
    gradient_dtypes       the dtype in which a step reduces each gradient
    activation_traffic    the collectives of activations over a model axis in a step
    context_traffic       the collectives over a context axis in a step
    statistics_traffic    the collectives of normalization over a batch
    step_graph            the graph of a step's forward and backward pass, after the passes of a real step
    step_collectives      the same graph with collectives and updates, to predict the time of a step
    local_shares          how model axes shard the tensors of the graph
    peak                  the memory of a device at the peak of a step
    linter                mistakes in layout maps; run by compile
    links                 the speed of links between devices, and the time of collectives over them
    overlap               how much of a step's sending time its computation hides
    machine               the speed of devices: measured, or described
    pipelined_steps       the extension point for predictions of pipelines
    known_machines        the described machine that is most like the devices of this process
    step_times            how long a step takes on a machine
    advice                which mesh and stage fit in memory
"""

from tfshard.graph.flops import training_flops
from tfshard.layouts.parameter_analyzer import ParameterAnalyzer
from tfshard.planning.advice import Advice, advise
from tfshard.planning.analyzer import plan
from tfshard.planning.links import Link, Links
from tfshard.planning.linter import Finding, lint
from tfshard.planning.machine import Machine
from tfshard.planning.overlap import Overlap
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.planning.variable_traffic import Collective, predict_collectives

__all__ = [
    "Advice",
    "Collective",
    "Finding",
    "Link",
    "Links",
    "Machine",
    "Overlap",
    "ParameterAnalyzer",
    "ShardingPlan",
    "advise",
    "lint",
    "plan",
    "predict_collectives",
    "training_flops",
]
