"""tfshard: train a Keras 3 model on TensorFlow, sharded over a DTensor mesh, with one argument.

    model.compile(optimizer, loss, strategy=tfshard.ShardedStrategy(...))

Where to look:

    control       the control channel of a launched run
    clients       a client of a launched run: its settings, and what it tells its launcher
    runtime       initialize: the one place that sets environment switches and starts DTensor
    mesh          create_mesh: axis names to a mesh
    layout_map    LayoutMap: path patterns to column, row and other layouts
    layouts       where each variable rests; pure Python
    placement     tensors to devices and back
    variables     ShardedVariable: two layouts, deferred writes (why: its note)
    data          batches to the mesh
    support       checks on models before anything is done
    planning      ShardingPlan: what will be stored and sent; abstract_model
    analyzer      ParameterAnalyzer: which variables share a buffer; plan
    presets       analyzers for networks
    advice        advise: which mesh and stage fit
    strategy      ShardedStrategy: a tf.distribute strategy over the layers above
    report        what every device holds
    trainer       as_distributed, Model, Sequential
    collectives   rank, barrier, all_reduce and others, on values of the clients of a launched run
    network       profile_network: latency and bandwidth of the collectives
    agreements    what clients agree on, as their launcher sees it
    processes     the processes of a launched run on this machine
    hosts         where the launchers of a run are
    launch_options  Launch: what is launched
    leader        the launcher that leads a run: it watches, ends and restarts the clients
    follower      the launcher of another host
    launcher      launch: leads or follows
    cli           the command line: tfshard plan, launch, doctor, profile-network
    _private      every private TensorFlow and Keras name
"""

from tfshard import _private, collectives, presets  # _private first: it checks the versions of TensorFlow and Keras.
from tfshard.advice import Advice, advise
from tfshard.analyzer import ParameterAnalyzer, plan
from tfshard.data import InputShard
from tfshard.errors import (
    ClientError,
    CollectiveError,
    ConsistencyError,
    InitializationError,
    LaunchError,
    LayoutError,
    MeshError,
    PlanMismatchError,
    ShardingError,
    StrategyError,
    UnsupportedLayerError,
    UnsupportedOperationError,
)
from tfshard.layout_map import LayoutMap
from tfshard.mesh import create_mesh
from tfshard.network import NetworkProfile, profile_network
from tfshard.planning import Collective, ShardingPlan, abstract_model
from tfshard.profiling import StepProfile, assert_matches_plan, profile_step
from tfshard.report import Report
from tfshard.runtime import Runtime, initialize
from tfshard.strategy import ShardedStrategy
from tfshard.trainer import Model, Sequential, as_distributed
from tfshard.variables import ShardedVariable

__version__ = "0.1.0"

__all__ = [
    "ConsistencyError",
    "Advice",
    "ClientError",
    "Collective",
    "CollectiveError",
    "InitializationError",
    "InputShard",
    "LaunchError",
    "LayoutError",
    "LayoutMap",
    "MeshError",
    "Model",
    "NetworkProfile",
    "PlanMismatchError",
    "ParameterAnalyzer",
    "Report",
    "Runtime",
    "Sequential",
    "ShardedStrategy",
    "ShardedVariable",
    "ShardingError",
    "ShardingPlan",
    "StrategyError",
    "UnsupportedLayerError",
    "UnsupportedOperationError",
    "StepProfile",
    "abstract_model",
    "advise",
    "as_distributed",
    "assert_matches_plan",
    "collectives",
    "create_mesh",
    "initialize",
    "profile_network",
    "profile_step",
    "plan",
    "presets",
]

del _private
