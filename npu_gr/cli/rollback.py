"""npu-gr rollback: an instance serves the version before."""

from __future__ import annotations

import click

from npu_gr.cli.fleet import ROLLBACKS
from npu_gr.cli.options import API_KEY, run_async


@click.command(short_help="Serve the models, catalogue or vectors of before.")
@click.argument("what", type=click.Choice(list(ROLLBACKS)), default="models")
@click.option(
    "--url",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="Admin URL of an instance.",
)
@API_KEY
def rollback(what: str, url: str, api_key: str | None) -> None:
    """Serve the previous version of the models, the catalogue or the vectors of an instance.

    A second rollback undoes the first. Files stay as they are: npu-gr nightly SITE --undo puts
    those of the day before back. All instances of a router: npu-gr fleet rollback.
    """
    from npu_gr.replay.remote import call_rollback

    for name, version in run_async(lambda: call_rollback(url, api_key, ROLLBACKS[what])).items():
        click.echo(f"{name}: {version} serves")
