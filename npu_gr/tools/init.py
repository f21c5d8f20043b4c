"""Write a configuration to start from: `npu-gr init DIR`, or one that serves models which are there.

A model's folder is known by its files:
  ranker      config.json with our format, model.safetensors                    of npu-gr train rank
  generator   config.json of a Hugging Face model, items.jsonl, serve.yaml      of npu-gr train generate
  vectors     manifest.json, vectors.safetensors                                of npu-gr train retrieve or match
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from npu_gr.core import settings, shipped
from npu_gr.core.errors import ConfigError
from npu_gr.service.config import from_table
from npu_gr.tools.config_notes import notes

CONFIGURATION = "serve.yaml"
README = "README.md"
POPULAR = "popular.txt"
_COLUMN = 34  # of a comment behind a key


def init(folder: Path, models: Sequence[Path] = (), *, replace: bool = False) -> list[Path]:
    """Write `serve.yaml` and a README with the next commands.

    Args:
        folder: made if need be. Paths in the configuration begin where you stand, as those that are given do.
        models: their folders; none: a configuration with every key, to be filled.
        replace: overwrite files of these names.

    Returns:
        The files.

    Raises:
        ConfigError: a folder holds no model, two hold the same kind, or a file is there already or cannot be written.
    """
    texts = {
        CONFIGURATION: _of_models(folder, models) if models else _of_nothing(folder),
        README: _readme(folder, bool(models)),
    }
    paths = [folder / name for name in texts]
    if (there := [str(path) for path in paths if path.exists()]) and not replace:
        raise ConfigError(f"{', '.join(there)}: there already; --force replaces it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return paths


def section_of(folder: Path) -> tuple[str, Any]:
    """Return the key and the value of a configuration that serve the model of a folder.

    Raises:
        ConfigError: the folder holds no model that we know.
    """
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if {"manifest.json", "vectors.safetensors"} <= files:
        return "match", {"vectors": str(folder)}
    if "config.json" in files:
        about = _json(folder / "config.json")
        if "format" in about and "model" in about:
            return "checkpoint", str(folder)
        if "model_type" in about:
            return "generate", _generator(folder)
    raise ConfigError(
        f"{folder}: no model: neither config.json (of train rank or generate) nor "
        "manifest.json (of train retrieve or match)"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return found if isinstance(found, dict) else {}


def _retrieves(ranker: Path) -> bool:
    """Whether a ranker finds items, too."""
    shape = _json(ranker / "config.json").get("model")
    return isinstance(shape, dict) and shape.get("retrieval") is True


def _generator(folder: Path) -> dict[str, Any]:
    """The section that the trainer wrote; where the folder was moved, with its place of now."""
    path = folder / CONFIGURATION
    if not path.exists():
        raise ConfigError(f"{folder}: a generator without {CONFIGURATION}: write generate.catalogue and generate.codes")
    section = settings.read_table(path).get("generate")
    if not isinstance(section, dict) or not isinstance(section.get("catalogue"), str):
        raise ConfigError(f"{path}: needs a section generate with a catalogue")
    return section | {"checkpoint": str(folder), "catalogue": str(folder / Path(section["catalogue"]).name)}


def _of_models(folder: Path, models: Sequence[Path]) -> str:
    table: dict[str, Any] = {}
    for model in models:
        key, value = section_of(model)
        if key in table:
            raise ConfigError(f"{model}: a second model for {key}; an instance serves one of each kind")
        table[key] = value
    if not table.keys() & {"checkpoint", "generate"}:
        raise ConfigError("an instance ranks or generates: name the folder of a ranker or of a generator as well")
    if "checkpoint" in table and _retrieves(Path(table["checkpoint"])):
        sources = {"trunk": 200}  # `npu-gr judge --choose` says whether another model beside it helps
    else:
        sources = {name: 100 for name in ("generate", "match") if name in table}
    if "checkpoint" in table and sources:
        popular = next((one / POPULAR for one in (folder, *models) if (one / POPULAR).exists()), None)
        table["recommend"] = {"sources": sources} | ({"popular": str(popular)} if popular else {})
    table |= {
        "server": {"host": "127.0.0.1", "port": 8080, "admin_host": "127.0.0.1", "admin_port": 8081},
        "features": {"kind": "embedded", "path": str(folder / "history.db")},
    }
    from_table(table, CONFIGURATION)
    served = _and([key for key in table if key not in ("server", "features")])
    head = f"{shipped.schema_line()}# An instance with {served}. docs/configuration.md has every key.\n\n"
    return head + "\n".join(_explained(table, notes("instance"), "", ""))


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _explained(table: Mapping[str, Any], words: Mapping[str, str], at: str, indent: str) -> list[str]:
    """YAML lines, each with the words about its key."""
    lines = []
    for key, value in table.items():
        note = words.get(f"{at}{key}", "")
        is_section = isinstance(value, dict) and key != "sources"
        shown = "" if is_section else " " + yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        left = f"{indent}{key}:{shown}"
        lines.append(f"{left:{_COLUMN}} # {note}" if note else left)
        if is_section:
            lines += _explained(value, words, f"{at}{key}.", f"{indent}  ")
    return lines if indent else [*lines, ""]


def _of_nothing(folder: Path) -> str:
    """Every key, as the file that ships has it, with paths into the folder."""
    _, _, text = shipped.path("configs/cpu.yaml").read_text().partition("\n")
    return shipped.schema_line() + text.replace(".demo/", f"{folder}/").replace("the demo's checkpoint", "your models")


def _readme(folder: Path, has_models: bool) -> str:
    serve = folder / CONFIGURATION
    train = f"""Make a dataset of your log, and train a ranker on it (`npu-gr train all` trains every model of a
cascade, and writes a configuration of its own):

    npu-gr prepare LOG --out {folder / "data"}
    npu-gr train rank {folder / "data"} --out {folder / "ranker"}

"""
    return f"""# An npu_gr instance

{"" if has_models else train}Check the configuration and what it names, fill the history store, serve:

    npu-gr check-config --config {serve}
    npu-gr load {"LOG" if has_models else folder / "data"} --config {serve}
    npu-gr serve --config {serve}

Then http://127.0.0.1:8081/ shows how it does, and http://127.0.0.1:8080/openapi.json says what may be asked.
Every key of {serve} can be given by the environment as well, e.g. NPU_GR_SERVER__PORT=9000.
"""
