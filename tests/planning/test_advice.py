"""tfshard.advise finds the smallest stage and mesh that fit; the expected numbers are computed by hand."""

import re

import keras
import pytest

import tfshard
from tfshard import tables
from tfshard.layouts.layout_map import VariableSpec

MEBI = 1 << 20


def kernels(count: int) -> list[VariableSpec]:
    """Return kernels of 4 MiB in float32."""
    return [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(count)]


def advise(memory: int, **kwargs) -> tfshard.planning.Advice:
    """Advise for P = 32 MiB of parameters and Adam."""
    return tfshard.advise(kernels(8), 4, memory * MEBI, **{"batch": 32} | kwargs)


# More than the step counter, the learning rate and the batch need.
SMALL_BYTES = 64 << 10


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("memory", "stage", "peak"), [(192, 0, 160), (167, 1, 59), (61, 3, 35)])
def test_the_smallest_stage_that_fits_is_recommended(memory, stage, peak):
    advice = advise(memory)
    assert advice.shortfall_bytes == 0
    assert (advice.recommended.mesh_shape, advice.recommended.zero_stage) == ({"batch": 4}, stage)
    assert advice.recommended.peak_bytes == pytest.approx(peak * MEBI, abs=SMALL_BYTES)


def test_the_peak_is_the_sum_of_its_parts():
    def parts(**options):
        return [
            tuple(
                bytes_ // MEBI
                for bytes_ in (c.stored_bytes, c.gathered_bytes, c.gradient_bytes, c.reduced_bytes, c.updated_bytes)
            )
            for c in advise(100, **options).candidates
        ]

    # In MiB: P=32, a quarter is 8, a variable 4. At stage 0, gradients are joined in a buffer and reduced at once. At
    # stages 1 and 2, two gradients exist while the first is reduced. At stage 3, a gradient is computed after its
    # variable was used, and reduced while the next gradient exists.
    assert parts() == [(96, 0, 32, 32, 0), (48, 0, 8, 3, 0), (48, 0, 8, 3, 0), (24, 4, 4, 3, 0)]
    # Gradients wait as shards; the last is full, and the step reduces it.
    clipped = keras.optimizers.Adam(global_clipnorm=1.0)
    assert parts(optimizer=clipped)[3] == (24, 4, 10, 3, 0)
    assert parts(reshard_after_forward=False)[3][1] == 24


def test_the_optimizer_is_that_which_the_model_was_compiled_with():
    def stored(**options) -> int:
        return tfshard.advise(model, 4, 1 << 30, 32, **options).candidates[0].stored_bytes

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    assert stored() == stored(optimizer="adam") > stored(optimizer=None)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    assert stored(optimizer=None) < stored() == stored(optimizer=model.optimizer) < stored(optimizer="adam")


def test_when_nothing_fits_the_missing_bytes_are_told():
    advice = advise(33)
    assert advice.recommended is None
    # The peak of 35 MiB, a margin of 15%, and what an update may hold at times.
    best = advice.candidates[3]
    assert advice.shortfall_bytes == best.needed_bytes - 33 * MEBI
    assert best.needed_bytes - best.overlap_bytes == pytest.approx(1.15 * 35 * MEBI, abs=2 * SMALL_BYTES)
    text = str(advice)
    assert "Nothing fits. batch=4 at stage 3 comes closest" in text
    assert "A layout map over the axis 'model' would allow a model axis" in text


def test_a_batch_that_no_mesh_divides_is_refused_with_what_to_change():
    advice = advise(200, batch=33)
    assert advice.recommended is None and advice.shortfall_bytes is None
    assert advice.reasons[0].endswith(". Change the batch or the number of devices.")


def test_the_table_says_how_much_a_configuration_that_is_too_large_needs():
    advice = advise(61)
    needed = [tables.short_size(each.needed_bytes) for each in advice.candidates]
    text = " ".join(str(advice).split())
    assert text.count("with room to spare") == 4, "three candidates, and the recommended one"
    assert all(f"too large: needs {each}" in text for each in needed[:3])


