"""Automatic layouts of more KerasHub families: the sharded variables, and parity with one device."""

import functools
import itertools

import keras
import keras_hub
import numpy as np
import pytest

import families
import parity
import tfshard
from sweeps import table

MODELS = keras_hub.models
TEXT = {"vocabulary_size": 20, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
GROUPED = {**TEXT, "num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts": 4, "top_k": 2}
VISION = {"vit_patch_size": 4, "vit_num_layers": 1, "vit_num_heads": 2, "vit_hidden_dim": 8, "vit_intermediate_dim": 16}


def clip() -> keras.Model:
    from keras_hub.src.models.clip.clip_text_encoder import CLIPTextEncoder
    from keras_hub.src.models.clip.clip_vision_encoder import CLIPVisionEncoder

    vision = CLIPVisionEncoder(4, 16, 1, 2, 32, image_shape=(16, 16, 3), name="vision_encoder")
    return MODELS.CLIPBackbone(vision, CLIPTextEncoder(20, 16, 16, 1, 2, 32, max_sequence_length=8), projection_dim=16)


def siglip() -> keras.Model:
    from keras_hub.src.models.siglip.siglip_text_encoder import SigLIPTextEncoder
    from keras_hub.src.models.siglip.siglip_vision_encoder import SigLIPVisionEncoder

    vision = SigLIPVisionEncoder(4, 16, 1, 2, 32, image_shape=(16, 16, 3), name="vision_encoder")
    return MODELS.SigLIPBackbone(vision, SigLIPTextEncoder(20, 16, 16, 1, 2, 32, max_sequence_length=8))


FAMILIES = {
    "clip": clip,
    "siglip": siglip,
    "dinov2": lambda: MODELS.DINOV2Backbone(
        patch_size=4, num_layers=1, hidden_dim=16, num_heads=2, intermediate_dim=32, image_shape=(16, 16, 3)
    ),
    "whisper": lambda: MODELS.WhisperBackbone(
        **TEXT, num_heads=2, max_encoder_sequence_length=8, max_decoder_sequence_length=8, dropout=0.0
    ),
    "gemma2": lambda: MODELS.GemmaBackbone(
        **GROUPED, head_dim=4, query_head_dim_normalize=True, use_post_ffw_norm=True, use_post_attention_norm=True,
        final_logit_soft_cap=30, attention_logit_soft_cap=50, use_sliding_window_attention=True, sliding_window_size=4,
    ),
    "gemma3": lambda: MODELS.Gemma3Backbone(
        **GROUPED, image_size=None, vision_encoder=None, head_dim=4, use_sliding_window_attention=True,
        sliding_window_size=4,
    ),
    "qwen3": lambda: MODELS.Qwen3Backbone(**GROUPED, head_dim=4),
    "phi3": lambda: MODELS.Phi3Backbone(**GROUPED),
    "smollm3": lambda: MODELS.SmolLM3Backbone(
        **{**TEXT, "num_layers": 2}, num_attention_heads=4, num_key_value_heads=2, attention_bias=False,
        attention_dropout=0.0, rope_layer_enabled_list=[True, False], layer_types=["attention"] * 2, mlp_bias=False,
        layer_norm_epsilon=1e-5, max_position_embeddings=16, rope_theta=10000.0, partial_rotary_factor=1.0,
    ),
    "mixtral": lambda: MODELS.MixtralBackbone(**EXPERTS, sliding_window=4),
    "qwen_moe": lambda: MODELS.QwenMoeBackbone(
        **EXPERTS, moe_intermediate_dim=16, shared_expert_intermediate_dim=32
    ),
    "qwen3_moe": lambda: MODELS.Qwen3MoeBackbone(**EXPERTS, moe_intermediate_dim=16, head_dim=4),
    "gpt_oss": lambda: MODELS.GptOssBackbone(**EXPERTS, head_dim=4, sliding_window=4),
    "pali_gemma": lambda: MODELS.PaliGemmaBackbone(**GROUPED, image_size=16, head_dim=4, **VISION),
}  # fmt: skip

# The least share of trainable bytes that the model axis shards, and required patterns.
SHARED = {
    "clip": 0.65, "siglip": 0.7, "dinov2": 0.6, "whisper": 0.5, "pali_gemma": 0.7, "smollm3": 0.7, "phi3": 0.7,
}  # fmt: skip
MIXTURES = ("mixtral", "qwen_moe", "qwen3_moe", "gpt_oss")
MESHES = {"model2": {"model": 2}, "batch2_model2": {"batch": 2, "model": 2}}


def build(family: str) -> keras.Model:
    """Return the family's model with a few numbers for each sample, computed from all outputs."""
    backbone = FAMILIES[family]()
    for layer in backbone._flatten_layers():
        for rate in ("rate", "dropout", "_dropout", "dropout_rate", "attention_dropout", "drop_path_rate"):
            if isinstance(vars(layer).get(rate), float):
                setattr(layer, rate, 0.0)
    outputs = []
    for number, output in enumerate(backbone.outputs):
        # A contrastive model returns a number for each pair of samples.
        output = keras.ops.expand_dims(output, -1) if output.shape[-1] is None else output
        flat = keras.layers.Dense(4, activation="tanh", name=f"head_{number}")(output)
        outputs.append(keras.layers.GlobalAveragePooling1D()(flat) if len(flat.shape) == 3 else flat)
    joined = outputs[0] if len(outputs) == 1 else keras.layers.Concatenate()(outputs)
    return families.spread(keras.Model(backbone.input, joined))


def batch(model: keras.Model) -> tuple:
    rs = np.random.RandomState(0)

    def value(name: str, tensor: keras.KerasTensor) -> np.ndarray:
        shape = [8, *(8 if size is None else size for size in tensor.shape[1:])]
        if "mask" in name:
            return np.ones(shape, "int32") if name != "response_mask" else np.zeros(shape, "int32")
        return rs.randint(1, 20, shape) if "ids" in name else rs.uniform(-1, 1, shape).astype("float32")

    inputs = {name: value(name, tensor) for name, tensor in model.input.items()} if isinstance(model.input, dict) else (
        value("images", model.input)
    )  # fmt: skip
    return inputs, rs.normal(size=(8, model.output_shape[-1])).astype("float32")


def rules(family: str) -> dict[str, str | tuple]:
    found = tfshard.auto_layout_map(build(family), {"model": 2})
    return {pattern: rule.axes if rule.kind == "axes" else rule.kind for pattern, rule in found.items()}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_feed_forward_blocks_are_sharded(family):
    kinds = list(rules(family).values())
    assert kinds.count("column") >= 2 and kinds.count("row") >= 1


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_shared_out_over_the_model_axis(family):
    experts = {
        pattern: rule for pattern, rule in rules(family).items() if "experts" in pattern and "bias" not in pattern
    }
    assert len(experts) >= 2
    assert set(experts.values()) == {("model",)}


@functools.cache
def on_one_device(family: str) -> parity.Run:
    return train(family, None)


def train(family: str, strategy: tfshard.ShardedStrategy | None) -> parity.Run:
    keras.backend.clear_session()
    return parity.train(
        functools.partial(build, family), [batch(build(family))], optimizer=lambda: keras.optimizers.SGD(0.05),
        loss="mse", strategy=strategy, steps=3,
    )  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@table(
    "automatic layouts of more families", ("family", "mesh"), itertools.product(FAMILIES, MESHES), sample=3,
    always=[("siglip", "batch2_model2"), ("qwen3_moe", "batch2_model2")],
)  # fmt: skip
def test_a_family_trains_to_the_numbers_of_one_device(family, mesh):
    expected = on_one_device(family)
    run = train(family, tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), "auto", zero_stage=3))
    assert parity.sharded_share(run.model, "model") >= SHARED.get(family, 0.8)
    assert np.abs(expected.losses[0] - expected.losses[-1]) > 1e-3, "premise: it learns"
    parity.assert_same(run, expected, rtol=1e-5, atol=2e-5)
