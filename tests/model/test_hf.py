"""A Hugging Face directory loads unchanged, or the error names the file, key or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from npu_gr.core.errors import CheckpointError
from npu_gr.model import hf, hf_files
from tests.decoders import VARIANTS, hf_logits, hf_model, prefilled, prompt, saved
from tests.models import CPU

QWEN3, QWEN2, TIED = VARIANTS["qwen3 g1"], VARIANTS["qwen2 g2"], VARIANTS["qwen3 g2 tied"]
LLAMA, MISTRAL, MOE = (
    VARIANTS["llama g2 scaled"],
    VARIANTS["mistral g2"],
    VARIANTS["moe with dense layers"],
)
Weights = dict[str, Tensor]


def reconfigure(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    keys = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))


def reweigh(folder: Path, change: Callable[[Weights], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def assert_same_logits(folder: Path, theirs: Any, tolerance: float = 1e-4) -> None:
    model, tokens = hf.load(folder), prompt(20)
    got = model.logits(model.prefill(CPU, tokens, 0, None, None, num_rows=20))
    assert float((got - hf_logits(theirs, tokens[None])[0]).abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_saved_loads_here_and_in_transformers(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    saved(tmp_path / "theirs", **VARIANTS[variant])
    model = hf.load(tmp_path / "theirs", dtype)
    hf.save(model, tmp_path / "ours")
    again = hf.load(tmp_path / "ours", dtype)
    assert again.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    theirs.train(False)
    assert theirs.dtype == dtype
    if dtype == torch.float32:
        assert_same_logits(tmp_path / "ours", theirs)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    saved(tmp_path, **TIED)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be written"):
        hf.save(hf.load(tmp_path), tmp_path / "config.json")


@pytest.mark.parametrize(
    "variant", [QWEN3, QWEN2, TIED, MOE], ids=["qwen3", "qwen2", "tied", "moe"]
)
def test_shards_load_like_one_file(tmp_path: Path, variant: dict[str, Any]) -> None:
    theirs = hf_model(**variant)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(tmp_path, theirs)


def test_the_keys_of_transformers_4_are_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path, **{**QWEN3, "rope_theta": 5e5})
    older = {
        "rope_theta": 500000,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "sliding_window": 128,
    }
    reconfigure(tmp_path, rope_parameters=None, layer_types=None, dtype=None, **older)
    assert hf.read_config(tmp_path).rope_theta == 5e5
    assert_same_logits(tmp_path, theirs)


def test_a_default_scaling_may_hold_the_theta(tmp_path: Path) -> None:
    """As in transformers: a key inside of `rope_scaling` wins over the same key outside."""
    theirs = saved(tmp_path, **{**QWEN3, "rope_theta": 50.0})
    reconfigure(
        tmp_path, rope_parameters=None, rope_scaling={"rope_type": "default", "rope_theta": 50.0}
    )
    assert_same_logits(tmp_path, theirs)
    reconfigure(tmp_path, rope_theta=1e6)
    assert_same_logits(tmp_path, theirs)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert_same_logits(tmp_path, again)


def test_the_scaling_of_an_older_llama_is_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path, **LLAMA)
    older = {key: value for key, value in LLAMA["rope_scaling"].items() if key != "rope_type"} | {
        "type": "llama3"
    }
    reconfigure(tmp_path, rope_parameters=None, rope_scaling=older, rope_theta=5e5)
    assert_same_logits(tmp_path, theirs)
    older.pop("original_max_position_embeddings")
    reconfigure(tmp_path, rope_scaling=older)
    scaling = hf.read_config(tmp_path).rope_scaling
    assert scaling is not None
    assert scaling.original_max_tokens == 512  # the model's own length, as transformers takes it


def test_a_sliding_window_bounds_the_prompt(tmp_path: Path) -> None:
    """Up to the window's size, the logits are those of a model without a sliding window."""
    theirs = saved(tmp_path, **{**MISTRAL, "sliding_window": 20})
    assert hf.read_config(tmp_path).max_tokens == 20
    assert_same_logits(tmp_path, theirs)
    reconfigure(tmp_path, sliding_window=None)  # the key is gone: Mistral's default
    assert hf.read_config(tmp_path).max_tokens == 512
    reconfigure(tmp_path, max_position_embeddings=32_768)
    assert hf.read_config(tmp_path).max_tokens == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 10**9}, "num_experts: 1000000000, and there are"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000 is over"),
        ({"num_experts_per_tok": 7}, "num_per_token: 7 is more than num_experts 6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ({"moe_intermediate_size": 5}, "config.json asks for"),
        ({"mlp_only_layers": []}, "layers.1.mlp.down_proj.weight"),
    ],
)
def test_experts_that_are_not_there_are_rejected(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    saved(tmp_path, **MOE)
    reconfigure(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        hf.load(tmp_path)


def test_head_dim_defaults_to_the_familys(tmp_path: Path) -> None:
    saved(tmp_path, **QWEN2)
    assert "head_dim" not in json.loads((tmp_path / "config.json").read_text())
    assert hf.read_config(tmp_path).head_dim == 6
    saved(tmp_path, **QWEN3)
    reconfigure(tmp_path, head_dim=None)
    assert hf.read_config(tmp_path).head_dim == 128


@pytest.mark.parametrize("stored", hf_files.DTYPES, ids=str)
@pytest.mark.parametrize(
    "wanted", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_any_dtype_to_any_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    theirs = hf_model(**QWEN3)
    torch.nn.Module.to(theirs, stored)
    theirs.save_pretrained(tmp_path)
    model = hf.load(tmp_path, wanted)
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(model.head.weight, theirs.lm_head.weight.to(wanted))


def test_a_tied_head_may_be_saved_too(tmp_path: Path) -> None:
    theirs = saved(tmp_path, **TIED)
    embedding = "model.embed_tokens.weight"
    reweigh(tmp_path, lambda w: w.update({"lm_head.weight": w[embedding].clone()}))
    assert_same_logits(tmp_path, theirs)
    reweigh(tmp_path, lambda w: w["lm_head.weight"].mul_(2))
    with pytest.raises(
        CheckpointError,
        match=r"lm_head\.weight differs from "
        r"model\.embed_tokens\.weight",
    ):
        hf.load(tmp_path)


REJECTED_QWEN3 = [
    (
        {"model_type": "gpt2"},
        r"model_type: 'gpt2' is none of qwen3, qwen3_moe, qwen2, llama, "
        r"mistral",
    ),
    ({"model_type": ["llama"]}, r"model_type: \['llama'\] is none of"),
    (
        {"model_type": "llama"},
        r"architectures: \['Qwen3ForCausalLM'\] is not "
        r"\['LlamaForCausalLM'\]",
    ),
    ({"num_experts": 8}, "num_experts: 8: a mixture of experts"),
    ({"num_local_experts": 4}, "num_local_experts: 4: a mixture of experts"),
    ({"model_type": None}, "model_type: None is none of"),
    (
        {"architectures": ["Qwen3ForSequenceClassification"]},
        r"architectures: "
        r"\['Qwen3ForSequenceClassification'\]",
    ),
    ({"architectures": None}, "architectures: None"),
    ({"use_sliding_window": True}, "use_sliding_window: True is not served for qwen3"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: 'sliding_attention'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: .*yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling: .*dynamic"),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_parameters: llama3 needs factor, low_",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 50.0}}},
        "rope_parameters: .*full_attention",
    ),
    (
        {"rope_scaling": {"full_attention": {"rope_type": "default"}}},
        "rope_scaling: .*full_attention",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor: 0.5",
    ),
    ({"rope_parameters": {"rope_theta": "big"}}, "Expected `float`"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: .*gptq"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ({"attention_bias": True}, "attention_bias: True is not served for qwen3"),
    ({"num_key_value_heads": 3}, "num_heads: 4 is no multiple of num_kv_heads 3"),
    ({"head_dim": 7}, "head_dim: .*7 is odd"),
    ({"hidden_size": None}, "missing required field `hidden_size`"),
    ({"hidden_size": "24"}, "Expected `int`, got `str`"),
    ({"hidden_size": 0}, r"Expected `int` >= 1 - at `\$.dim`"),
    ({"num_attention_heads": 0}, r"Expected `int` >= 1 - at `\$.num_heads`"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REJECTED_QWEN3, ids=[message for _, message in REJECTED_QWEN3]
)
def test_a_setting_that_is_not_served_is_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    saved(tmp_path, **QWEN3)
    reconfigure(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=r"config\.json: .*" + message):
        hf.load(tmp_path)


def test_qwen2_without_its_bias_is_rejected(tmp_path: Path) -> None:
    saved(tmp_path, **QWEN2)
    reconfigure(tmp_path, attention_bias=True)
    assert hf.read_config(tmp_path).qkv_bias
    reconfigure(tmp_path, attention_bias=False)
    with pytest.raises(CheckpointError, match="attention_bias: False is not served for qwen2"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model_type": "qwen3", "vocab_size": NaN}', "\xff"]
)
def test_a_broken_config_is_rejected(tmp_path: Path, text: str) -> None:
    saved(tmp_path, **QWEN3)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: 10000000, and there are"),
        ({"vocab_size": 10**12}, r"shape .* config\.json asks for \[10{12}, "),
        ({"vocab_size": 10**18, "hidden_size": 10**9}, "checkpoint"),
        ({"intermediate_size": 10**13}, "config.json asks for"),
    ],
)
def test_a_configuration_that_asks_for_too_much_is_rejected_before_it_is_built(
    tmp_path: Path, keys: dict[str, int], words: str
) -> None:
    saved(tmp_path, **QWEN3)
    reconfigure(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=words):
        hf.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file or directory: config\.json"):
        hf.load(tmp_path)
    saved(tmp_path, **QWEN3)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no such file: model\.safetensors"):
        hf.load(tmp_path)


