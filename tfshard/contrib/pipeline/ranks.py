"""Pipeline ranks, and the copies of variables that several of them share.

If stages on several pipeline ranks share a layer (an embedding table that is also the last layer's matrix), each of
these pipeline ranks has a copy of the variable. The *home* is on the pipeline rank of the first of these stages, which
updates the variable. The other copies are *mirrors*: they receive the value after each update, and their gradients are
added to the gradient at home. Optimizer variables without a weight (iterations, learning rate) are on each pipeline
rank, too: every pipeline rank updates them in the same way.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.contrib.pipeline.cut import CutModel, Stage
from tfshard.devices import transfer
from tfshard.graph import inventory
from tfshard.operations import averages
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training import reshard
from tfshard.training.attached_model import attached
from tfshard.training.attached_variables import attach_variables, create_slot
from tfshard.training.microbatches import sharded_of
from tfshard.training.strategy import ShardedStrategy


class PipelineRank:
    """A pipeline rank: one index of the pipeline axis.

    Attributes:
        number: The index, from 0.
        strategy: The strategy on the mesh of the pipeline rank.
        stages: The stages on the pipeline rank.
        mirrors: Variables with a home on another pipeline rank, and their mirrors here.
        shared: Optimizer variables that all pipeline ranks have, and their copies here; empty on the last pipeline
            rank, which holds the variables that a user sees.
        known: For each variable in `mirrors` and `shared`: its home storage, and how often the storage had been set
            when the value was last copied here.
    """

    def __init__(self, number: int, strategy: ShardedStrategy, stages: list[Stage]):
        self.number = number
        self.strategy = strategy
        self.stages = stages
        self.mirrors: dict[int, tuple[keras.Variable, tf.Variable]] = {}
        self.shared: dict[int, tuple[keras.Variable, tf.Variable]] = {}
        self.known: dict[int, tuple[Storage, int]] = {}

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Give Keras's variables their values on this pipeline rank, while this context is open."""
        views = [*self.mirrors.values(), *self.shared.values()]
        before = [(variable, _private.backend_variable(variable)) for variable, _ in views]
        for variable, here in views:
            _private.set_backend_variable(variable, here)
        try:
            yield
        finally:
            for (variable, _), (_, here) in zip(before, views, strict=True):
                here_now = _private.backend_variable(variable)
                for kept in (self.mirrors, self.shared):
                    if id(variable) in kept and here_now is not here:
                        kept[id(variable)] = variable, here_now
            for variable, home in before:
                _private.set_backend_variable(variable, home)

    @property
    def variables(self) -> list[keras.Variable]:
        """The trainable variables that this pipeline rank updates, in order."""
        found = {id(variable): variable for stage in self.stages for variable in stage.model.trainable_variables}
        return [variable for key, variable in found.items() if key not in self.mirrors]


def ranks_of(cut: CutModel, strategy: ShardedStrategy) -> list[PipelineRank]:
    """Return the pipeline ranks of a cut model: stage `n` is on pipeline rank `n mod ranks`."""
    count = len(strategy.ranks)
    return [PipelineRank(number, each, list(cut.stages[number::count])) for number, each in enumerate(strategy.ranks)]


def place(ranks: list[PipelineRank]) -> None:
    """Move the variables of each stage to the mesh of its pipeline rank."""
    home: dict[int, int] = {}
    stages = sorted((stage.number, rank.number) for rank in ranks for stage in rank.stages)
    for number, at in stages:
        rank = ranks[at]
        stage = next(stage for stage in rank.stages if stage.number == number)
        for variable, _ in inventory.owned_variables(stage.model):
            if home.setdefault(id(variable), at) != at and id(variable) not in rank.mirrors:
                rank.mirrors[id(variable)] = variable, _copy(variable)
        rank.strategy.stage_models.add(stage.model)
        with rank.seen():
            attached(stage.model, rank.strategy).attach()


def _copy(variable: keras.Variable) -> tf.Variable:
    """Return a plain variable with the value of a Keras variable."""
    current = _private.backend_variable(variable)
    assert current is not None, "A model that is cut is built."
    with tf.device("CPU:0"):
        return tf.Variable(transfer.to_host(current), trainable=current.trainable, name=current.name.partition(":")[0])


def place_optimizer(ranks: list[PipelineRank], optimizer: keras.optimizers.Optimizer) -> None:
    """Move the slots of an optimizer to their variables, and copy its other variables to each pipeline rank.

    Args:
        ranks: The pipeline ranks, with their variables.
        optimizer: A built optimizer, with variables on the mesh of the last pipeline rank or of their weights.
    """
    by_mesh = {rank.strategy.mesh.to_string(): rank for rank in ranks}
    shared: list[keras.Variable] = []
    for inner in _private.optimizer_chain(optimizer):
        averages.install(inner)
        references = {each.path.replace("/", "_"): each for each in _private.optimizer_references(inner)}
        for variable in _private.variables_of_optimizer(inner):
            owner = _private.slot_owner(variable.name, references)
            if owner is None:
                shared.append(variable)
                continue
            reference, current = sharded_of(references[owner]), _private.backend_variable(variable)
            if isinstance(current, ShardedVariable) and current.mesh == reference.mesh:
                continue
            spec, options = inventory.variable_spec(variable, None), reshard.options_of(current)
            strategy = by_mesh[reference.mesh.to_string()].strategy
            slot = create_slot(transfer.to_host(current), spec, reference, inner, strategy, **options)
            _private.set_backend_variable(variable, slot)
    attach_variables(shared, ranks[-1].strategy)
    for rank in ranks[:-1]:
        for variable in shared:
            if id(variable) not in rank.shared:
                current = _private.backend_variable(variable)
                layout = rank.strategy.plan_variable(inventory.variable_spec(variable, None))
                here = reshard.sharded(transfer.to_host(current), current, layout=layout, mesh=rank.strategy.mesh)
                rank.shared[id(variable)] = variable, here


def find_homes(ranks: list[PipelineRank], written: Sequence[Collection[object]]) -> None:
    """Give a shared variable to the pipeline rank that alone writes it.

    An example is a statistic that an optimizer keeps for a weight, under a name that does not tell the weight.

    Args:
        ranks: The pipeline ranks.
        written: The storages that the update of each pipeline rank writes.
    """
    every = {key: variable for rank in ranks for key, (variable, _) in rank.shared.items()}
    for key, variable in every.items():
        at = []
        for rank, storages in zip(ranks, written, strict=True):
            here = rank.shared[key][1] if key in rank.shared else sharded_of(variable)
            at += [(rank, here)] if here.storage in storages else []
        if len(at) == 1 and key in at[0][0].shared:
            _private.set_backend_variable(variable, at[0][1])
        if len(at) == 1:
            for rank in ranks:
                rank.shared.pop(key, None)


def bring_up_to_date(ranks: list[PipelineRank]) -> None:
    """Copy values that were set on the host to the mirrors and shared variables of each pipeline rank.

    A callback may have set the learning rate, a checkpoint the iterations, `set_weights` a table.
    """
    for rank in ranks:
        for variable, here in [*rank.shared.values(), *rank.mirrors.values()]:
            home = sharded_of(variable)
            times = home.storage, home.storage.times_set
            if rank.known.get(id(variable)) != times:
                here.assign(home.numpy())
                rank.known[id(variable)] = times
