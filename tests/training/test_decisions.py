"""The logger `tfshard` tells once what was decided for a model, and nothing unless it is asked."""

import logging

import keras
import numpy as np
import pytest

import launched
import tfshard
from tfshard.training import decisions

X = np.ones((8, 8), "float32")


def compiled(**options) -> keras.Model:
    layers = [keras.layers.Dense(8, name="first"), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(4)]
    model = tfshard.Sequential([keras.Input((8,)), *layers], name="small")
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options))
    return model


def told(caplog, level=logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfshard" and record.levelno == level]


def test_decisions_are_told_once_for_each_compile(caplog):
    caplog.set_level(logging.INFO, logger="tfshard")
    model = compiled(microbatches=2)
    expected = [
        "model 'small': mesh batch=4 of CPU devices, ZeRO stage 3, 2 microbatches",
        "model 'small': 6 variables in 1 group, 0 sharded alone; not sharded: 2 variables of 64 B "
        "(not trained, and below 1.0 MiB)",
        "model 'small': no recomputed blocks, no blocks and layers for XLA",
    ]
    assert told(caplog) == expected
    model.fit(X, X[:, :4], verbose=0, epochs=2)
    model.evaluate(X, X[:, :4], verbose=0)
    assert told(caplog) == expected
    model.compile("adam", "mse", strategy=model.distribute_strategy)
    assert told(caplog) == 2 * expected


def test_a_model_that_is_built_by_its_first_step_is_told_then(caplog):
    caplog.set_level(logging.INFO, logger="tfshard")
    model = tfshard.Sequential([keras.layers.Dense(8, name="first"), keras.layers.Dense(4)], name="late")
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None))
    assert told(caplog) == []
    model.fit(X, X[:, :4], verbose=0, epochs=2)
    assert told(caplog)[1] == "model 'late': 0 variables in 0 groups, 4 sharded alone" and len(told(caplog)) == 3


def test_what_stage_0_replicates_is_told_with_the_reason_and_details_at_debug(caplog):
    caplog.set_level(logging.DEBUG, logger="tfshard")
    compiled(zero_stage=0, analyzer=None)
    assert "not sharded: 8 variables of 560 B (stage 0 shards no parameters over the batch axis)" in told(caplog)[1]
    (details,) = told(caplog, logging.DEBUG)
    assert "  small/first/kernel: (8, 8) float32, stored (None, None), not sharded: stage 0" in details
    caplog.clear()
    compiled()
    (details,) = told(caplog, logging.DEBUG)
    assert "group 0: 6 variables, 496 B, stored ('batch', None): small/first/kernel, small/first/bias" in details


def test_recomputed_blocks_and_pipelines_are_told(caplog):
    caplog.set_level(logging.INFO, logger="tfshard")
    layers = [keras.layers.Dense(8, "gelu", name=f"block{i}_dense") for i in range(4)]
    model = tfshard.Sequential([keras.Input((8,)), *layers], name="deep")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", "mse", strategy=strategy)
    strategy.recompute(model)
    assert told(caplog)[-1] == "model 'deep': recomputes 4 blocks (block0, block1, block2, block3)"
    model = keras.Sequential([keras.Input((8,)), *map(keras.layers.Dense, (8, 8, 4, 4))], name="cut")
    model = tfshard.pipeline(model, stages=2, microbatches=4)
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(pipeline=2, batch=2)))
    (line,) = [each for each in told(caplog) if "'cut'" in each]
    assert "mesh pipeline=2 x batch=2" in line and "schedule 1f1b, 4 microbatches; stage 0 has" in line


def test_nothing_is_computed_or_printed_by_default(monkeypatch, capfd):
    monkeypatch.setattr(decisions, "_variables_text", lambda placement: pytest.fail("was computed"))
    compiled()
    assert not any(type(each) is not logging.NullHandler for each in logging.getLogger("tfshard").handlers)
    assert "small" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_clients_of_a_launched_run_tell_their_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import logging; logging.basicConfig(); logging.getLogger('tfshard').setLevel('INFO')\n"
        "import keras, tfshard\n"
        "tfshard.initialize(device_type='CPU')\n"
        "model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name='small')\n"
        "model.compile('sgd', 'mse', strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2)))\n"
    )
    done = launched.launch("--num_processes=2", "--devices_per_process=1", str(script))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"INFO:tfshard:client {rank}: model 'small': mesh batch=2" in done.stdout + done.stderr
