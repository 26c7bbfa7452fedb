"""Initial values that are not drawn before their place is known: until then, the host holds nothing of them."""

import dataclasses
import functools
import math
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfshard.devices import clients, host_memory

# Not those of users: subclasses may do anything.
_OF_KERAS = frozenset(each for each in vars(keras.initializers).values() if isinstance(each, type))
# Those that give one number for all elements.
_UNIFORM = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# From here on a random value is drawn in a graph: 10 ms more, and one copy instead of three.
_LARGE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialValue:
    """What one of Keras's initializers will give, the same whenever it is called.

    Attributes:
        initializer: The initializer; all that it depends on are numbers and texts, among them its seed.
        shape: The shape of the whole variable.
        dtype: Its dtype.

    Example:

    >>> zeros = InitialValue.of(keras.initializers.Zeros(), (2, 3), "float32")
    >>> zeros.draw().shape
    (2, 3)
    >>> InitialValue.of(lambda shape, dtype: None, (2, 3), "float32") is None
    True
    """

    initializer: keras.Initializer
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, initializer: object, shape: tuple[int, ...], dtype: str) -> "InitialValue | None":
        """What an initializer will give; None if that may depend on when it is called: on a generator of seeds, or on
        what a class of the user's does."""
        if type(initializer) not in _OF_KERAS:
            return None
        if not all(isinstance(value, (bool, int, float, str, type(None))) for value in vars(initializer).values()):
            return None
        return cls(initializer=initializer, shape=shape, dtype=np.dtype(tf.as_dtype(dtype).as_numpy_dtype))

    @property
    def text(self) -> str:
        """All that the value depends on."""
        return f"{type(self.initializer).__name__} {sorted(vars(self.initializer).items())} {self.shape} {self.dtype}"

    def draw(self) -> np.ndarray:
        """The value, on the host, as plain Keras has it. Not to be written to. Eager only.

        One number for all elements takes the memory of one.
        """
        dtype = tf.as_dtype(self.dtype).name
        with tf.init_scope(), tf.device("CPU:0"):
            if isinstance(self.initializer, _UNIFORM):
                number = host_memory.view(tf.convert_to_tensor(self.initializer((), dtype=dtype)))
                return np.broadcast_to(number, self.shape)
            draw = functools.partial(self.initializer, self.shape, dtype=dtype)
            if math.prod(self.shape) * self.dtype.itemsize >= _LARGE_BYTES:
                return host_memory.view(host_memory.computed(draw))
            return host_memory.view(tf.convert_to_tensor(draw()))


# The value of a member on the host, or what it will be.
HostValue: TypeAlias = np.ndarray | InitialValue


def drawn(value: HostValue) -> np.ndarray:
    """The value itself."""
    return value.draw() if isinstance(value, InitialValue) else value


def checksum(value: HostValue) -> int | None:
    """Of what has to be the same on all clients; None where there is nothing to compare it with."""
    if isinstance(value, InitialValue):
        value = np.frombuffer(value.text.encode(), np.uint8)
    return clients.here().checksum(value)