@pytest.mark.parametrize("width", [8, 4096])
def test_each_number_of_bytes_has_its_unit(width):
    specs = [VariableSpec(path="dense/kernel", shape=(width, width))]
    advice = tfshard.advise(specs, devices=4, memory_per_device="16GiB", batch=32)
    lines = str(advice).splitlines()
    rows = [line for line in lines if re.match(r" ?batch=4 +\d ", line)]
    assert len(rows) == 4
    for row in rows:
        cells = re.findall(r"([\d,.]+) (B|KiB|MiB|GiB)\b", row)
        assert len(cells) == 7, row  # Without activations.
        assert all(float(number.replace(",", "")) > 0 or unit == "B" for number, unit in cells), row
    assert not re.search(r"\d bytes", str(advice))


@pytest.mark.parametrize(
    ("given", "bytes_"), [("16GiB", 16 << 30), ("512 MiB", 512 << 20), ("80GB", 80 * 10**9), (1 << 30, 1 << 30)]
)
def test_memory_is_given_as_a_text_or_in_bytes(given, bytes_):
    specs = [VariableSpec(path="dense/kernel", shape=(8, 8))]
    advice = tfshard.advise(specs, devices=4, memory_per_device=given, batch=32)
    assert advice.recommended.memory_per_device == bytes_


@pytest.mark.parametrize("given", [0, -1, 16e9, True, None, "much", "1XiB", "0GiB", "GiB", b"1GiB"])
def test_memory_that_is_no_size_is_refused(given):
    with pytest.raises(
        tfshard.errors.StrategyError, match="memory_per_device must be a positive number of bytes, such"
    ):
        tfshard.advise([VariableSpec(path="dense/kernel", shape=(8, 8))], 4, given, 32)


def test_a_layout_map_allows_a_model_axis():
    advice = advise(37, layout_map={".*/kernel": (None, "model")})
    assert (advice.recommended.mesh_shape, advice.recommended.zero_stage) == ({"batch": 2, "model": 2}, 3)
    assert [each.mesh_shape for each in advice.candidates[::4]] == [
        {"batch": 4, "model": 1},
        {"batch": 2, "model": 2},
        {"batch": 1, "model": 4},
    ]


def test_activations_are_counted_for_the_devices_share_of_the_batch():
    assert "Activations are not counted" in " ".join(advise(300).reasons)
    advice = advise(300, activation_bytes=MEBI)
    assert advice.recommended.activation_bytes == pytest.approx(8 * MEBI, abs=SMALL_BYTES)
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


def blocks(count: int) -> keras.Model:
    """Return blocks with few weights. Each makes 2 MiB of activations per sample of 1024."""
    inputs = keras.Input((1024, 16))
    x = inputs
    for i in range(count):
        x = keras.layers.Dense(16, name=f"block{i}_down")(keras.layers.Dense(512, "gelu", name=f"block{i}_up")(x))
    return keras.Model(inputs, x)


def test_recomputation_is_recommended_where_that_is_what_fits():
    model = blocks(8)
    candidates = tfshard.advise(model, 4, 1 << 40, 4).candidates
    kept, again = candidates[3:]
    assert (kept.zero_stage, kept.recompute, again.zero_stage, again.recompute) == (3, False, 3, True)
    # Inputs of small weights' gradients wait to the end: the weights are in one group, and no later use needs them.
    assert again.activation_bytes < kept.activation_bytes * 2 / 3
    advice = tfshard.advise(model, 4, (kept.peak_bytes + again.peak_bytes) // 2, 4)
    assert advice.recommended == again.__class__(
        **vars(again) | {"memory_per_device": advice.candidates[0].memory_per_device}
    )
    assert "at stage 3 with strategy.recompute(model)" in advice.reasons[0]
    assert tfshard.operations.layer_patch.patches_of(model) == []


def test_activations_are_found_in_the_graph_for_a_devices_share_of_the_batch():
    small, large = (tfshard.advise(blocks(2), 4, 1 << 40, samples).candidates[3] for samples in (4, 8))
    assert large.activation_bytes == pytest.approx(2 * small.activation_bytes, rel=0.1)
    # Two blocks with at least the output of a product of 512 columns each.
    assert small.activation_bytes >= 2 * 4 * 1024 * 512
    assert "Activations" not in " ".join(tfshard.advise(blocks(2), 4, 1 << 40, 4).reasons)


def test_slots_in_bfloat16_take_less():
    stored = [advise(300, slot_dtype=dtype).candidates[3].stored_bytes // MEBI for dtype in (None, "bfloat16")]
    assert stored == [24, 16]
