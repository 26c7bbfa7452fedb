"""What Telemetry costs a step: the time on the CPU of the thread that trains, call by call.

    python tools/bench/telemetry.py
    python tools/bench/telemetry.py --layers=12 --width=256

A GPT-2 trains at stage 3. What `Telemetry` does is timed apart from the step that it watches, by the clock of the
thread, which other work on the machine does not move: at each step, at a step that is profiled (to end the trace and to
read it), and at the end of an epoch. The share is that of the model's own median step, with one of `every` profiled.
"""

import contextlib
import statistics
import time

import common
import gpt_flags
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 40, "Steps of an epoch.", lower_bound=4)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Epochs.", lower_bound=2)
_PROFILED = flags.DEFINE_integer("profile_every", 8, "Of so many steps one is profiled here.", lower_bound=2)
_EVERY = flags.DEFINE_integer("every", 500, "Of so many steps one is profiled, for the share: Telemetry's default.")


def timed_telemetry():
    """A Telemetry that notes what its parts take."""
    import tfshard

    class Timed(tfshard.callbacks.Telemetry):
        def __init__(self, **options):
            super().__init__(**options)
            self.steps, self.profiles, self.epochs = [], [], []
            self._announced = 0.0

        def on_train_batch_begin(self, batch, logs=None):
            begin = time.thread_time()
            super().on_train_batch_begin(batch, logs)
            self._announced = time.thread_time() - begin

        @contextlib.contextmanager
        def watched_step(self, step):
            begin = time.thread_time()
            watched = super().watched_step(step)
            watched.__enter__()
            spent = time.thread_time() - begin
            is_profiled = self.is_profiling
            yield
            begin = time.thread_time()
            watched.__exit__(None, None, None)
            spent += time.thread_time() - begin
            (self.profiles if is_profiled else self.steps).append(self._announced + spent)

        def on_epoch_end(self, epoch, logs=None):
            begin = time.thread_time()
            super().on_epoch_end(epoch, logs)
            self.epochs.append(time.thread_time() - begin)

        @property
        def is_profiling(self):
            from tensorflow.python.profiler import profiler_v2

            return profiler_v2._profiler is not None

    return Timed(profile_every=_PROFILED.value)


def main(argv):
    del argv
    import keras

    with common.scope("stage 3"):
        model, data = gpt_flags.gpt2(steps=_STEPS.value)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    telemetry = timed_telemetry()
    rows, tokens = gpt_flags.BATCH_SIZE.value, gpt_flags.SEQUENCE.value
    found = model.fit(*data, batch_size=rows, epochs=_EPOCHS.value, verbose=0, callbacks=[telemetry]).history
    # The first step of all compiles.
    step, profile = (statistics.median(times) for times in (telemetry.steps[1:], telemetry.profiles))
    share = (step + profile / _EVERY.value) / found["step_seconds_p50"][-1]
    print(common.origin())
    milliseconds = 1e3 * found["step_seconds_p50"][-1]
    print(f"{model.count_params():,} parameters, {rows} x {tokens}, steps of {milliseconds:.0f} ms")
    print(f"a step                 {common.spread((1e6 * each for each in telemetry.steps[1:]), '.1f')} us")
    print(f"a step that is profiled {common.spread((1e3 * each for each in telemetry.profiles), '.1f')} ms")
    print(f"first end of an epoch  {telemetry.epochs[0]:.2f} s")
    print(f"later ones             {common.spread((1e3 * each for each in telemetry.epochs[1:]), '.2f')} ms")
    print(f"share of a step, one of {_EVERY.value} profiled: {share:.2%}")
    print({name: values[-1] for name, values in found.items()})


if __name__ == "__main__":
    app.run(main)
