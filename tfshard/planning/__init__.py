"""Predict what a training step stores and sends, and what is wrong with its layouts, before anything is allocated.

Read `sharding_plan` first: it defines the contents of a plan.

    sharding_plan         `ShardingPlan`: what will be stored and sent
    analyzer              `plan`
    variable_traffic      what a step sends of variables and gradients
    table_traffic         what a step sends of embedding tables, at the most
    gather_counts         how often a step gathers a variable or a group
    gradient_dtypes       in which dtype a step reduces each gradient
    activation_traffic    what a step sends of activations over a model axis
    statistics_traffic    what normalization over a batch sends
    step_graph            the graph of a step's forward and backward pass, after the passes of a real step
    step_collectives      the same with what its collectives and updates wait for, to predict its time
    local_shares          what model axes shard of it
    peak                  what a device holds at the peak of a step
    linter                mistakes in layout maps; run by compile
    links                 how fast devices reach each other, and what collectives take over that
    overlap               how much of what a step sends is hidden behind what it computes
    machine               what devices do in a second: measured, or described
    step_times            how long a step takes on a machine
    compression_gain      whether a compression of gradients pays on a link
    advice                which mesh and stage fit in memory
"""

from tfshard.graph.flops import training_flops
from tfshard.layouts.parameter_analyzer import ParameterAnalyzer
from tfshard.planning.advice import Advice, advise
from tfshard.planning.analyzer import plan
from tfshard.planning.compression_gain import CompressionGain, compression_pays
from tfshard.planning.links import Link, Links
from tfshard.planning.linter import Finding, lint
from tfshard.planning.machine import Machine
from tfshard.planning.overlap import Overlap
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.planning.variable_traffic import Collective, predict_collectives

__all__ = [
    "Advice",
    "Collective",
    "CompressionGain",
    "Finding",
    "Link",
    "Links",
    "Machine",
    "Overlap",
    "ParameterAnalyzer",
    "ShardingPlan",
    "advise",
    "compression_pays",
    "lint",
    "plan",
    "predict_collectives",
    "training_flops",
]
