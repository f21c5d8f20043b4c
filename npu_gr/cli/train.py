"""npu-gr train: one command for each model that an instance can serve."""

from __future__ import annotations

from pathlib import Path

import click

from npu_gr.cli.options import FILE, THREAD_COUNT, VALUE_COLUMN

OVERRIDE = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one training option.")
ITEMS = click.option("--items", type=FILE, help="RecBole .item file with side features.")
ITEM_FEATURES = click.option("--item-features", default="", help="Its columns, comma-separated.")
THREADS = click.option("--threads", default=2, show_default=True, type=THREAD_COUNT)


@click.group()
def train() -> None:
    """Train a model from interaction logs."""


@train.command("all")
@click.argument("data", type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder of the site.")
@OVERRIDE
@THREADS
def train_all(data: Path, out: Path, overrides: tuple[str, ...], threads: int) -> None:
    """Train every model from DATA, which npu-gr prepare wrote, into a folder that npu-gr serve starts from.

    Models are trained side by side. What was made from the same data and options before is not made again, so after an
    interruption the same command goes on; until it ends, what was served stays.
    """
    from rich.console import Console

    from npu_gr.train.site.make import train_site

    train_site(data, out, overrides, threads, Console(width=max(110, Console().width)))


@train.command("rank")
@click.argument("log", type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder of the checkpoint.")
@ITEMS
@ITEM_FEATURES
@click.option("--preset", default="demo", show_default=True, type=click.Choice(["demo", "long"]))
@OVERRIDE
@VALUE_COLUMN
@THREADS
def train_rank(
    log: Path,
    out: Path,
    items: Path | None,
    item_features: str,
    preset: str,
    overrides: tuple[str, ...],
    value_column: str,
    threads: int,
) -> None:
    """Train an HSTU ranker on an interaction LOG (.inter or .jsonl), and print its figures beside the baselines'."""
    import torch
    from rich.console import Console

    from npu_gr.core.settings import override
    from npu_gr.dataset.log import read_log
    from npu_gr.features.interactions import read_item_features
    from npu_gr.model.weights import save
    from npu_gr.tools.demo import training_progress
    from npu_gr.train.rank.train import DEMO, LONG
    from npu_gr.train.rank.train import train_rank as work

    torch.set_num_threads(threads)
    options = override({"demo": DEMO, "long": LONG}[preset], overrides)
    features = read_item_features(items, _columns(item_features)) if items else []
    console = Console()
    with training_progress(console) as show:
        checkpoint, evaluation = work(read_log(log, value_column=value_column), features, options, show)
    console.print(evaluation.table())
    click.echo(f"checkpoint {save(checkpoint, out)} in {out}")


@train.command("generate")
@click.argument("log", required=False, type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder that the service starts from.")
@click.option("--codes", type=FILE, help='Ready-made: a catalogue, or JSON {"item": [code, ...]}.')
@ITEMS
@ITEM_FEATURES
@click.option("--preset", default="movielens", show_default=True, type=click.Choice(["movielens", "beauty"]))
@OVERRIDE
@VALUE_COLUMN
@THREADS
def train_generate(
    log: Path | None,
    out: Path,
    codes: Path | None,
    items: Path | None,
    item_features: str,
    preset: str,
    overrides: tuple[str, ...],
    value_column: str,
    threads: int,
) -> None:
    """Train a semantic-ID generator on an interaction LOG, and print its figures beside the baselines'.

    LOG is .inter, .jsonl, or .json {"user": [item, ...]}. Without it: MovieLens-100K of the package recbole.
    """
    import torch
    from rich.console import Console

    from npu_gr.core.settings import override
    from npu_gr.dataset.log import read_log
    from npu_gr.features.interactions import movielens_100k, read_item_features
    from npu_gr.tools.demo import training_progress
    from npu_gr.train.generate.publish import how_to_serve, prepare, publish
    from npu_gr.train.generate.train import BEAUTY, MOVIELENS, train_generator

    torch.set_num_threads(threads)
    options = override({"movielens": MOVIELENS, "beauty": BEAUTY}[preset], overrides)
    interactions = read_log(log or movielens_100k(), value_column=value_column)
    features = read_item_features(items, _columns(item_features)) if items else []
    prepare(out)
    console = Console()
    with training_progress(console) as show:
        trained = train_generator(interactions, features, options, codes, show)
    console.print(trained.report.table())
    click.echo(how_to_serve(publish(trained, features, options, out), trained))


@train.command("match")
@click.argument("source", type=FILE)
@click.argument("target", type=FILE)
@click.option("--test", type=FILE, help="Test edges of the target; without it, one edge of each user is held out.")
@click.option("--out", required=True, type=FILE, help="Folder of the vectors, or of an ablation's records.")
@click.option("--preset", default="sccdr", show_default=True, help="sccdr, or another arm of the ablation by name.")
@OVERRIDE
@click.option("--density", "densities", multiple=True, type=float, help="Share of the target's edges; repeatable.")
@click.option("--num-validation", default=2000, show_default=True, help="Validate on at most so many users.")
@click.option("--ablate", "is_ablation", is_flag=True, help="Run every arm, seed and density, and write the table.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Of an ablation.")
@click.option("--user-column", default="user_id", show_default=True)
@click.option("--item-column", default="item_id", show_default=True)
@click.option("--tenant", default="", show_default=True, help="Of all users in the files.")
@click.option("--tenant-column", help="Column with the tenant of each line's user, instead.")
@THREADS
def train_match(
    source: Path,
    target: Path,
    test: Path | None,
    out: Path,
    preset: str,
    overrides: tuple[str, ...],
    densities: tuple[float, ...],
    num_validation: int,
    is_ablation: bool,
    seeds: int,
    user_column: str,
    item_column: str,
    tenant: str,
    tenant_column: str | None,
    threads: int,
) -> None:
    """Train SCCDR from the interactions of a SOURCE and a TARGET domain that share users.

    Files are TSV (user, item), RecBole atomic files or JSONL. After an interruption, the same command goes on.
    """
    import torch
    from rich.console import Console

    from npu_gr.train.match.command import run_ablation, run_training
    from npu_gr.train.match.domains import read_domains

    torch.set_num_threads(threads)
    if tenant and tenant_column:
        raise click.UsageError("--tenant and --tenant-column exclude each other")
    domains = read_domains(
        source,
        target,
        test,
        user_column=user_column,
        item_column=item_column,
        tenant=tenant,
        tenant_column=tenant_column,
    )
    console = Console()
    if is_ablation:
        run_ablation(domains, out, overrides, densities or (0.4, 1.0), seeds, num_validation, console)
    else:
        run_training(domains, out, preset, overrides, (densities or (1.0,))[0], num_validation, console)


def _columns(names: str) -> list[str]:
    return [name for name in names.split(",") if name]
