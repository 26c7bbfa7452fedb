"""Step time of a GPT of 5.2M parameters, tensor parallel over four CPU devices: tfshard, and Keras on JAX.

    tools/jax_comparison.sh timing --rounds=5

Each way runs in a process of its own, in turn, `rounds` times over, so that a machine whose speed drifts slows all of
them. A round's figure is the median of its steps, each timed by itself; printed is the median of the rounds, with the
least and the most. Adam, float32. One device is Keras on TensorFlow without tfshard, without and
with XLA; Keras on JAX compiles with XLA.
"""

import json
import pathlib
import pickle
import sys
import tempfile

import gpt
from absl import app, flags

_JAX_PYTHON = flags.DEFINE_string("jax_python", None, "Python of the environment with JAX.", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer blocks.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.")
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 8000, "Tokens of the vocabulary.")
_SEQUENCE = flags.DEFINE_integer("sequence_length", 128, "Tokens of a sample.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps of an epoch.", lower_bound=2)
_WAY = flags.DEFINE_string("way", None, "Measure this one here, and print JSON.")
_MAP_FILE = flags.DEFINE_string("map_file", None, "With --way=plan: where the layout map for JAX goes.")

WAYS = ("one device", "one device, XLA", "tfshard", "Keras on JAX")
AIMS = (("tfshard", "one device", 1.35), ("tfshard", "Keras on JAX", 0.35))


def _config() -> gpt.Config:
    return gpt.Config(
        layers=_LAYERS.value, width=_WIDTH.value, heads=_HEADS.value, vocabulary=_VOCABULARY.value,
        sequence=_SEQUENCE.value, batch=_BATCH_SIZE.value, steps=_STEPS.value,
    )  # fmt: skip


def measure(way: str) -> dict:
    """Seconds to the first step, and of a later one, in this process; for `"plan"` only the layout map."""
    import common

    config = _config()
    options = {"jit_compile": way.endswith("XLA")}
    if way in ("tfshard", "plan"):
        import tfshard

        tfshard.initialize(num_devices=gpt.DEVICES, device_type="CPU")
        model = tfshard.as_distributed(gpt.build(config))
        mesh = tfshard.create_mesh(model=gpt.DEVICES)
        options = {"strategy": tfshard.ShardedStrategy(mesh, "auto", zero_stage=0)}
        if way == "plan":
            layout_map = options["strategy"].plan(model).to_keras_layout_map()
            pathlib.Path(_MAP_FILE.value).write_bytes(pickle.dumps(layout_map))
            return {"parameters": model.count_params(), "origin": common.origin()}
    else:
        model = gpt.build(config)
    model.compile(**gpt.compile_options(), **options)
    return common.fit_times(model, gpt.data(config), batch_size=config.batch)


def main(argv):
    del argv
    sys.path.insert(0, str(gpt.HERE.parent / "bench"))
    import common

    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    config, results = _config(), {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        map_file = pathlib.Path(folder) / "map.pickle"
        planned = gpt.run_child([sys.executable, *sys.argv, "--way=plan", f"--map_file={map_file}"])
        for _ in range(_ROUNDS.value):
            for way in WAYS:
                if way == "Keras on JAX":
                    arguments = (f"--config={config.to_json()}", f"--layout_map={map_file}", "--time")
                    results[way].append(gpt.run_on_jax(_JAX_PYTHON.value, *arguments))
                else:
                    results[way].append(gpt.run_child([sys.executable, *sys.argv, f"--way={way}"]))
    jax = results["Keras on JAX"][0]
    print(
        f"{planned['origin']}; JAX {jax['jax']} with Keras {jax['keras']}; median (and range) of {_ROUNDS.value} rounds"
    )
    sizes = f"batch {config.batch} x {config.sequence}, Adam, model axis of {gpt.DEVICES}"
    print(f"{planned['parameters']:,} parameters, {sizes}")
    print(f"{'':>16} {'step ms':>20} {'first step s':>21}")
    for way in WAYS:
        step = common.spread((1e3 * run["step"] for run in results[way]), ".0f")
        first = common.spread((run["first"] for run in results[way]), ".1f")
        print(f"{way:>16} {step:>20} {first:>21}")
    for ours, theirs, aim in AIMS:
        ratio = common.spread(common.ratios(results[ours], results[theirs]))
        print(f"{ours} / {theirs}: {ratio} (aim: at most {aim})")


if __name__ == "__main__":
    app.run(main)
