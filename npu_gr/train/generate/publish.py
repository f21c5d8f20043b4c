"""Write a trained generator as a folder that the service starts from.

    config.json, model.safetensors   the decoder, as a Hugging Face checkpoint
    items.jsonl                      the catalogue: items, semantic IDs, and the single-valued
                                     features as attributes
    centroids.safetensors            centroids of the semantic IDs, to code items that come later;
                                     absent for ready-made codes and for nodes
    given_codes.json                 the codes, if the tokens are their nodes (`nodes.py`)
    serve.yaml                       a configuration that serves the generator
    report.json                      the figures of the evaluation

All files are written to a temporary folder and then renamed, the configuration last, so an
interrupted run leaves no half-written file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from npu_gr.catalogue import centroids
from npu_gr.catalogue.centroids import Centroids, CodedFeature
from npu_gr.catalogue.names import ACTIONS_FILE, EMPTY, ItemNames
from npu_gr.catalogue.records import read_items
from npu_gr.core import shipped
from npu_gr.core.errors import DataError
from npu_gr.core.request import Normalise
from npu_gr.history_store.interactions import ItemValues
from npu_gr.model import hf, hf_files
from npu_gr.train.data import count_trained
from npu_gr.train.generate.codes import codes_text
from npu_gr.train.generate.nodes import node_count
from npu_gr.train.generate.train import GenerateOptions, TrainedGenerator
from npu_gr.train.generate.warm import GeneratorStart, KnownItems
from npu_gr.train.options import CONFIGURATION, example, next_command

CATALOGUE = "items.jsonl"
REPORT = "report.json"
GIVEN_CODES = "given_codes.json"  # in the format of `--codes`
# in the order in which they are renamed
FILES = (
    hf_files.WEIGHTS,
    hf_files.CONFIG,
    ACTIONS_FILE,
    centroids.FILE,
    GIVEN_CODES,
    CATALOGUE,
    REPORT,
    CONFIGURATION,
)
OPTIONAL_FILES = (centroids.FILE, GIVEN_CODES)
MAX_CUT_ITEMS = 8  # items by which a long prompt is cut, see `model/history_tokenizer.py`


def prepare(folder: Path) -> None:
    """Make the folder and check that it can be written, before time is spent on the training.

    Raises:
        DataError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror}") from error


