"""npu-gr shadow: a ranker beside the served one, before it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import API_KEY, run_async

if TYPE_CHECKING:
    from npu_gr.core.served import ShadowInfo

_URL = click.option(
    "--url",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="Admin URL of an instance.",
)


@click.group(short_help="Score ranks with one more ranker; promote or drop it.")
def shadow() -> None:
    """Score a share of an instance's ranks with one more ranker; promote or drop it."""


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    return _URL(API_KEY(command))


@shadow.command("open", short_help="Load a ranker as the shadow.")
@click.argument("checkpoint")
@click.option(
    "--share",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Fraction of the users whose ranks it scores.",
)
@_shared
def open_(checkpoint: str, share: float, url: str, api_key: str | None) -> None:
    """Load CHECKPOINT, a folder on the instance's machine, beside the served ranker.

    It scores ranks when the device has nothing else to do. No client waits for it or sees it.
    """
    _call(url, api_key, "POST", "", {"path": checkpoint, "share": share})


@shadow.command(short_help="Show how it compares.")
@_shared
def show(url: str, api_key: str | None) -> None:
    """Show what the shadow has scored, and how it differs from the served ranker."""
    _call(url, api_key, "GET")


@shadow.command(short_help="Serve it.")
@_shared
def promote(url: str, api_key: str | None) -> None:
    """Serve the shadow in the place of the served ranker.

    A guard watches it for five minutes, and puts the ranker before it back if it is worse.
    """
    _call(url, api_key, "POST", "/promote")


@shadow.command(short_help="Free it.")
@_shared
def drop(url: str, api_key: str | None) -> None:
    """Free the shadow and its prefixes."""
    _call(url, api_key, "DELETE")


def _call(
    url: str, api_key: str | None, method: str, path: str = "", body: object = None
) -> None:
    from npu_gr.replay.remote import call_admin

    found = run_async(lambda: call_admin(url, api_key, method, f"v1/models/shadow{path}", body))
    for line in lines_of(found):
        click.echo(line)


def lines_of(found: ShadowInfo) -> list[str]:
    """Describe a shadow in words."""
    last = [f"rolled back: {found.rolled_back}"] if found.rolled_back else []
    if found.state == "none":
        return ["there is no shadow", *last]
    skipped = ", ".join(f"{num} {reason}" for reason, num in found.skipped.items() if num)
    if found.state == "guarding":
        what = f"{found.version} serves and is watched for {found.guarded_for_s or 0:.0f} s more"
    else:
        what = f"{found.version} ({found.path}) scores {found.share:.0%} of the users"
    lines = [f"{what}, against {found.against}", f"scored {found.scored}; skipped: {skipped or 0}"]
    figures = {
        "best 10 shared": found.top_overlap,
        "same first": found.same_first,
        "correlation": found.correlation,
        "mean difference, sd": found.mean_difference,
        "median drift, sd": found.median_drift,
    }
    lines += [f"{name}: {value:.3f}" for name, value in figures.items() if value is not None]
    if found.answers:
        lines.append(f"npu-gr replay compare {found.answers}/served {found.answers}/shadow")
    return lines + last