K_NORM, DOWN = "model.layers.1.self_attn.k_norm.weight", "model.layers.2.mlp.down_proj.weight"


def put(name: str, value: float) -> Callable[[Weights], object]:
    return lambda w: w[name].view(-1)[-1:].fill_(value)


BAD_WEIGHTS: list[tuple[Callable[[Weights], object], str]] = [
    (lambda w: w.pop(K_NORM), "missing tensors: " + K_NORM),
    (lambda w: w.pop("lm_head.weight"), r"missing tensors: lm_head\.weight"),
    (lambda w: [w.pop(name) for name in list(w) if "norm" in name], "and 10 more"),
    (
        lambda w: w.update({"model.layers.3.x": torch.ones(1)}),
        r"unexpected tensor "
        r"model\.layers\.3\.x",
    ),
    (
        lambda w: w.update({"a.bias": torch.ones(1)}),
        r"model\.safetensors: unexpected tensor "
        r"a\.bias",
    ),
    (
        lambda w: w.update({DOWN: w[DOWN].T.contiguous()}),
        DOWN + r": shape \[40, 24\], config\.json asks for \[24, 40\]",
    ),
    (lambda w: w.update({DOWN: w[DOWN].to(torch.int8)}), DOWN + r": dtype torch\.int8 is none of"),
    (put(DOWN, torch.nan), DOWN + ": NaN or infinity"),
    (put(K_NORM, torch.inf), K_NORM + ": NaN or infinity"),
    (put("model.norm.weight", -torch.inf), r"model\.norm\.weight: NaN or infinity"),
]