def publish(
    trained: TrainedGenerator,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    folder: Path,
) -> dict[str, Any]:
    """Write the folder of a generator.

    Args:
        trained: Generator to write.
        features: Side features of items; the single-valued ones become attributes of the catalogue.
        options: Options that `trained` was trained with.
        folder: Folder to write, made if it does not exist; files of the same names are replaced.

    Returns:
        The content of `serve.yaml`.

    Raises:
        DataError: the folder cannot be written.
    """
    table = configuration(trained, options, folder)
    prepare(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
            new = Path(temporary)
            hf.save(trained.model, new)
            (new / ACTIONS_FILE).write_text(json.dumps(trained.log.names_of_actions))
            if trained.codes.centroids:
                coded = [
                    CodedFeature(feature.name, feature.values)
                    for feature in features
                    if feature.values
                ]
                Centroids(trained.codes.centroids, tuple(coded)).save(new)
                # safetensors creates it with mode 0600; give it the mode of the other files
                (new / centroids.FILE).chmod((new / ACTIONS_FILE).stat().st_mode)
            (new / CATALOGUE).write_text("".join(catalogue_lines(trained, features)))
            (new / REPORT).write_text(json.dumps(trained.report.as_dict(), indent=2) + "\n")
            (new / CONFIGURATION).write_text(
                shipped.schema_line() + yaml.safe_dump(table, sort_keys=False)
            )
            if trained.codes.given is not None:
                (new / GIVEN_CODES).write_text(
                    codes_text(trained.log.item_ids, trained.codes.given)
                )
            for name in OPTIONAL_FILES:
                if not (new / name).exists():
                    (folder / name).unlink(missing_ok=True)
            for name in FILES:
                if (new / name).exists():
                    os.replace(new / name, folder / name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    return table


def configuration(
    trained: TrainedGenerator, options: GenerateOptions, folder: Path
) -> dict[str, Any]:
    """Make the configuration of an instance that generates and does not rank.

    Args:
        trained: Generator and its codes.
        options: Options of its training, which set the prompt's length and the beam width.
        folder: Folder to serve from.

    Returns:
        A table for `npu_gr/service/config.py`.
    """
    return {
        "generate": section(trained.codes.code_count, trained.codes.normalise, options, folder),
        "history_store": {"path": str(folder / "history.db")},
    }


def section(
    code_count: Sequence[int], normalise: Normalise, options: GenerateOptions, folder: Path
) -> dict[str, Any]:
    """Make the section `generate` of an instance's configuration.

    Args:
        code_count: Number of tokens of each level.
        normalise: Tokens over which the search normalises, as the training did.
        options: Options of the generator's training, which set the prompt's length and the beam
            width.
        folder: Folder to serve from.
    """
    made = {
        "checkpoint": str(folder),
        "catalogue": str(folder / CATALOGUE),
        "codes": list(code_count),
        "max_beams": max(512, options.beam_width),
        "beam_width": options.beam_width,
        "max_prompt_tokens": options.history_items * len(code_count),
        "cut_step_items": min(MAX_CUT_ITEMS, options.history_items),
    }
    return made if normalise == "vocabulary" else {**made, "normalise": normalise}


def start_at(folder: Path, code_count: Sequence[int]) -> GeneratorStart:
    """Read the folder of a generator to train it on.

    Args:
        folder: Folder that `publish` wrote.
        code_count: Number of codes of each level.

    Raises:
        NpuGrError: it cannot be read.
    """
    items = read_items(folder / CATALOGUE)
    known, nodes = KnownItems(items.item_ids, items.sids), None
    count = tuple(code_count)
    if (path := folder / GIVEN_CODES).exists():
        try:
            codes = json.loads(path.read_bytes())
            sids = np.array([codes[str(item)] for item in items.item_ids.tolist()], np.int32)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: are no codes of the items of {CATALOGUE}: {error}") from error
        known, nodes = KnownItems(items.item_ids, sids), items.sids
        count = node_count(code_count, len(sids))
    return GeneratorStart(known, nodes, count, hf.load(folder))


def how_to_serve(table: dict[str, Any], trained: TrainedGenerator, names: ItemNames = EMPTY) -> str:
    """Explain how to serve the generator: the configuration, the command, and a request to try."""
    history = example(trained.log, names).history
    body = {"user_id": "me", "num_items": 10, "history": history}
    return f"""
{yaml.safe_dump({"generate": table["generate"]}, sort_keys=False)}
To serve it with a ranker, add this section to the ranker's configuration. To serve it alone:

{next_command(Path(table["generate"]["checkpoint"]), "/v1/generate", body)}"""


def catalogue_lines(trained: TrainedGenerator, features: Sequence[ItemValues]) -> list[str]:
    """Write the catalogue as lines of JSONL, which `catalogue/records.py` reads.

    An item's `order` is its number of uses.
    """
    log = trained.log
    uses = count_trained(log, log.items, log.num_items).tolist()
    single = [
        feature
        for feature in features
        if all(len(values) < 2 for values in feature.of_item.values())
    ]
    lines = []
    for row, (item, sid) in enumerate(
        zip(log.item_ids.tolist(), trained.codes.sids.tolist(), strict=True)
    ):
        record: dict[str, Any] = {"item_id": item, "sid": sid, "order": uses[row]}
        if single:
            record["attributes"] = {
                feature.name: feature.values[values[0]]
                if (values := feature.of_item.get(item))
                else ""
                for feature in single
            }
        lines.append(json.dumps(record) + "\n")
    return lines
