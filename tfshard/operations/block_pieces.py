"""Cut a compiled block into pieces on a mesh with a model axis: a piece runs on each device without communication.

The block is traced with full weights (local_traces.py). Some weights are stored in shards over the model axis. The
rules of `graph.dim_rules` say which dim of each result is sharded with them. Operations are of two kinds:

- All devices along the model axis compute a *replicated* operation in full, from equal inputs.
- Each device computes its share of a *sharded* operation, from at least one local shard. If the operation contracts the
  sharded dim, its result is a partial sum.

A piece holds operations of one kind. Operations with the same level are in the same piece. The level grows where a
tensor is reduced over the model axis, or goes from one kind to the other. With column and row layers this gives the
communication of Shoeybi et al. 2019, "Megatron-LM", section 3: an all-reduce of the partial sums in the forward pass,
and in the backward pass an all-reduce of the gradients of what enters a sharded piece.

A piece has a graph of its own, with the shapes of the local shards.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import local_shards
from tfshard.graph import dim_rules
from tfshard.operations import online_softmax, programs, row_proof
from tfshard.operations.row_proof import NotByRowsError


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Which dims of a tensor the axes of a mesh shard.

    Attributes:
        data: The dim that the data axis shards. None if all devices along this axis have the same.
        model: The same for the model axis.
        is_partial: True for a result that is the sum over the model axis of what its devices have.
    """

    data: int | None = None
    model: int | None = None
    is_partial: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A part of a traced block that runs without communication.

    Attributes:
        graph: A graph with the shapes of one device.
        operations: The operations of the graph, without those of gradients that are added later.
        inputs: The tensors of the graph that are given.
        taken: For each input, the number of its tensor in the trace (`numbered`).
        given: The sharding of each input.
        outputs: The tensors of the graph to compute.
        made: For each output, the number of its tensor in the trace.
        results: The sharding of each output.
        differentiated: The numbers of the inputs that may have a gradient.
        is_sharded: True if each device along the model axis computes a share.
    """

    graph: tf.Graph
    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    taken: list[int]
    given: list[Sharding]
    outputs: list[tf.Tensor]
    made: list[int]
    results: list[Sharding]
    differentiated: list[int]
    is_sharded: bool = False


def numbered(operations: Iterable[tf.Operation]) -> dict[Hashable, int]:
    """Return a number for each tensor of a trace. Traces of equal operations have equal numbers."""
    numbers: dict[Hashable, int] = {}
    for operation in operations:
        for output in operation.outputs:
            numbers[output.ref()] = len(numbers)
    return numbers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TracedBlock:
    """A traced block to cut.

    Attributes:
        graph: The graph of the trace.
        operations: Its operations, in order.
        inputs: The given tensors: arguments, variables, captured tensors and random tensors.
        arguments: The inputs that are arguments.
        drawn: The inputs that are random tensors.
        outputs: The results of the block.
        samples: The dim of the samples in each tensor that has samples.
        places: The dim that the model axis shards, of each input that it shards.
        changes: The dim that the model axis shards from here on, or None, of results of `steps.LocalVariables.reshard`.
        active: The inputs that may have a gradient.
        devices: The size of the model axis.
    """

    graph: tf.Graph
    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    arguments: list[tf.Tensor]
    drawn: list[tf.Tensor]
    outputs: list[tf.Tensor]
    samples: Mapping[Hashable, int]
    places: Mapping[Hashable, int]
    changes: Mapping[Hashable, int | None]
    active: list[tf.Tensor]
    devices: int


def cut(block: TracedBlock) -> list[Piece]:
    """Return the pieces of a block, in the order in which they run.

    Raises:
        NotByRowsError: An operation needs all of a dim that the model axis shards, or has no rule.
    """
    flow = _ShardedFlow(block)
    pieces: dict[tuple[int, bool], list[tf.Operation]] = collections.defaultdict(list)
    for operation, level in flow.levels().items():
        pieces[level, flow.uses[operation].is_sharded].append(operation)
    loose = [each for each in block.outputs if flow.is_free(each)]
    if loose and not any(not is_sharded for _, is_sharded in pieces):
        pieces[0, False] = []
    builders = [_Builder(flow, pieces[key], key[1]) for key in sorted(pieces)]
    last = [each for each in builders if not each.is_sharded][-1:]
    wanted = {ref for each in builders for ref in each.entered} | {flow.source(each).ref() for each in block.outputs}
    return [each.piece(wanted, loose if each in last else []) for each in builders]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShardedUse:
    """What an operation does with the model axis.

    Attributes:
        wanted: For each input, the dim that the model axis shards when the operation takes it.
        places: The same for each output.
        is_partial: True if the outputs are partial sums.
    """

    wanted: tuple[int | None, ...]
    places: tuple[int | None, ...]
    is_partial: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.is_partial or any(each is not None for each in self.wanted)


# Operations that only rearrange the elements of their first input.
_REARRANGING = frozenset(("ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose"))


class _ShardedFlow:
    """The sharded dims of a block.

    Some tensors are free: each piece that needs them computes them.

    - What follows from constants and random numbers, element by element, sharded as the piece needs them.
    - What follows from replicated weights. In a sharded piece the gradients of these weights are partial sums.
    - What only rearranges a replicated tensor for sharded operations.

    Attributes:
        block: The block.
        uses: The use of each operation, in order.

    Raises:
        NotByRowsError: An operation needs all of a sharded dim, or has no rule.
    """

    def __init__(self, block: TracedBlock):
        self.block = block
        self.uses: dict[tf.Operation, _ShardedUse] = {}
        self.numbers = numbered(block.operations)
        self.constants = row_proof.Constants()
        self._users = collections.Counter(tensor.ref() for each in block.operations for tensor in each.inputs)
        drawn = {each.ref() for each in block.drawn}
        self._leaves = {each.ref() for each in block.inputs}
        self._free, self._constant = set(drawn), set[Hashable]()
        self._active = {each.ref() for each in block.active}
        self._places = dict(block.places)
        self._partial, self._lost = set[Hashable](), set[Hashable]()
        self._sources: dict[Hashable, tf.Tensor] = {}
        for operation in programs.between(block.inputs, block.outputs):
            self._follow(operation)
        for each in block.outputs:
            self._check_kept(each)
        self._free_replicated()

    def is_free(self, tensor: tf.Tensor) -> bool:
        """Return whether each piece computes a tensor by itself. Random tensors are free, too: pieces take them in."""
        return tensor.ref() in self._free

    def is_constant(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor follows from constants alone."""
        return tensor.ref() in self._constant

    def is_leaf(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is an input of the block."""
        return tensor.ref() in self._leaves

    def is_active(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor may have a gradient."""
        return tensor.ref() in self._active

    def place(self, tensor: tf.Tensor) -> int | None:
        """Return the dim of a tensor that the model axis shards."""
        return self._places.get(tensor.ref())

    def source(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor of which `reshard` made a tensor; other tensors as they are."""
        return self._sources.get(tensor.ref(), tensor)

    def sharding(self, tensor: tf.Tensor) -> Sharding:
        """Return the sharding of a tensor as its piece computes it."""
        return Sharding(
            self.block.samples.get(tensor.ref()), self.place(tensor), is_partial=tensor.ref() in self._partial
        )

    def local_shape(self, tensor: tf.Tensor, place: int | None) -> tuple[int, ...]:
        """Return the shape of a local shard.

        Raises:
            NotByRowsError: The axis does not divide the dim.
        """
        shape = list(tensor.shape)
        if place is not None:
            if shape[place] % self.block.devices:
                raise NotByRowsError(
                    f"the {self.block.devices} devices of the model axis do not divide dim {place} of '{tensor.name}' "
                    f"of shape {tuple(shape)}"
                )
            shape[place] //= self.block.devices
        return tuple(shape)

    def levels(self) -> dict[tf.Operation, int]:
        """Return the level of each operation: pieces with a lower level run first."""
        found: dict[tf.Operation, int] = {}
        users: dict[tf.Operation, list[tuple[tf.Operation, int]]] = collections.defaultdict(list)
        late, of_arguments = set[tf.Operation](), {each.ref() for each in self.block.arguments}
        for operation, use in self.uses.items():
            level = 0
            for given, wanted in zip(operation.inputs, use.wanted, strict=True):
                for tensor in self._computed(given):
                    step = 0 if self.is_carried(tensor, use) or self._stays(tensor, wanted, use) else 1
                    users[tensor.op].append((operation, step))
                    level = max(level, found[tensor.op] + step)
            found[operation] = level
            if any(self.source(each).ref() in of_arguments for each in operation.inputs):
                of_arguments |= {each.ref() for each in operation.outputs}
            else:
                late.add(operation)
        # What is computed from weights alone moves to the piece that needs it.
        kept = {self.source(each).op for each in self.block.outputs}
        for operation in reversed(list(self.uses)):
            if operation in late and operation not in kept and users[operation]:
                found[operation] = min(found[user] - step for user, step in users[operation])
        return found

    def _computed(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return the tensors that pieces compute, and from which a tensor follows by free operations."""
        found: dict[Hashable, tf.Tensor] = {}
        left, seen = [tensor], set[Hashable]()
        while left:
            tensor = self.source(left.pop())
            if tensor.ref() in seen or self.is_leaf(tensor) or self.is_constant(tensor):
                continue
            seen.add(tensor.ref())
            if self.is_free(tensor):
                left += tensor.op.inputs
            else:
                found[tensor.ref()] = tensor
        return list(found.values())

    def is_carried(self, tensor: tf.Tensor, use: _ShardedUse) -> bool:
        """Return whether an operation rearranges partial sums before they are reduced."""
        return use.is_partial and tensor.ref() in self._partial

    def _stays(self, tensor: tf.Tensor, wanted: int | None, use: _ShardedUse) -> bool:
        """Return whether an operation can take a tensor in the piece that computes it."""
        is_same_kind = self.uses[tensor.op].is_sharded == use.is_sharded
        return is_same_kind and tensor.ref() not in self._partial and self.place(tensor) == wanted

    def _free_replicated(self) -> None:
        """Let each piece compute what follows from replicated weights, and what is rearranged for the piece."""
        kept = {self.source(each).op for each in self.block.outputs}
        of_arguments = {each.ref() for each in self.block.arguments}
        for operation in self.uses:
            if any(self.source(each).ref() in of_arguments for each in operation.inputs):
                of_arguments |= {each.ref() for each in operation.outputs}
        users: dict[tf.Operation, list[tuple[_ShardedUse, int | None]]] = collections.defaultdict(list)
        for operation, use in reversed(list(self.uses.items())):
            is_free = not use.is_sharded and operation not in kept and not programs.has_custom_gradients([operation])
            if is_free and all(wanted is None for _, wanted in users[operation]):
                is_rearranging = operation.type in _REARRANGING and all(each.is_sharded for each, _ in users[operation])
                if is_rearranging or not any(each.ref() in of_arguments for each in operation.outputs):
                    self._free |= {each.ref() for each in operation.outputs}
                    del self.uses[operation]
                    if is_rearranging:
                        use = dataclasses.replace(use, is_partial=True)  # Its users are sharded.
            for tensor, wanted in zip(operation.inputs, use.wanted, strict=True):
                users[self.source(tensor).op].append((use, wanted))

    def _follow(self, operation: tf.Operation) -> None:
        refs, outputs = [each.ref() for each in operation.inputs], operation.outputs
        if all(each in self._free for each in refs):
            is_constant = all(each in self._constant for each in refs)
            if is_constant or dim_rules.is_elementwise(operation):
                self._free |= {each.ref() for each in outputs}
                self._constant |= {each.ref() for each in outputs} if is_constant else set()
                return
        for each in operation.inputs:
            self._check_kept(each)
        if outputs and outputs[0].ref() in self.block.changes:
            self._change(operation.inputs[0], outputs[0])
            return
        use = self.use_of(operation, [self._places.get(each) for each in refs])
        self.uses[operation] = use
        for each, place in zip(outputs, use.places, strict=True):
            if place is not None:
                self.local_shape(each, place)
                self._places[each.ref()] = place
            elif use.is_partial:
                self._partial.add(each.ref())
            elif use.is_sharded:
                self._lost.add(each.ref())
        if operation.type != "StopGradient" and any(each in self._active for each in refs):
            self._active |= {each.ref() for each in outputs if each.dtype.is_floating}

    def _change(self, before: tf.Tensor, after: tf.Tensor) -> None:
        """Note that the model axis shards another dim of a tensor from here on."""
        place, source = self.block.changes[after.ref()], self.source(before)
        self._sources[after.ref()] = source
        if place is not None:
            self._places[after.ref()] = place
        if source.ref() in self._active:
            self._active.add(after.ref())
        if place is None or source.op not in self.uses or self._users[source.ref()] > 1:
            return
        # The partial sums of a row layer are scattered before its bias is added.
        summed = [place if each.ref() in self._partial else None for each in source.op.inputs]
        if any(each is not None for each in summed) and not self.uses[source.op].is_sharded:
            use = self.use_of(source.op, summed)
            if use.places == (place,) and not use.is_partial:
                self.uses[source.op] = use
                self._places[source.ref()] = place

    def _check_kept(self, tensor: tf.Tensor) -> None:
        if tensor.ref() in self._lost:
            raise NotByRowsError(dim_rules.needs_all(tensor.op))

    def use_of(self, operation: tf.Operation, places: Sequence[int | None]) -> _ShardedUse:
        """Return what an operation does, from the sharded dims of its inputs.

        Raises:
            NotByRowsError: It needs all of a sharded dim, or has no rule.
        """
        wanted: list[int | None] = list(places)
        found: list[int | None] = [None] * len(operation.outputs)
        if operation.type == "IdentityN":
            attention = operation.inputs[0].op
            if places[0] is not None and online_softmax.is_call(attention):
                # The operands have the heads that attention takes.
                heads = zip(attention.inputs, online_softmax.heads_of_call(attention)[0], strict=True)
                sharded = {each.ref(): dim for each, dim in heads}
                places = [sharded.get(each.ref(), at) for each, at in zip(operation.inputs, places, strict=True)]
            return _ShardedUse(wanted=tuple(places), places=tuple(places))
        if any(place is not None for place in places) and online_softmax.is_call(operation):
            return self._attention(operation, places)
        first = operation.inputs[0] if operation.inputs else None
        if first is not None and first.ref() in self._partial and operation.type in _REARRANGING:
            if self._users[first.ref()] == 1:
                return _ShardedUse(wanted=(None,) * len(places), places=(None,), is_partial=True)
        partial = []
        for number, place in enumerate(places):
            if place is None:
                continue
            outcome = dim_rules.advance(operation, number, place, self.block.devices)
            made: list[int | None] = [None] * len(operation.outputs)
            if isinstance(outcome, dim_rules.Flow) and not outcome.statistics and outcome.outputs:
                if any(places[other] is not None for other in outcome.repeated):
                    raise NotByRowsError(f"the model axis shards two dims of the result of '{operation.name}'")
                aligned = outcome.aligned
                for output, to in outcome.outputs:
                    made[output] = to
            elif isinstance(outcome, dim_rules.Contracted):
                aligned = ((outcome.other, outcome.dim),)
            elif isinstance(outcome, dim_rules.Summed):
                aligned = ()
            else:
                reason = outcome.reason if isinstance(outcome, dim_rules.Blocked) else dim_rules.needs_all(operation)
                raise NotByRowsError(reason)
            for other, dim in aligned:
                if wanted[other] not in (None, dim):
                    raise NotByRowsError(f"the inputs of '{operation.name}' are sharded along different dims")
                wanted[other] = dim
            partial.append(not isinstance(outcome, dim_rules.Flow))
            if len(partial) > 1 and (made != found or partial[0] != partial[-1]):
                raise NotByRowsError(f"the inputs of '{operation.name}' are sharded along different dims")
            found = made
        return _ShardedUse(wanted=tuple(wanted), places=tuple(found), is_partial=any(partial))

    def _attention(self, operation: tf.Operation, places: Sequence[int | None]) -> _ShardedUse:
        """Return the use of attention in blocks. The model axis may shard the heads of its operands."""
        operands, results = online_softmax.heads_of_call(operation)
        for place, heads, tensor in zip(places, operands, operation.inputs, strict=True):
            if place not in (None, heads):
                raise NotByRowsError(
                    f"the model axis shards dim {place} of '{tensor.name}', and attention needs all of it"
                )
            self.local_shape(tensor, heads)
        return _ShardedUse(wanted=tuple(operands), places=tuple(results))


# Operations whose second input is the shape of their result.
_SHAPED = frozenset(("Reshape", "BroadcastTo"))


class _Builder:
    """Makes the graph of a piece.

    Attributes:
        is_sharded: True if the piece is sharded.
        entered: References to the tensors that other pieces compute for this one.
    """

    def __init__(self, flow: _ShardedFlow, operations: Sequence[tf.Operation], is_sharded: bool):
        self._flow, self._operations, self.is_sharded = flow, operations, is_sharded
        self._graph = _private.func_graph(local_shards.NAME)
        self._local: dict[tuple[Hashable, int | None], tf.Tensor] = {}
        self._made: dict[Hashable, tf.Tensor] = {}
        self._inputs: list[tuple[tf.Tensor, tf.Tensor, Sharding]] = []
        with self._graph.as_default():
            for operation in operations:
                self._add(operation)
        self.entered = {tensor.ref() for tensor, _, _ in self._inputs}

    def piece(self, wanted: set[Hashable], loose: Sequence[tf.Tensor]) -> Piece:
        """Return the piece, with the outputs that other pieces or the block want, and free tensors."""
        flow = self._flow
        outputs = [each for operation in self._operations for each in operation.outputs if each.ref() in wanted]
        local = [self._made[each.ref()] for each in outputs]
        with self._graph.as_default():
            local += [self._taken(each, None) for each in loose]
        outputs += loose
        return Piece(
            graph=self._graph,
            operations=self._graph.get_operations(),
            inputs=[inner for _, inner, _ in self._inputs],
            taken=[flow.numbers[tensor.ref()] for tensor, _, _ in self._inputs],
            given=[sharding for _, _, sharding in self._inputs],
            outputs=local,
            made=[flow.numbers[each.ref()] for each in outputs],
            results=[flow.sharding(each) for each in outputs],
            differentiated=[n for n, (tensor, _, _) in enumerate(self._inputs) if flow.is_active(tensor)],
            is_sharded=self.is_sharded,
        )

    def _add(self, operation: tf.Operation) -> None:
        flow = self._flow
        use = flow.uses[operation]
        inputs = [
            self._made[each.ref()] if flow.is_carried(each, use) else self._taken(each, place)
            for each, place in zip(operation.inputs, use.wanted, strict=True)
        ]
        if programs.has_custom_gradients([operation]):
            copies = self._with_gradient(operation, inputs, use)
        else:
            copies = self._copied(operation, inputs, use.places)
        for output, copy, place in zip(operation.outputs, copies, use.places, strict=True):
            self._made[output.ref()] = copy
            if not use.is_partial:
                self._local[output.ref(), place] = copy

    def _with_gradient(self, operation: tf.Operation, inputs: list[tf.Tensor], use: _ShardedUse) -> list[tf.Tensor]:
        """Copy the operation of a `tf.custom_gradient`, which gives the gradient with operations of the trace."""
        if operation.type != "IdentityN":
            raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) has a gradient of its own")

        def apply(*values: tf.Tensor) -> Any:
            return [tf.identity(each) for each in values], lambda *upstreams: self._gradient(operation, use, upstreams)

        return list(tf.custom_gradient(apply)(*inputs))

    def _gradient(
        self, operation: tf.Operation, use: _ShardedUse, upstreams: Sequence[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        """Compute the gradients of the inputs of a `tf.custom_gradient` with local shards."""
        flow = self._flow
        forward = [each for done in flow.block.operations for each in done.outputs if not flow.is_constant(each)]
        targets = [number for number, each in enumerate(operation.inputs) if flow.is_active(each)]
        with flow.block.graph.as_default(), _private.stop_recording():
            floats = [number for number, each in enumerate(operation.outputs) if each.dtype.is_floating]
            outputs = [operation.outputs[number] for number in floats]
            ups = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in outputs]
            made = tf.gradients(outputs, [operation.inputs[number] for number in targets], ups)
        known = {up.ref(): (upstreams[n], use.places[n]) for up, n in zip(ups, floats, strict=True)}

        def local(tensor: tf.Tensor, place: int | None) -> tf.Tensor:
            tensor = flow.source(tensor)
            found = known.get(tensor.ref())
            if found is None and (tensor.ref(), place) in self._local:
                return self._local[tensor.ref(), place]
            if found is None or found[1] != place:
                raise NotByRowsError(f"the gradient of '{operation.name}' is no element-by-element operation")
            return found[0]

        for each in programs.between([*forward, *ups], [each for each in made if each is not None]):
            places = [known[tensor.ref()][1] if tensor.ref() in known else flow.place(tensor) for tensor in each.inputs]
            done = flow.use_of(each, places)
            copies = self._copied(
                each, [local(*pair) for pair in zip(each.inputs, done.wanted, strict=True)], done.places
            )
            if done.is_partial:
                raise NotByRowsError(f"the gradient of '{operation.name}' sums over the model axis")
            known |= {
                old.ref(): pair for old, pair in zip(each.outputs, zip(copies, done.places, strict=True), strict=True)
            }
        found: list[tf.Tensor | None] = [None] * len(operation.inputs)
        for number, tensor in zip(targets, made, strict=True):
            if tensor is not None:
                found[number] = local(tensor, use.wanted[number])
        return found

    def _copied(
        self, operation: tf.Operation, inputs: list[tf.Tensor], places: Sequence[int | None]
    ) -> list[tf.Tensor]:
        """Copy an operation, with the shapes of local shards."""
        shapes = [self._flow.local_shape(each, place) for each, place in zip(operation.outputs, places, strict=True)]
        if self.is_sharded and operation.type in _SHAPED:
            inputs[1] = tf.constant(shapes[0], inputs[1].dtype)
        elif self.is_sharded and operation.type == "Slice":
            inputs[2] = tf.constant(shapes[0], inputs[2].dtype)
        if self.is_sharded and online_softmax.is_call(operation):
            copies = online_softmax.call_again(operation, inputs)
        else:
            copies = _private.copied(operation, inputs, graph=self._graph)
        for copy, shape in zip(copies, shapes, strict=True):
            if tuple(copy.shape) != shape:
                raise NotByRowsError(f"operation '{operation.name}' ({operation.type}) depends on the size of a shard")
        return copies

    def _taken(self, tensor: tf.Tensor, place: int | None) -> tf.Tensor:
        """Return a tensor with a sharded dim, or in full: computed by this piece, free, or an input of the piece."""
        flow = self._flow
        tensor = flow.source(tensor)
        if (tensor.ref(), place) not in self._local:
            if flow.is_free(tensor) and not flow.is_leaf(tensor):
                self._local[tensor.ref(), place] = self._free(tensor, place)
            else:
                inner = tf.compat.v1.placeholder(tensor.dtype, flow.local_shape(tensor, place))
                self._inputs.append((tensor, inner, Sharding(flow.block.samples.get(tensor.ref()), place)))
                self._local[tensor.ref(), place] = inner
        return self._local[tensor.ref(), place]

    def _free(self, tensor: tf.Tensor, place: int | None) -> tf.Tensor:
        operation = tensor.op
        if place is not None and self._flow.is_constant(tensor):
            value = self._flow.constants.value(tensor)
            rows = None if value is None else np.moveaxis(np.asarray(value), place, 0)
            if rows is None or not (rows == rows[0]).all():
                raise NotByRowsError(f"devices of the model axis need different parts of constant '{tensor.name}'")
            size = self._flow.local_shape(tensor, place)[place]
            return tf.constant(np.moveaxis(rows[:size], 0, place), tensor.dtype)
        if place is None:
            inputs = [self._taken(each, None) for each in operation.inputs]
            return _private.copied(operation, inputs, graph=self._graph)[tensor.value_index]
        sources = dict(dim_rules.elementwise_sources(operation, place) or ())
        inputs = [self._taken(each, sources.get(number)) for number, each in enumerate(operation.inputs)]
        return self._copied(operation, inputs, [place])[0]
