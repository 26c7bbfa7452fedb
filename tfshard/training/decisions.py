"""Logs what was decided for a model, once for each `compile`: the logger `tfshard` at INFO, with details at DEBUG.

No handler is added, so Python prints nothing by default. Nothing is computed unless the level is enabled.
"""

import collections
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import keras

from tfshard import tables
from tfshard.devices import clients
from tfshard.layouts import variable_layout
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.operations import blocks, layer_patch
from tfshard.training.strategy_base import StrategyBase

_LOGGER = logging.getLogger("tfshard")
# A message names this many layers at most.
_NAMED = 8


def log(level: int, text: Callable[[], str]) -> None:
    """Log the text that a function returns, after the rank in a launched run. If the level is off, do not call it."""
    if _LOGGER.isEnabledFor(level):
        here = clients.here()
        _LOGGER.log(level, "%s%s", f"client {here.rank}: " if here.is_launched else "", text())


def tell(model: keras.Model, strategy: StrategyBase, placement: ModelPlacement) -> None:
    """Log what was decided for a built model.

    Args:
        model: The model.
        strategy: Its strategy.
        placement: The layouts of its variables.
    """
    name = f"model '{model.name}'"
    config = strategy.config

    def settings() -> str:
        devices = f"{tables.mesh(strategy.mesh_shape)} of {strategy.mesh.device_type()} devices"
        chosen = [f"mesh {devices}", f"ZeRO stage {config.zero_stage}"]
        chosen.append(f"{config.microbatches.count} microbatch{'es' * (config.microbatches.count > 1)}")
        if config.reduction is not None:
            chosen.append(f"compression {config.reduction.option!r}")
        if config.offload.slots:
            chosen.append("slots in host memory")
        return f"{name}: {', '.join(chosen)}"

    log(logging.INFO, settings)
    log(logging.INFO, lambda: f"{name}: {_variables_text(placement)}")
    log(logging.INFO, lambda: f"{name}: {_blocks_text(model)}")
    log(logging.DEBUG, lambda: "\n".join([f"{name}, variable by variable:", *_details(placement)]))


def tell_recomputed(model: keras.Model, names: Sequence[str]) -> None:
    """Log the blocks that `strategy.recompute` found."""
    log(logging.INFO, lambda: f"model '{model.name}': recomputes {_count(names, 'block')} ({_listed(names)})")


def _count(of: Sequence[object], noun: str) -> str:
    return f"{len(of)} {noun}{'s' * (len(of) != 1)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _bytes(layouts: Sequence[VariableLayout]) -> str:
    return tables.size(sum(variable_layout.spec_bytes(each.spec) for each in layouts))


def _variables_text(placement: ModelPlacement) -> str:
    grouped = [each for each in placement.variables if each.grouped]
    alone = [each for each in placement.variables if not each.grouped and not _is_replicated(each)]
    text = f"{_count(grouped, 'variable')} in {_count([*placement.groups()], 'group')}, {len(alone)} sharded alone"
    reasons: dict[str, list[VariableLayout]] = collections.defaultdict(list)
    for each in placement.variables:
        if _is_replicated(each):
            reasons[_why_replicated(each, placement)].append(each)
    for reason, layouts in reasons.items():
        text += f"; not sharded: {_count(layouts, 'variable')} of {_bytes(layouts)} ({reason})"
    return text


def _is_replicated(layout: VariableLayout) -> bool:
    """Return True if every device stores the full value of a variable."""
    return all(axis is None for axis in layout.storage)


def _why_replicated(layout: VariableLayout, placement: ModelPlacement) -> str:
    spec = layout.spec
    if placement.mesh_shape.shards == 1:
        return "the mesh has no batch axis of several devices, and the layout map does not shard them"
    if not placement.config.zero_stage.shard_params:
        return f"stage {placement.config.zero_stage} shards no parameters over the batch axis"
    if math.prod(spec.shape) <= 1:
        return "a single number"
    if not spec.trainable:
        return f"not trained, and below {tables.size(variable_layout.REPLICATED_BELOW_BYTES)}"
    return "its layout says so"


def _blocks_text(model: keras.Model) -> str:
    recomputed = len(blocks.marks(model))
    compiled = sum(patch.change is layer_patch.COMPILED for patch in layer_patch.patches_of(model))
    return f"{recomputed or 'no'} recomputed blocks, {compiled or 'no'} blocks and layers for XLA"


def _details(placement: ModelPlacement) -> Iterator[str]:
    """Yield a line for each group, and for each variable outside of groups."""
    for number, members in placement.groups().items():
        paths = ", ".join(each.spec.path for each in members)
        count, stored = _count(members, "variable"), members[0].storage
        yield f"  group {number}: {count}, {_bytes(members)}, stored {stored}: {paths}"
    for each in placement.variables:
        if each.grouped:
            continue
        why = f", not sharded: {_why_replicated(each, placement)}" if _is_replicated(each) else ""
        yield f"  {each.spec.path}: {tuple(each.spec.shape)} {each.spec.dtype}, stored {each.storage}{why}"
