"""What does not convert is named, all of it at once, and nothing is guessed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from npu_gr.core.errors import CheckpointError
from npu_gr.model.config import inexact_fields
from npu_gr.model.convert.families import FAMILIES, convert
from npu_gr.model.convert.source import (
    ForeignCheckpoint,
    GivenNames,
    per_head_to_kind,
    read_gin,
    read_tensors,
)
from npu_gr.model.convert.torcheasyrec_files import TextMessage, parse_text
from tests.model.convert.test_parity import DATA, DLRM, RECSYS, RESEARCH, fixture, pipeline

FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "generative-recommenders": ("research", RESEARCH["research"]),
    "recsys-examples": ("recsys_fused", RECSYS),
    "dlrmv3": ("dlrm", DLRM),
    "torcheasyrec": ("torcheasyrec", pipeline("torcheasyrec")),
}
EASYREC = "model_config.dlrm_hstu."
QUERY = '  features { raw_feature { feature_name: "query'
CONTENT = f"{EASYREC}hstu.input_preprocessor.contextual_preprocessor."


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("generative-recommenders", "train_fn.main_module", "SASRec"),
        ("generative-recommenders", "train_fn.interaction_module_type", "MoL"),
        ("generative-recommenders", "hstu_encoder.normalization", "softmax_rel_bias"),
        ("generative-recommenders", "hstu_encoder.linear_activation", "none"),
        ("generative-recommenders", "train_fn.user_embedding_norm", "none"),
        ("generative-recommenders", "train_fn.gr_output_length", 40),
        ("dlrmv3", "scaling_seqlen", 0),
        ("recsys-examples", "NetworkArgs.scaling_seqlen", -1),
        ("recsys-examples", "NetworkArgs.target_group_size", 2),
        ("recsys-examples", "NetworkArgs.is_causal", False),
        ("recsys-examples", "RankingArgs.prediction_head_arch", [8, 8, 3]),
        ("recsys-examples", "RankingArgs.num_tasks", 1),
        ("recsys-examples", "RankingArgs.prediction_head_act_type", "tanh"),
        ("torcheasyrec", f"{EASYREC}hstu.stu.sla_k1", 64),
        ("torcheasyrec", f"{EASYREC}hstu.stu.max_attn_len", 64),
        ("torcheasyrec", f"{EASYREC}hstu.stu.contextual_seq_len", 2),
        ("torcheasyrec", f"{EASYREC}hstu.stu.something_new", 2),
        ("torcheasyrec", f"{EASYREC}hstu.attn_truncation_tail_len", 8),
        ("torcheasyrec", f"{EASYREC}hstu.positional_encoder.time_bucket_fn", "linear"),
        ("torcheasyrec", f"{EASYREC}fusion_mtl_tower.mlp", TextMessage({"hidden_units": [8, 8]})),
        (
            "torcheasyrec",
            f"{CONTENT}content_mlp",
            TextMessage({"parameterized_mlp": [TextMessage()]}),
        ),
        (
            "torcheasyrec",
            f"{CONTENT}action_mlp",
            TextMessage({"parameterized_mlp": [TextMessage()]}),
        ),
        (
            "torcheasyrec",
            f"{CONTENT}content_encoder",
            TextMessage({"pad_content_encoder": [TextMessage()]}),
        ),
        ("torcheasyrec", "model_config.ultra_hstu", TextMessage()),
        ("torcheasyrec", "model_config.hstu_match", TextMessage()),
    ],
)
def test_a_setting_that_does_not_convert_is_named(family: str, setting: str, value: object) -> None:
    name, settings = FIXTURES[family]
    message = (
        setting.rpartition(".")[2] if family == "torcheasyrec" else setting.replace(".", r"\.")
    )
    with pytest.raises(CheckpointError, match=message):
        FAMILIES[family](
            ForeignCheckpoint("it", fixture(name)[0], settings | {setting: value}), GivenNames()
        )


@pytest.mark.parametrize("family", FIXTURES)
def test_every_tensor_counts(family: str) -> None:
    """One that is missing, of another shape, broken or left over is named.

    Several are named together.
    """
    name, settings = FIXTURES[family]
    weights = fixture(name)[0]
    for key in weights:
        if "_additional_" in key or not weights[key].is_floating_point():
            continue  # of no feature; and a list of numbers
        for change in (
            None,
            weights[key].flatten()[:-1],
            torch.full_like(weights[key], float("nan")),
        ):
            spoilt = {k: v for k, v in weights.items() if k != key} | (
                {} if change is None else {key: change}
            )
            with pytest.raises(
                CheckpointError, match="|".join((key.rpartition(".")[2], "_time_feature"))
            ):
                FAMILIES[family](ForeignCheckpoint("it", spoilt, settings), GivenNames())
    spoilt = {f"x{k}": v for k, v in weights.items()}
    with pytest.raises(CheckpointError, match=r"(?s)missing tensor.*and \d+ more"):
        FAMILIES[family](ForeignCheckpoint("it", spoilt, settings), GivenNames())


def test_the_order_of_contextual_features_is_asked_for() -> None:
    tables = "_embedding_collection._data_parallel_embedding_collection.embeddings."
    context = {f"{tables}{name}.weight": torch.zeros(3, 16) for name in ("user_id", "age")}
    weights = fixture("recsys_fused")[0]
    with pytest.raises(CheckpointError, match="age, user_id: pass --set contextual_feature_names"):
        FAMILIES["recsys-examples"](
            ForeignCheckpoint("it", weights | context, RECSYS), GivenNames()
        )
    context[f"{tables}age.weight"] = torch.zeros(3, 15)
    named = RECSYS | {"contextual_feature_names": ["user_id", "age"]}
    with pytest.raises(CheckpointError, match=r"\[16, 15\] wide"):
        FAMILIES["recsys-examples"](ForeignCheckpoint("it", weights | context, named), GivenNames())


def test_actions_of_dlrmv3_are_sets_of_bits() -> None:
    key = "_hstu_transducer._input_preprocessor._action_encoder._combined_action_weights"
    for spoilt in ([1, 2, 3], [1, 1, 2], []):
        weights = fixture("dlrm")[0] | {key: torch.tensor(spoilt, dtype=torch.int64)}
        with pytest.raises(CheckpointError, match=r"action_weights|action encoder"):
            FAMILIES["dlrmv3"](ForeignCheckpoint("it", weights, DLRM), GivenNames())
    weights, _ = fixture("dlrm_context")
    lengths = {"contextual_feature_to_max_length": {"user_id": 1, "age": 1}}
    for settings, message in (
        ({}, "2 tokens of them and no names"),
        ({"contextual_feature_to_max_length": {"user_id": 2, "age": 1}}, "a token each"),
        (lengths | {"contextual_feature_to_min_uih_length": {"age": 20}}, "number of candidates"),
    ):
        with pytest.raises(CheckpointError, match=message):
            FAMILIES["dlrmv3"](ForeignCheckpoint("it", weights, DLRM | settings), GivenNames())


def test_names_must_fit() -> None:
    weights = fixture("recsys_fused")[0]
    for names in (
        GivenNames(actions=("a",)),
        GivenNames(tasks=("a",)),
        GivenNames(item_ids=np.arange(3)),
    ):
        with pytest.raises(CheckpointError, match=r"3|names"):
            FAMILIES["recsys-examples"](ForeignCheckpoint("it", weights, RECSYS), names)
    names = GivenNames(np.arange(40) + 7, tuple("abcde"), ("x", "y", "z"))
    made = FAMILIES["recsys-examples"](ForeignCheckpoint("it", weights, RECSYS), names)
    assert made.item_ids[0] == 7
    assert (made.model.config.actions, made.model.config.tasks) == (
        ("a", "b", "c", "d", "e"),
        ("x", "y", "z"),
    )


def test_projections_head_by_head_are_brought_into_order() -> None:
    kinds = torch.arange(24).view(2, 3, 4)  # [H, u | v | q | k of widths 1, 1, 0.., ...]
    got = per_head_to_kind(kinds.reshape(2 * 3, 4), 2, [1, 1, 0, 1])
    assert torch.equal(got, torch.stack([kinds[h, part] for part in range(3) for h in range(2)]))


def test_gin_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.gin").write_text(
        "# a comment\nimport x\ntrain_fn.n = 3  # three\nA.list = [\n  1, 2\n]\nA.f = "
        "@some.function()\nA.s = 'x'\n"
    )
    assert read_gin(tmp_path) == {"train_fn.n": 3, "A.list": [1, 2], "A.s": "x"}
    (tmp_path / "a.gin").write_text("a.b = some words\n")
    with pytest.raises(CheckpointError, match="line 1"):
        read_gin(tmp_path)
    (tmp_path / "b.gin").write_text("")
    with pytest.raises(CheckpointError, match="several gin files"):
        read_gin(tmp_path)


def test_a_distributed_checkpoint_is_read_whole(tmp_path: Path) -> None:
    """As dlrm_v3's trainer writes one: dense tensors in one file, tables in a folder of shards."""
    weights, _ = fixture("dlrm")
    sparse = {name: tensor for name, tensor in weights.items() if "embedding_collection" in name}
    dense = {name: tensor for name, tensor in weights.items() if name not in sparse}
    torch.save({"dense_dict": dense, "global_step": {"train": 1}}, tmp_path / "non_sparse.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        dcp_save({"sparse_dict": sparse}, checkpoint_id=tmp_path / "sparse", no_dist=True)
    with pytest.raises(CheckpointError, match="--trusted"):
        read_tensors(tmp_path)
    found = read_tensors(tmp_path, is_trusted=True)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert (
        convert("dlrmv3", tmp_path, GivenNames(), DLRM, is_trusted=True).model.config.num_items
        == 20
    )
    (tmp_path / "sparse/.metadata").write_bytes(b"spoilt")
    with pytest.raises(CheckpointError, match="sparse: cannot be read"):
        read_tensors(tmp_path, is_trusted=True)


def test_weights_are_found_and_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        convert("recsys-examples", tmp_path / "absent", GivenNames())
    with pytest.raises(CheckpointError, match="no weights"):
        read_tensors(tmp_path)
    torch.save(fixture("recsys_fused")[0], tmp_path / "whole.pt")
    for value in ("many", 3.5j, None):
        with pytest.raises(CheckpointError, match="does not convert"):
            convert(
                "recsys-examples",
                tmp_path,
                GivenNames(),
                RECSYS | {"NetworkArgs.kv_channels": value},
            )
    (tmp_path / "whole.pt").unlink()
    torch.save({"epoch": 1, "model_state_dict": {"module.a": torch.ones(1)}}, tmp_path / "some_ep3")
    assert read_tensors(tmp_path).keys() == {"a"}
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="several files"):
        read_tensors(tmp_path)
    (tmp_path / "other.pt").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        read_tensors(tmp_path)
    torch.save({"a": Path("x")}, tmp_path / "other.pt")  # an object: not read
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        read_tensors(tmp_path)


