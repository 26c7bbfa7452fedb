"""Predict the time of a step from the speed of a device: measured (`tfshard calibrate`), or described."""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import rich.box
import rich.table
import tensorflow as tf
import yaml

from tfshard import _private, tables
from tfshard.errors import StrategyError
from tfshard.graph import flops as counts
from tfshard.planning.links import GROUPS, INSIDE, KINDS, Link, Links
from tfshard.planning.step_graph import WITHOUT_WORK, StepGraph

# The rate above which work costs nothing: calibration found that other work explains its time.
_NOTHING = 1e17


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of operations, by kinds with a price each.

    Attributes:
        product_flops: Floating-point operations of matrix products.
        convolution_flops: Floating-point operations of convolutions.
        depthwise_flops: Floating-point operations of depthwise convolutions, which have few operations for their bytes.
        depthwise_weights: Weights of depthwise kernels larger than 3 x 3 that get a gradient.
        product_bytes: Bytes that products and convolutions read and write.
        bytes: Bytes that all other operations read and write.
        transcendentals: Elements for which an exponential or a similar function is computed.
        updated_bytes: Bytes that an optimizer writes.
        operations: The number of operations.
        turned_operations: The number of operations in loops, in all iterations.
        steps: The number of steps.
    """

    product_flops: float = 0.0
    convolution_flops: float = 0.0
    depthwise_flops: float = 0.0
    depthwise_weights: float = 0.0
    product_bytes: float = 0.0
    bytes: float = 0.0
    transcendentals: float = 0.0
    updated_bytes: float = 0.0
    operations: float = 0.0
    turned_operations: float = 0.0
    steps: float = 0.0

    @classmethod
    def total(cls, works: "Iterable[Work]") -> "Work":
        """Return the sum of works."""
        found = list(works)
        return cls(**{name: sum(getattr(each, name) for each in found) for name in KINDS_OF_WORK})


KINDS_OF_WORK = tuple(field.name for field in dataclasses.fields(Work))
# The work of a device that one core does. The other work is in operations that take all cores, if they are large.
_IN_TURNS = frozenset({"operations", "steps", "turned_operations", "updated_bytes"})


def work_of(graph: StepGraph) -> dict[tf.Operation, Work]:
    """Return the work on one device of each operation of a step that leads to a result. An operation without
    computation, such as a stand-in, has no work. Updates are not included."""
    return {operation: _work(operation, inputs, graph) for operation, inputs in graph.needed.items()}


def _work(operation: tf.Operation, inputs: Iterable[tf.Tensor], graph: StepGraph) -> Work:
    if operation in graph.stand_ins:
        return Work()
    return _of_one(operation, inputs, graph.shares)


def _of_one(
    operation: tf.Operation,
    inputs: Iterable[tf.Tensor],
    shares: Callable[[tf.Tensor], int],
    *,
    is_turned: bool = False,
) -> Work:
    """Return the work of an operation, including its loop or its function."""
    if operation.type in _FREE:
        return Work()
    is_loop = operation.type in counts.LOOPS
    body = "body" if is_loop else "f" if operation.type in _CALLS else None
    function = None if body is None else _private.function_graph(operation, body)
    if function is not None:
        share = shares(operation.outputs[0]) if operation.outputs else 1
        inside = Work.total(
            _of_one(each, each.inputs, lambda tensor: share, is_turned=is_turned or is_loop)
            for each in function.get_operations()
        )
        times = (counts.turns_of(operation) or 1) if is_loop else 1
        all_turns = {name: times * getattr(inside, name) for name in KINDS_OF_WORK}
        if is_loop:
            all_turns["turned_operations"] += all_turns.pop("operations")
        return Work(**all_turns)
    tensors, outputs = [*inputs, *operation.outputs], operation.outputs

    def moved(of: Iterable[tf.Tensor]) -> float:
        return sum(_bytes(each) / shares(each) for each in of)

    # A sum over a sharded dim has a full result, but each device does only a part of the work.
    flops = counts.flops_of(operation) / max((shares(each) for each in tensors), default=1)
    if flops:
        is_slow = operation.type == _DEPTHWISE_GRADIENT and max(outputs[0].shape.as_list()[:2]) > 3
        weights = _elements(outputs[0]) / shares(outputs[0]) if is_slow else 0.0
        bytes_ = moved(tensors)
        if is_turned and bytes_ < _CACHED_BYTES:
            bytes_ = 0.0  # The iteration before left them in the cache.
        return Work(
            **{_kind_of_product(operation): flops}, depthwise_weights=weights, product_bytes=bytes_, operations=1
        )
    functions = 0.0
    if operation.type in _TRANSCENDENTAL:
        functions = max(_elements(each) / shares(each) for each in outputs)
    # A slice reads as much as it writes: a weight that is cut out of its group does not read the group.
    read_and_written = 2 * moved(outputs) if operation.type in _PARTS else moved(tensors)
    if operation.type == "ScatterNdNonAliasingAdd":  # The result overwrites the first operand.
        read_and_written = moved(tensors[1:-1])
    return Work(bytes=read_and_written, transcendentals=functions, operations=1)


def _kind_of_product(operation: tf.Operation) -> str:
    """Return the kind of work of a product's floating-point operations."""
    if "Depthwise" in operation.type:
        return "depthwise_flops"
    return "convolution_flops" if "Conv" in operation.type else "product_flops"