@pytest.mark.parametrize(
    ("change", "message"), BAD_WEIGHTS, ids=[message for _, message in BAD_WEIGHTS]
)
def test_a_bad_tensor_is_named(
    tmp_path: Path, change: Callable[[Weights], object], message: str
) -> None:
    saved(tmp_path, **QWEN3)
    hf.load(tmp_path)
    reweigh(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        hf.load(tmp_path)


def test_a_value_too_large_for_the_dtype_is_named(tmp_path: Path) -> None:
    saved(tmp_path, **QWEN3)
    reweigh(tmp_path, put(DOWN, 1e5))
    hf.load(tmp_path, torch.bfloat16)
    with pytest.raises(
        CheckpointError,
        match=DOWN + r": values up to 100000 do not fit "
        r"torch\.float16",
    ):
        hf.load(tmp_path, torch.float16)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short_is_corrupt(tmp_path: Path, keep: int) -> None:
    saved(tmp_path, **QWEN3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt"):
        hf.load(tmp_path)


def test_a_header_of_noise_is_corrupt(tmp_path: Path) -> None:
    saved(tmp_path, **QWEN3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt"):
        hf.load(tmp_path)


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    """The index file of a checkpoint in shards, and what it maps."""
    hf_model(**QWEN3).save_pretrained(folder, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())["weight_map"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _, shards = sharded(tmp_path)
    (tmp_path / shards[DOWN]).unlink()
    with pytest.raises(CheckpointError, match=f"no such file: {shards[DOWN]}"):
        hf.load(tmp_path)


def test_an_index_that_does_not_fit_its_shards_is_rejected(tmp_path: Path) -> None:
    path, shards = sharded(tmp_path)
    file = shards[DOWN]
    for changed, message in [
        ({**shards, "x.weight": file}, f"{file}: missing tensors: x.weight"),
        (
            {name: at for name, at in shards.items() if name != DOWN},
            f"{file}: tensors not in .*: {DOWN}",
        ),
        (
            {**shards, DOWN: "../other.safetensors"},
            r"'\.\./other\.safetensors' is not a file of "
            r"this folder",
        ),
        ({}, "weight_map is empty"),
        ([], r"index\.json: Expected `object`"),
    ]:
        path.write_text(json.dumps({"metadata": {}, "weight_map": changed}))
        with pytest.raises(CheckpointError, match=message):
            hf.load(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: Input data was truncated"):
        hf.load(tmp_path)


def test_a_corrupt_shard_is_named(tmp_path: Path) -> None:
    _, shards = sharded(tmp_path)
    shard = tmp_path / shards[DOWN]
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=f"{shards[DOWN]}: corrupt"):
        hf.load(tmp_path)


def test_two_loads_are_two_models(tmp_path: Path) -> None:
    saved(tmp_path, **QWEN3)
    first, second = hf.load(tmp_path), hf.load(tmp_path)
    _, before = prefilled(first, prompt(5))
    second.embedding.weight.zero_()
    assert torch.equal(prefilled(first, prompt(5))[1], before)
