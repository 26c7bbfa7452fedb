"""Multiply matrices with TensorFlow on a GPU, with and without XLA, and print the versions and the speed.

tools/gpu/quarter.sh probe starts this program. If it fails, send the pieces of cuBLAS.
"""

import json
import time

import tensorflow as tf

_SIZE, _REPEATS = 8192, 10


def main() -> None:
    found = {"tensorflow": tf.__version__, "gpus": [each.name for each in tf.config.list_physical_devices("GPU")]}
    print(json.dumps(found), flush=True)
    if not found["gpus"]:
        raise SystemExit("TensorFlow finds no GPU. The log above names the library that is missing.")
    for compiled in (False, True):
        product = tf.function(tf.matmul, jit_compile=compiled)
        x = tf.cast(tf.random.normal((_SIZE, _SIZE)), tf.bfloat16)
        float(product(x, x)[0, 0])
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            y = product(x, x)
        float(y[0, 0])
        seconds = (time.perf_counter() - begin) / _REPEATS
        print(json.dumps({"xla": compiled, "tflops": round(2 * _SIZE**3 / seconds / 1e12)}), flush=True)
    image = tf.random.normal((8, 64, 64, 16))
    print(json.dumps({"convolution": float(tf.reduce_sum(tf.nn.conv2d(image, tf.ones((3, 3, 16, 16)), 1, "SAME")))}))


if __name__ == "__main__":
    main()
