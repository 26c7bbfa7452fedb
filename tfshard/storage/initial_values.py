"""Initial values that are not drawn before their place is known: until then, the host holds nothing of them."""

import dataclasses
import functools
import math
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfshard.devices import clients, host_memory

# Without initializers of users: their classes may do anything.
_OF_KERAS = frozenset(each for each in vars(keras.initializers).values() if isinstance(each, type))
# The initializers that give one number for all elements.
_UNIFORM = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# From here on a random value is drawn in a graph: 10 ms more, and one copy instead of three.
_LARGE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialValue:
    """The value that one of Keras's initializers will give, the same in every call.

    Attributes:
        initializer: The initializer. It depends on numbers and texts only, among them its seed.
        shape: The full shape of the variable.
        dtype: Its dtype.

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
        """Return the value that an initializer will give. None if the value may depend on the time of the call: the
        initializer has a seed generator, or its class is the user's."""
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
        """Return the value on the host, equal to plain Keras's. Do not write to it. Eager only.

        If all elements are one number, the array stores the number once.
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


# The value of a member on the host, or the initializer that will give it.
HostValue: TypeAlias = np.ndarray | InitialValue


def drawn(value: HostValue) -> np.ndarray:
    """Return the value. Draw it if it is not drawn yet."""
    return value.draw() if isinstance(value, InitialValue) else value


def checksum(value: HostValue) -> int | None:
    """Return a checksum of a value that all clients must share. None if no other client exists."""
    if isinstance(value, InitialValue):
        value = np.frombuffer(value.text.encode(), np.uint8)
    return clients.here().checksum(value)
