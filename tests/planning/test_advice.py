"""tfshard.advise: the smallest stage and the mesh that fit, with numbers worked out by hand."""

import keras
import pytest

import tfshard
from tfshard.layouts.layout_map import VariableSpec

MEBI = 1 << 20


def kernels(count: int) -> list[VariableSpec]:
    """Each of 4 MiB in float32."""
    return [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(count)]


def advise(memory: int, **kwargs) -> tfshard.planning.Advice:
    """For P = 32 MiB of parameters and Adam."""
    return tfshard.advise(kernels(8), 4, memory * MEBI, **{"batch": 32} | kwargs)


# More than the count of steps and the learning rate take.
SCALAR_BYTES = 64


@pytest.mark.parametrize(("memory", "stage", "peak"), [(225, 0, 224), (223, 1, 71), (70, 3, 43)])
def test_the_smallest_stage_that_fits_is_recommended(memory, stage, peak):
    advice = advise(memory)
    assert advice.shortfall_bytes == 0
    assert (advice.recommended.mesh_shape, advice.recommended.zero_stage) == ({"batch": 4}, stage)
    assert advice.recommended.peak_bytes == pytest.approx(peak * MEBI, abs=SCALAR_BYTES)


def test_the_peak_is_the_sum_of_its_parts():
    def parts(**options):
        return [
            tuple(
                bytes_ // MEBI
                for bytes_ in (c.stored_bytes, c.gathered_bytes, c.gradient_bytes, c.reduced_bytes, c.updated_bytes)
            )
            for c in advise(100, **options).candidates
        ]

    # In MiB: P=32, a quarter is 8, a variable 4.
    assert parts() == [(96, 0, 32, 0, 96), (48, 12, 4, 4, 3), (48, 12, 4, 4, 3), (24, 8, 4, 4, 3)]
    # All gradients wait: whole at stage 1, as shards at stages 2 and 3.
    clipped = keras.optimizers.Adam(global_clipnorm=1.0)
    assert [each[2] for each in parts(optimizer=clipped)] == [32, 36, 12, 12]
    assert [each[1] for each in parts(reshard_after_forward=False)] == [0, 12, 12, 32]


def test_when_nothing_fits_the_missing_bytes_are_told():
    advice = advise(40)
    assert advice.recommended is None
    assert advice.shortfall_bytes == pytest.approx(3 * MEBI, abs=SCALAR_BYTES)
    text = str(advice)
    assert "Nothing fits. batch=4 at stage 3 comes closest" in text
    assert "A layout map over the axis 'model' would allow a model axis" in text


def test_a_layout_map_allows_a_model_axis():
    advice = advise(36, layout_map={".*/kernel": (None, "model")})
    assert (advice.recommended.mesh_shape, advice.recommended.zero_stage) == ({"batch": 2, "model": 2}, 3)
    assert advice.recommended.peak_bytes == pytest.approx((24 + 4 + 2 + 2 + 3) * MEBI, abs=SCALAR_BYTES)
    assert [each.mesh_shape for each in advice.candidates[::4]] == [
        {"batch": 4, "model": 1},
        {"batch": 2, "model": 2},
        {"batch": 1, "model": 4},
    ]


def test_activations_are_counted_for_the_devices_share_of_the_batch():
    assert "Activations are not counted" in " ".join(advise(300).reasons)
    advice = advise(300, activation_bytes=MEBI)
    assert advice.recommended.activation_bytes == 8 * MEBI
    assert "Activations" not in " ".join(advice.reasons)


def test_a_batch_that_the_mesh_does_not_divide_is_not_recommended():
    advice = advise(200, batch=30)
    assert (advice.recommended, advice.shortfall_bytes) == (None, None)
    assert "does not divide the batch of 30" in advice.reasons[0]
    advice = advise(200, batch=30, layout_map={".*/kernel": (None, "model")})
    assert advice.recommended.mesh_shape == {"batch": 2, "model": 2}


def test_wrong_numbers_are_refused():
    with pytest.raises(tfshard.errors.StrategyError, match="devices must be a positive integer. Received: devices=0"):
        tfshard.advise(kernels(1), 0, 1, 1)


def test_advice_can_find_the_layouts_itself():
    def build():
        inputs = keras.Input((512,))
        x = keras.layers.Dense(2048, activation="relu", name="up")(inputs)
        return keras.Model(inputs, keras.layers.Dense(512, name="down")(x))

    model = tfshard.abstract_model(build)
    advice = tfshard.advise(model, 4, 40 << 20, 3, layout_map="auto")
    # A batch of three: only the model axis can use the devices.
    assert advice.recommended.mesh_shape == {"batch": 1, "model": 4}
