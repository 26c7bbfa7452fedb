"""Every collective between clients; run by test_collectives.py."""

import time

import ml_dtypes
import numpy as np
import tensorflow as tf

import tfshard
from tfshard import collectives as c

REDUCTIONS = {"sum": np.sum, "min": np.min, "max": np.max, "mean": np.mean}


def value(client: int, dtype) -> np.ndarray:
    return (np.random.RandomState(client).randn(2 * c.world_size(), 3) * 10).astype(dtype)


def check_reductions() -> None:
    rank = c.rank()
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64):
        values = [value(client, dtype) for client in range(c.world_size())]
        tolerance = {"rtol": 2e-2, "atol": 0.2} if np.dtype(dtype).itemsize == 2 else {"rtol": 1e-6, "atol": 1e-5}
        for op, reduce in REDUCTIONS.items():
            if op == "mean" and np.dtype(dtype).kind == "i":
                continue
            expected = reduce(np.stack([v.astype(np.float64) for v in values]), axis=0)
            reduced = c.all_reduce(values[rank], op)
            assert reduced.dtype == dtype
            np.testing.assert_allclose(reduced.astype(np.float64), expected, **tolerance)
            part = c.reduce_scatter(tf.constant(values[rank]), op)
            assert tf.is_tensor(part)
            np.testing.assert_allclose(part.numpy().astype(np.float64), expected[2 * rank : 2 * rank + 2], **tolerance)


def check_exact() -> None:
    rank = c.rank()
    for dtype in (np.bool_, np.uint8, np.int8, np.float32, np.int64, np.complex64):
        values = [value(client, dtype) for client in range(c.world_size())]
        for axis in (0, 1, -1):
            np.testing.assert_array_equal(c.all_gather(values[rank], axis), np.concatenate(values, axis))
        for root in range(c.world_size()):
            np.testing.assert_array_equal(c.broadcast(values[rank], root), values[root])
    special = np.array([-0.0, np.nan, np.inf], np.float32)
    assert c.broadcast(special if rank == 0 else np.zeros_like(special)).tobytes() == special.tobytes()
    assert c.all_reduce(rank + 1.0) == sum(range(1, c.world_size() + 1))


def check_mistakes() -> None:
    rank = c.rank()
    for call, message in (
        (lambda: c.all_reduce(np.zeros(2 + rank)), "shape: client 0 has [2], client 1 has [3]"),
        (lambda: c.all_reduce(np.zeros(2, ["f4", "f8"][rank])), 'dtype: client 0 has "float32", client 1 has'),
        (lambda: c.all_reduce(1.0, ["sum", "max"][rank]), 'op: client 0 has "sum", client 1 has "max"'),
        (lambda: c.all_gather(np.zeros((2, 2)), axis=rank), "axis: client 0 has 0, client 1 has 1"),
        (lambda: c.broadcast(1.0, root=rank), "root: client 0 has 0, client 1 has 1"),
        (lambda: c.reduce_scatter(np.zeros(3)), "must be a multiple of the number of clients, 2"),
    ):
        try:
            call()
        except tfshard.errors.CollectiveError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"There was no error: {message}")


def check_barrier() -> None:
    """Check a barrier with client 1 late: both clients get an error, and both continue."""
    time.sleep(3.0 * c.rank())
    try:
        c.barrier(timeout=1.0)
    except tfshard.errors.ClientError as error:
        assert "Clients [1] did not reach a barrier in time" in str(error), error
    else:
        raise AssertionError("There was no error.")
    c.barrier()


def main() -> None:
    assert c.world_size() == 2
    check_reductions()
    check_exact()
    check_mistakes()
    check_barrier()
    print("all collectives agree", flush=True)


if __name__ == "__main__":
    main()