def test_a_run_of_torcheasyrec_is_read_where_its_trainer_leaves_it(tmp_path: Path) -> None:
    """The newest step's `model` folder, and `pipeline.config` in the folder of the steps."""
    weights, _ = fixture("torcheasyrec_causal")
    with pytest.raises(CheckpointError, match=r"no pipeline\.config"):
        convert("torcheasyrec", tmp_path, GivenNames(), is_trusted=True)
    (tmp_path / "pipeline.config").write_text((DATA / "torcheasyrec_causal.config").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        for step, state in ((90, {"old": torch.zeros(1)}), (100, weights)):
            dcp_save(state, checkpoint_id=tmp_path / f"model.ckpt-{step}/model", no_dist=True)
        dcp_save(
            {"moments": torch.zeros(1)},
            checkpoint_id=tmp_path / "model.ckpt-100/optimizer",
            no_dist=True,
        )
    for folder in (tmp_path, tmp_path / "model.ckpt-100"):
        made = convert("torcheasyrec", folder, GivenNames(), is_trusted=True)
        assert inexact_fields(made.model.config) == [], (
            "with causal context it is served with a prefix cache"
        )
    longer = {"model_config.dlrm_hstu.max_seq_len": 20}
    assert (
        convert(
            "torcheasyrec", tmp_path, GivenNames(), longer, is_trusted=True
        ).model.config.scaling_seqlen
        == 20
    )
    (tmp_path / "pipeline.config").write_text("model_config {\n  dlrm_hstu {")
    with pytest.raises(CheckpointError, match="line 2: a name was expected"):
        convert("torcheasyrec", tmp_path, GivenNames(), is_trusted=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('feature_names: '
          '"uih_seq__video_id"', 'feature_names: ["uih_seq__video_id", "x"]'), "group uih has"),
        (('group_name: "contextual"', 'group_name: "more"'), "feature group more"),
        (("group_type: DEEP", "group_type: SEQUENCE"), "contextual: only of group_type DEEP"),
        (('feature_name: "age"', 'feature_name: "age" zch {}'), "feature age: id_feature, zch"),
        (('id_feature { '
          'feature_name: "age"', 'raw_feature { feature_name: "age"'), "feature age: raw_feature"),
        (('vocab_list: ["oslo", ', "vocab_list: ["), "city: 2 values, and a table of 5 rows"),
        (('"video_id_emb" embedding_dim: 6 num_buckets: 20 } }\n' + QUERY,
          '"other" embedding_dim: 6 num_buckets: 20 } }\n' + QUERY), "different tables"),
        (('task_name: "like" label_name: "cand_seq__action_weight" num_class: 2',
          'task_name: "like" label_name: "cand_seq__action_weight" '
          'num_class: 3'), "num_class = 3|shape"),
    ],
)  # fmt: skip
def test_a_feature_that_does_not_convert_is_named(change: tuple[str, str], message: str) -> None:
    text = (DATA / "torcheasyrec.config").read_text()
    assert change[0] in text
    settings = {"pipeline": parse_text(text.replace(*change))}
    with pytest.raises(CheckpointError, match=message):
        FAMILIES["torcheasyrec"](
            ForeignCheckpoint("it", fixture("torcheasyrec")[0], settings), GivenNames()
        )


def test_text_messages_are_read() -> None:
    text = """a: 1 a: [2, 3] # a comment
    b < c: 'x' "y" > ; d { e: true, f: -1.5e-3 } d: { f: NAME }"""
    read = parse_text(text)
    assert (read.many("a"), read.one("a"), read.message("b").one("c")) == ([1, 2, 3], 3, "xy")
    assert [(one.one("e"), one.one("f")) for one in read.many("d")] == [
        (True, -0.0015),
        (None, "NAME"),
    ]
    assert read.message("none").many("at all") == read.messages("a") == []
    read.put("b.c", [5, 6])
    read.put("x.y", 7)
    assert (read.message("b").many("c"), read.message("x").one("y")) == ([5, 6], 7)
    for spoilt in ("a {", "a: [1", "a 1", "}", 'a: "x', "a:", ": 1", "a: }", "a { " * 99):
        with pytest.raises(ValueError, match="line 1: "):
            parse_text(spoilt)
