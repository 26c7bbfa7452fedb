"""Pipeline stages are cut evenly, by name, and inside nested models; other models are refused."""

import keras
import keras_hub
import pytest

import tfshard
from tfshard.contrib.pipeline.cut import Source, cut
from tfshard.errors import StrategyError


def chain(count=8, width=8):
    layers = [keras.layers.Dense(width, name=f"dense_{number}") for number in range(count)]
    return keras.Sequential([keras.Input((width,)), *layers])


def names(made):
    return [[path.rpartition("/")[2] for path in stage.layers] for stage in made.stages]


def test_parts_of_equal_layers_take_about_the_same_time():
    # The last stage computes its forward pass once, the others twice: it may have four layers instead of three.
    assert [len(stage) for stage in names(cut(chain(10), 3))] == [3, 3, 4]


def test_a_cut_is_where_little_crosses():
    inputs = keras.Input((8,))
    tensor = inputs
    for number in range(4):
        inner = keras.layers.Dense(8, name=f"inner_{number}")(keras.layers.Dense(8, name=f"outer_{number}")(tensor))
        tensor = keras.layers.Add(name=f"add_{number}")([tensor, inner])
    made = cut(keras.Model(inputs, tensor), 2)
    assert names(made)[1][0].startswith("outer")
    assert [len(stage.takes) for stage in made.stages] == [1, 1], "inside of a block, the residual would cross, too"


def test_a_nested_model_is_cut_inside():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=32, num_layers=4, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=8
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone)
    assert len(model.layers) < 6, "premise: the blocks are in the backbone"
    made = cut(model, 4)
    blocks = [name for stage in names(made) for name in stage if name.startswith("transformer_layer")]
    assert blocks == [f"transformer_layer_{number}" for number in range(4)]
    assert all(any(name.startswith("transformer_layer") for name in stage) for stage in names(made)[1:])


def test_what_later_parts_take_of_earlier_ones_is_known():
    inputs = keras.Input((8,))
    first = keras.layers.Dense(8, name="first")(inputs)
    second = keras.layers.Dense(8, name="second")(first)
    third = keras.layers.Dense(8, name="third")(keras.layers.Concatenate()([second, first, inputs]))
    made = cut(keras.Model(inputs, [third, first]), ["second", "concat.*"])
    assert made.readers(Source(0, 0)) == [1, 2]
    assert set(made.stages[2].takes) == {Source(0, 0), Source(1, 0), Source(-1, 0)}
    assert made.outputs == (Source(2, 0), Source(0, 0))


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)


def built():
    model = Own()
    model(keras.ops.zeros((1, 4)))
    return model


@pytest.mark.parametrize(
    ("model", "stages", "says"),
    [
        (
            lambda: keras.Sequential([keras.layers.Dense(2)]),
            2,
            r"is not built.*keras.Input, or call model.build\(input_shape\)",
        ),
        (built, 2, "a custom `call`"),
        (chain, 9, "8 layers cannot be cut into 9"),
        (chain, 0, "positive"),
        (chain, ["dense_9"], "matches no layer .*Layers in order"),
        (chain, ["dense_4", "dense_2"], "before"),
        (chain, ["dense_("], "regular expression"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, stages, says):
    with pytest.raises(StrategyError, match=says):
        tfshard.pipeline(model(), stages, microbatches=2)