_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# For kernels larger than 3 x 3, oneDNN takes about 0.1 us for each weight, with any number of samples to sum. Kernels
# of 3 x 3 take a tenth of this (docs/measurements.md).
_DEPTHWISE_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"
# If a product in a loop reads and writes at most this much, its data stays in the caches of a processor or of a GPU
# between iterations.
_CACHED_BYTES = 4 << 20
_PARTS = frozenset({"GatherNd", "GatherV2", "ResourceGather", "Slice", "StridedSlice"})
_FREE = WITHOUT_WORK - _PARTS
# Exponentials and related functions, which a processor computes by polynomials.
_TRANSCENDENTAL = frozenset(
    "Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Lgamma Log Log1p LogSoftmax "
    "Ndtri Pow Selu Sigmoid Sin Sinh Softmax SoftmaxCrossEntropyWithLogits Softplus "
    "SparseSoftmaxCrossEntropyWithLogits Tan Tanh Xlog1py Xlogy".split()
)


def _elements(tensor: tf.Tensor) -> int:
    elements: int = (None if tensor.shape.rank is None else tensor.shape.num_elements()) or 0
    return elements


def _bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return _elements(tensor) * int(tensor.dtype.size)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Machine:
    """The speed of the devices of some hosts, their memory, and the links between them.

    The time of a step on a device is the sum of the times of its operations, with a price for each kind of work: a
    roofline without a roof. Times add up if each operation is a separate kernel. `tfshard.calibrate` measures the
    prices (`tfshard calibrate --save=FILE`). Alternatively, a file gives the prices of a data sheet
    (docs/simulating.md).

    Attributes:
        name: The name of the machine.
        product_flops: Floating-point operations a second that a device reaches in large matrix products.
        convolution_flops: Floating-point operations a second in convolutions.
        depthwise_flops: Floating-point operations a second in depthwise convolutions.
        product_bandwidth: Bytes a second that products and convolutions read and write, in addition to their
            operations.
        bandwidth: Bytes a second that other operations read and write.
        update_bandwidth: Bytes a second of weights and slots that an optimizer writes.
        transcendental_seconds: Additional seconds for each element of an exponential or a similar function.
        depthwise_weight_seconds: Additional seconds for the gradient of each weight of a depthwise kernel larger than 3
            x 3.
        operation_seconds: Additional seconds for each operation.
        turned_operation_seconds: Additional seconds for each operation in a loop, in each iteration.
        step_seconds: Additional seconds for each step on a device: its batch, its start, its metrics.
        links: The links between devices.
        memory: Bytes of a device; None if unknown.
        peak_flops: Operations a second from the maker's data sheet, for the utilization. By default product_flops.
        cores: The number of devices of a host that compute at once; None: all of them. Logical CPU devices share so
            many cores: they compute one after the other, and hide nothing behind another's work. Large operations of
            one device alone use all cores.
    """

    name: str
    product_flops: float
    convolution_flops: float
    depthwise_flops: float
    product_bandwidth: float
    bandwidth: float
    update_bandwidth: float
    operation_seconds: float
    turned_operation_seconds: float
    links: Links
    transcendental_seconds: float = 0.0
    depthwise_weight_seconds: float = 0.0
    step_seconds: float = 0.0
    memory: int | None = None
    peak_flops: float | None = None
    cores: int | None = None

    def __post_init__(self) -> None:
        for name in _RATES:
            if not getattr(self, name) > 0:
                raise StrategyError(
                    f"'{name}' of a machine must be a positive number per second. Received: "
                    f"{name}={getattr(self, name)!r}"
                )
        for name in _STARTS:
            if not getattr(self, name) >= 0:
                raise StrategyError(
                    f"'{name}' of a machine must be 0 or more. Received: {name}={getattr(self, name)!r}"
                )

    def __str__(self) -> str:
        table = rich.table.Table(title=self.name, box=rich.box.SIMPLE_HEAD)
        table.add_column("a device")
        table.add_column("", justify="right")
        for name in _RATES:
            rate, unit = getattr(self, name), "Gflop/s" if name.endswith("flops") else "GB/s"
            table.add_row(name.replace("_", " "), f"{rate / 1e9:,.1f} {unit}" if rate < _NOTHING else "costs nothing")
        for name in _STARTS:
            table.add_row(name.removesuffix("_seconds").replace("_", " "), f"{1e6 * getattr(self, name):,.3f} us each")
        if self.memory is not None:
            table.add_row("memory", tables.size(self.memory))
        for group in GROUPS:
            for kind, link in getattr(self.links, group).items():
                speed = f"{link.bandwidth / 1e9:,.1f} GB/s after {1e6 * link.latency:,.1f} us"
                table.add_row(f"{kind}, {group} {'a host' if group == INSIDE else 'hosts'}", speed)
        return tables.as_text(table)

    __repr__ = __str__

    def seconds(self, work: Work) -> float:
        """Return the time in which a device does some work."""
        return (
            work.product_flops / self.product_flops
            + work.convolution_flops / self.convolution_flops
            + work.depthwise_flops / self.depthwise_flops
            + work.product_bytes / self.product_bandwidth
            + work.bytes / self.bandwidth
            + work.updated_bytes / self.update_bandwidth
            + work.transcendentals * self.transcendental_seconds
            + work.depthwise_weights * self.depthwise_weight_seconds
            + work.operations * self.operation_seconds
            + work.turned_operations * self.turned_operation_seconds
            + work.steps * self.step_seconds
        )

    def in_turns(self, work: Work, devices: int) -> Work:
        """Return the work that one device alone on its core does in the time in which `devices` devices of a host each
        do `work`. Devices that share no cores do `work` itself."""
        if self.cores is None:
            return work
        turns, share = devices / min(devices, self.cores), devices / self.cores
        return Work(**{name: (turns if name in _IN_TURNS else share) * getattr(work, name) for name in KINDS_OF_WORK})

    def at_pace(self, pace: float) -> "Machine":
        """Return the machine with all work inside a host `pace` times as slow, as on a busy or overheated host. The
        links between hosts stay unchanged.

        Raises:
            StrategyError: `pace` is not a positive number.

        >>> from tfshard.planning import Machine
        >>> machine = Machine.load("h100")
        >>> machine.product_flops / machine.at_pace(1.25).product_flops
        1.25
        """
        if not pace > 0:
            raise StrategyError(f"The pace of a machine must be a positive number. Received: pace={pace!r}")
        inside = {
            kind: Link(latency=pace * link.latency, bandwidth=link.bandwidth / pace, hop=pace * link.hop)
            for kind, link in self.links.inside.items()
        }
        encoding = {codec: pace * seconds for codec, seconds in self.links.encoding.items()}
        links = dataclasses.replace(self.links, inside=inside, encoding=encoding)
        rates = {name: getattr(self, name) / pace for name in _RATES}
        starts = {name: getattr(self, name) * pace for name in _STARTS}
        return dataclasses.replace(self, links=links, **rates, **starts)

    @classmethod
    def of_prices(cls, prices: Mapping[str, float], *, name: str, links: Links, cores: int | None = None) -> "Machine":
        """Return a machine from the seconds that each kind of `Work` takes. No price is 0."""
        return cls(
            name=name,
            product_flops=1 / prices["product_flops"],
            convolution_flops=1 / prices["convolution_flops"],
            depthwise_flops=1 / prices["depthwise_flops"],
            product_bandwidth=1 / prices["product_bytes"],
            bandwidth=1 / prices["bytes"],
            update_bandwidth=1 / prices["updated_bytes"],
            transcendental_seconds=prices["transcendentals"],
            depthwise_weight_seconds=prices["depthwise_weights"],
            operation_seconds=prices["operations"],
            turned_operation_seconds=prices["turned_operations"],
            step_seconds=prices["steps"],
            links=links,
            cores=cores,
        )

    # --- Files ---------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the machine as plain data, as in its file."""
        links = self.links.to_dict()
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "links"}
        return fields | links

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine to a file, as YAML."""
        pathlib.Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Machine":
        """Read a file that `save` wrote, or a description (docs/simulating.md).

        Args:
            path: The file, or the name of a description in tfshard: `"a100"`, `"cpu"`, `"h100"` or `"v5p"`.

        Raises:
            StrategyError: The file does not exist, or it does not describe a machine.

        >>> from tfshard.planning import Machine
        >>> Machine.load("h100").name
        'H100 80 GB, 8 a host, 400 Gbit/s each'
        """
        where = os.fspath(path)
        described = {file.stem: file for file in _CLUSTERS.glob("*.yaml")}
        try:
            values = yaml.safe_load(described.get(where, pathlib.Path(path)).read_text())
        except OSError as error:
            raise StrategyError(
                f"A machine cannot be read: {error.strerror}. Give a file, or one of {sorted(described)}. "
                f"Received: {where}"
            ) from None
        except yaml.YAMLError as error:
            raise StrategyError(f"The description of a machine is not YAML: {error}. Received: {where}") from None
        if not isinstance(values, dict):
            raise StrategyError(f"The description of a machine must be a mapping. Received: {where}, with {values!r}")
        try:
            return cls.from_dict(values)
        except StrategyError as error:
            raise StrategyError(f"{where}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Machine":
        """Return a machine from plain data: from `to_dict`, or as docs/simulating.md describes it.

        Raises:
            StrategyError: A value is missing, unknown, or not a number.
        """
        unknown = sorted(set(values) - _NAMES)
        missing = sorted(_NEEDED - set(values))
        if unknown or missing:
            raise StrategyError(
                f"A machine needs {', '.join(sorted(_NEEDED))}, and can have {', '.join(sorted(_NAMES - _NEEDED))}. "
                f"Received: unknown {unknown}, missing {missing}"
            )
        found = collections.ChainMap({}, dict(values), _DEFAULTS)
        numbers = {name: _number(name, found[name]) for name in (*_RATES, *_STARTS) if name in found}
        for name in _RATES:
            numbers.setdefault(name, numbers[_TAKEN_FOR.get(name, "bandwidth")])
        numbers.setdefault("turned_operation_seconds", numbers["operation_seconds"])
        optional = {name: None if found[name] is None else _number(name, found[name]) for name in _OPTIONAL}
        memory = optional["memory"]
        encoding = {str(name): _number(name, value) for name, value in dict(found["encoding"] or {}).items()}
        links = Links(
            devices_per_host=int(_number("devices_per_host", found["devices_per_host"])),
            device_type=str(found["device_type"]),
            encoding=encoding,
            **{group: _links(group, found[group]) for group in GROUPS},
        )
        if links.between and not links.across:
            links = dataclasses.replace(links, across=links.between)
        return cls(
            name=str(found["name"]),
            links=links,
            memory=None if memory is None else int(memory),
            peak_flops=optional["peak_flops"],
            cores=None if optional["cores"] is None else int(optional["cores"]),
            **numbers,
        )

    @classmethod
    def from_any(cls, machine: "MachineLike") -> "Machine":
        """Return a machine, read from its file if a path is given.

        Raises:
            StrategyError: The argument is not a machine or a path.
        """
        if isinstance(machine, Machine):
            return machine
        if isinstance(machine, (str, os.PathLike)):
            return cls.load(machine)
        raise StrategyError(
            "A machine must be a tfshard.planning.Machine, or the path of a file that 'tfshard calibrate "
            f"--save=FILE' wrote or that describes one. Received: {machine!r} (of type {type(machine)})"
        )


MachineLike: TypeAlias = Machine | str | os.PathLike[str]

_CLUSTERS = pathlib.Path(__file__).parent / "clusters"

_RATES = (
    "product_flops", "convolution_flops", "depthwise_flops", "product_bandwidth", "bandwidth", "update_bandwidth"
)  # fmt: skip
# The rates that replace missing rates; `bandwidth` replaces the others.
_TAKEN_FOR = {"convolution_flops": "product_flops", "depthwise_flops": "convolution_flops"}
_STARTS = (
    "transcendental_seconds", "depthwise_weight_seconds", "operation_seconds", "turned_operation_seconds",
    "step_seconds",
)  # fmt: skip
_OPTIONAL = ("memory", "peak_flops", "cores")
_NEEDED = {"product_flops", "bandwidth", "devices_per_host", INSIDE}
_DEFAULTS: dict[str, Any] = {
    "name": "a machine",
    "transcendental_seconds": 0.0,
    "depthwise_weight_seconds": 0.0,
    "operation_seconds": 0.0,
    "step_seconds": 0.0,
    "memory": None,
    "peak_flops": None,
    "cores": None,
    "device_type": "GPU",
    "encoding": None,
    "between": None,
    "across": None,
}
_NAMES = _NEEDED | set(_RATES) | set(_STARTS) | set(_DEFAULTS)


def _number(name: str, value: Any) -> float:
    """Return a number of a file: YAML reads 80e9 as a text."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise StrategyError(f"'{name}' of a machine must be a number. Received: {name}={value!r}") from None


def _links(group: str, given: Any) -> dict[str, Link]:
    """Return the links of a group: one for all kinds of collectives, or one for each."""
    if not given:
        return {}
    if isinstance(given, Mapping) and set(given) == set(KINDS):
        return {kind: _link(f"{group}: {kind}", given[kind]) for kind in given}
    return dict.fromkeys(KINDS, _link(group, given))


def _link(where: str, given: Any) -> Link:
    fields = {field.name for field in dataclasses.fields(Link)}
    if not isinstance(given, Mapping) or not {"latency", "bandwidth"} <= set(given) <= fields:
        raise StrategyError(
            f"'{where}' of a machine needs latency (seconds) and bandwidth (bytes a second), and can have hop "
            f"(seconds). Received: {given!r}"
        )
    return Link(**{name: _number(f"{where}: {name}", value) for name, value in given.items()})
